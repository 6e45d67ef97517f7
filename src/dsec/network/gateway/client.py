"""The server's side of the gateway: starts it or finds it again, tells it policies, hears what it refused."""

from __future__ import annotations

import array
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import Unavailable
from dsec.core.network import Policy
from dsec.network.gateway import protocol as p

log = logging.getLogger(__name__)
START_S: Final = 20.0
ANSWER_S: Final = 5.0
RESTART_PAUSE_S: Final = 0.5


class Listeners(msgspec.Struct, frozen=True):
    """Sockets made in the router's namespace, for each IP version one."""

    dns_udp: list[socket.socket]
    dns_tcp: list[socket.socket]
    proxy: list[socket.socket]

    def all(self) -> list[socket.socket]:
        return [*self.dns_udp, *self.dns_tcp, *self.proxy]

    def close(self) -> None:
        for sock in self.all():
            sock.close()


class Gateway:
    """Calls block, and may be made from any thread. A thread of its own hears the gateway.

    listen: makes Listeners, for a gateway that is new. refused: told of what sandboxes were not let.
    """

    def __init__(
        self,
        run: Path,
        settings: p.Settings,
        *,
        pins_fd: int,
        listen: Callable[[], Listeners],
        refused: Callable[[p.Refused], None],
    ) -> None:
        self.path = run / "gateway.sock"
        self._run = run
        self._settings = settings
        self._pins_fd = pins_fd
        self._listen = listen
        self._refused = refused
        self._sequence = itertools.count(1)
        self._lock = threading.RLock()
        self._waiting: dict[int, Future[None]] = {}
        self._policies: dict[int, p.SetPolicy] = {}
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._hearing: threading.Thread | None = None
        self.proxy_port = 0
        self.pid = 0

    def open(self) -> frozenset[int]:
        """Find or start it; the indexes that it knows of an earlier life. Raises Unavailable."""
        with self._lock:
            known = self._join() or self._start()
            self._hear()
            return known

    def _join(self) -> frozenset[int] | None:
        """One that lives, with this life's map of pins."""
        try:
            welcome = self._connect([self._pins_fd], listeners=0)
        except (OSError, msgspec.MsgspecError, Unavailable):
            return None
        if not welcome.has_listeners or welcome.version != p.VERSION:
            self._send(p.End())
            self._drop()
            return None
        return frozenset(welcome.indexes)

    def _start(self) -> frozenset[int]:
        self._end_wedged()
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listeners = self._listen()
        try:
            with _short(self.path) as name:
                listener.bind(name)
            listener.listen(4)
            self._process = _spawn(listener, self._run / "gateway.log")
            (self._run / "gateway.pid").write_text(f"{self._process.pid} {_start_time(self._process.pid)}\n")
            fds = [self._pins_fd, *(s.fileno() for s in listeners.all())]
            self._connect(fds, listeners=len(listeners.proxy), patience=START_S)
        except (OSError, msgspec.MsgspecError) as e:
            raise Unavailable(f"the network's gateway did not start: {e}") from e
        finally:
            listener.close()
            listeners.close()
        return frozenset()

    def _connect(self, fds: list[int], *, listeners: int, patience: float = ANSWER_S) -> p.Welcome:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(patience)
            with _short(self.path) as name:
                sock.connect(name)
            settings = msgspec.structs.replace(self._settings, listeners=listeners)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            sock.sendmsg([p.encode(settings)], rights)
            welcome = p.from_gateway(sock.recv(p.MAX_MESSAGE))
            if not isinstance(welcome, p.Welcome):
                raise Unavailable("the network's gateway said something else than welcome")
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        self._socket, self.proxy_port, self.pid = sock, welcome.proxy_port, welcome.pid
        return welcome

    def _end_wedged(self) -> None:
        """One that does not answer, if it is still the process that was started."""
        with contextlib.suppress(OSError, ValueError):
            pid, started = map(int, (self._run / "gateway.pid").read_text().split())
            if _start_time(pid) == started:
                os.kill(pid, 9)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    # --- policies ---

    def set_policy(self, index: int, addresses: tuple[str, str], policy: Policy) -> None:
        """In force when this returns. Raises Unavailable; it is in force once the gateway is back, then."""
        message = p.SetPolicy(next(self._sequence), index, *addresses, policy.names, policy.drop)
        answer: Future[None] = Future()
        with self._lock:
            self._policies[index] = message
            self._waiting[message.sequence] = answer
            self._send(message)
        try:
            answer.result(ANSWER_S)
        except TimeoutError:
            raise Unavailable("the network's gateway does not answer; the rules are kept for it") from None
        finally:
            self._waiting.pop(message.sequence, None)

    def remove(self, index: int) -> None:
        with self._lock:
            if self._policies.pop(index, None) is not None:
                self._send(p.Remove(index))

    def forget_all_but(self, known: frozenset[int], claimed: Iterable[int]) -> None:
        """Of what a gateway knew from before, drop what no sandbox has."""
        for index in known - frozenset(claimed):
            self._send(p.Remove(index))

    def _send(self, message: p.ToGateway) -> None:
        with self._lock:
            if self._socket is None:
                return
            try:
                self._socket.send(p.encode(message))
            except OSError as e:
                log.warning("the network's gateway: %s", e)

    # --- hearing ---

    def _hear(self) -> None:
        self._hearing = threading.Thread(target=self._listening, name="gateway", daemon=True)
        self._hearing.start()

    def _listening(self) -> None:
        while True:
            sock = self._socket
            if sock is None or self._closing:
                return
            try:
                data = sock.recv(p.MAX_MESSAGE)
            except OSError:
                data = b""
            if data:
                self._heard(data)
            elif self._closing or not self._again():
                return

    def _heard(self, data: bytes) -> None:
        try:
            message = p.from_gateway(data)
        except msgspec.MsgspecError as e:
            log.error("the network's gateway said what was not understood: %s", e)
            return
        if isinstance(message, p.Done):
            answer = self._waiting.get(message.sequence)
            if answer is not None and not answer.done():
                answer.set_result(None)
        elif isinstance(message, p.Refused):
            self._refused(message)

    def _again(self) -> bool:
        """It ended: start another, and tell it all that this one knew."""
        log.error("the network's gateway (pid %d) has ended; another takes its place", self.pid)
        while not self._closing:
            with self._lock:
                self._drop()
                try:
                    self._start()
                except (Unavailable, OSError) as e:
                    log.error("%s", e)
                else:
                    for message in self._policies.values():
                        self._send(message)
                    return True
            time.sleep(RESTART_PAUSE_S)
        return False

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait()
            self._process = None

    def close(self, *, keep: bool) -> None:
        """keep: sandboxes live on, so it does."""
        self._closing = True
        if not keep:
            self._send(p.End())
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._socket.close()
                self._socket = None
        if self._hearing is not None:
            self._hearing.join(ANSWER_S)
        if keep:
            return
        if self._process is not None:
            try:
                self._process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        else:
            self._wait_gone()
        for name in ("gateway.sock", "gateway.pid", "gateway.log"):
            (self._run / name).unlink(missing_ok=True)

    def _wait_gone(self) -> None:
        """One that an earlier life started is nobody's child."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self.pid)
            try:
                import select

                if not select.select([pidfd], [], [], ANSWER_S)[0]:
                    self._end_wedged()
            finally:
                os.close(pidfd)


def _spawn(listener: socket.socket, log_file: Path) -> subprocess.Popen[bytes]:
    """It outlives this process, and holds nothing of it but the socket on which it is found."""
    command = [sys.executable, "-m", "dsec.network.gateway", str(listener.fileno())]
    with log_file.open("wb") as told:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=told,
            start_new_session=True,
            pass_fds=[listener.fileno()],
            cwd="/",
        )


def _start_time(pid: int) -> int:
    """Field 22 of /proc/pid/stat: with the pid it names one process."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
        return int(f.read().rpartition(")")[2].split()[19])


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for bind and connect: a path below DATA may be longer than a socket's name can be."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
