"""The launchers: processes of the one C program that clone aethers. One per core, shared by all launches."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import LaunchFailed, Unavailable
from dsec.wire.aether import PAIR, Paired, Reaped, Spawn, Spawned

log = logging.getLogger(__name__)
CONTROL_FD: Final = 3
TIMEOUT_S: Final = 20.0
F_ADD_SEALS: Final = 1033
SEALS: Final = 0x1 | 0x2 | 0x4 | 0x8
"""seal, shrink, grow, write: what runs can not be changed, by anybody."""

_messages = msgspec.msgpack.Decoder(list[object])


def agent_binary() -> Path:
    """aether, as `make agent` built it, or as the package carries it; DSEC_AGENT names another build."""
    if named := os.environ.get("DSEC_AGENT"):
        return Path(named)
    here = Path(__file__)
    for path in (here.parents[2] / "data" / "aether", here.parents[4] / "build" / "aether"):
        if path.is_file():
            return path
    raise Unavailable("the agent is not built: make agent")


def sealed_copy(path: Path) -> int:
    """A memfd that holds the program."""
    fd = os.memfd_create("aether", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    data = path.read_bytes()
    while data:
        data = data[os.write(fd, data) :]
    import fcntl

    fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
    return fd


class Launcher:
    """One launcher process. `spawn` may be called from any thread; reaped children are told on the loop."""

    def __init__(
        self,
        program: int,
        join: list[int],
        on_reaped: Callable[[int, int], None],
        on_ended: Callable[[Launcher], None],
    ) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[tuple[int, ...]]] = {}
        self._sequence = itertools.count(1)
        self._on_reaped = on_reaped
        self._on_ended = on_ended
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with contextlib.closing(theirs):
                self.pid = self._start(program, theirs.fileno())
            self._join(join)
        except BaseException:
            ours.close()
            raise
        self._socket = ours

    @staticmethod
    def _start(program: int, control: int) -> int:
        """posix_spawn: no copy of this process is made, however large it is."""
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),  # sandboxes outlive us: they must not hold whoever reads our output
            (os.POSIX_SPAWN_DUP2, control, CONTROL_FD),
        ]
        path = f"/proc/self/fd/{program}"
        env = {"ASAN_OPTIONS": "detect_leaks=0"}  # read by the sanitizers' build alone
        return os.posix_spawn(path, ["aether", "launcher"], env, file_actions=actions, setsid=True)

    def _join(self, fds: list[int]) -> None:
        for fd in fds:
            os.write(fd, str(self.pid).encode())

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._socket.setblocking(False)
        loop.add_reader(self._socket.fileno(), self._readable)

    def detach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The launcher ends when its control socket closes; its aethers live on."""
        loop.remove_reader(self._socket.fileno())
        self._close("the server is stopping")

    def _close(self, why: str) -> None:
        self._socket.close()
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(Unavailable(why))
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _readable(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    256, socket.CMSG_SPACE(8), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:  # it ended with requests unread
                data, ancillary = b"", []
            if not data:
                log.error("a launcher (pid %d) has ended", self.pid)
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
                self._close("the launcher has ended")
                self._on_ended(self)
                return
            self._take(data, [fd for _, _, raw in ancillary for fd in array.array("i", raw)])

    def _take(self, data: bytes, fds: list[int]) -> None:
        message = _messages.decode(data)
        if message[0] == "reaped":
            reaped = msgspec.convert(message, Reaped)
            self._on_reaped(reaped.pid, reaped.status)
            return
        if message[0] == "paired":
            paired = msgspec.convert(message, Paired)
            self._answer(paired.sequence, paired.errno, "clone of a pair of namespaces", fds, tuple(fds))
            return
        spawned = msgspec.convert(message, Spawned)
        result = (spawned.pid, *fds)
        self._answer(spawned.sequence, spawned.errno, "clone of a new aether", fds, result)

    def _answer(self, sequence: int, error: int, what: str, fds: list[int], result: tuple[int, ...]) -> None:
        waiting = self._waiting.pop(sequence, None)
        if waiting is None or waiting.cancelled():
            for fd in fds:  # nobody waits: closing the control socket has ended that aether already
                os.close(fd)
        elif error:
            waiting.set_exception(LaunchFailed(f"{what}: {os.strerror(error)}"))
        else:
            waiting.set_result(result)

    def spawn(
        self, owner_uid: int, control: socket.socket, pair: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """A new aether that waits for its CONFIG on `control`: its pid, and a pidfd that the caller owns.

        pair: descriptors of a user namespace and of a network namespace that it owns, to enter; without them
        both are made anew.
        """
        pid, pidfd = self._ask(owner_uid, [control.fileno(), *(pair or ())])
        return pid, pidfd

    def pair(self) -> tuple[int, int]:
        """A new user namespace, with no ids mapped yet, and a network namespace that it owns: descriptors
        that the caller owns."""
        user, net = self._ask(PAIR, [])
        return user, net

    def _ask(self, owner: int, fds: list[int]) -> tuple[int, ...]:
        sequence = next(self._sequence)
        answer: Future[tuple[int, ...]] = Future()
        self._waiting[sequence] = answer
        message = msgspec.msgpack.encode(Spawn(sequence, owner))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with self._lock:
                self._send(message, rights)
            return answer.result(TIMEOUT_S)
        except TimeoutError:
            raise LaunchFailed(f"the launcher did not answer within {TIMEOUT_S:.0f} s") from None
        except OSError as e:  # it has ended; another takes its place in a moment
            raise Unavailable(f"the launcher: {e}") from e
        finally:
            self._waiting.pop(sequence, None)

    def _send(self, message: bytes, rights: list[tuple[int, int, array.array[int]]]) -> None:
        while True:
            try:
                self._socket.sendmsg([message], rights)
            except BlockingIOError:  # its queue is full of requests: it takes them one by one
                import select

                select.select([], [self._socket], [], TIMEOUT_S)
            else:
                return
