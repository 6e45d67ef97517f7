"""A backend of memory alone, with a knob for each failure, and an aether that is Python.

The whole stack above the backend seam runs on it with no root. Its sandboxes live in a FakeHost, which may
outlive the edge (as a kernel does): the same object given to a second FakeBackend is the same machine after
a crash. With `memory_only` no sandbox has a socket, so that hundreds of thousands fit.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from dsec.backends.base import Exit, Fingerprint, Handle, LaunchSpec, Seen, Stats, WritableSnapshot
from dsec.backends.fake_aether import FakeAether
from dsec.core.errors import LaunchFailed, SandboxFailed, Unavailable, from_code
from dsec.core.network import Policy
from dsec.core.specs import SandboxSpec
from dsec.wire.transport import connect

BOOT_ID: Final = "fake"


class Knobs(msgspec.Struct, kw_only=True):
    """What goes wrong. Change them at any time; they count for what is done afterwards."""

    unavailable: str = ""
    """Why the fingerprint says that this node cannot."""
    refuse_launch: str = ""
    """An error code: launch raises it at once."""
    launch_gate: asyncio.Event | None = None
    """Launches wait for it: a slow launch whose end the test decides."""
    fail_stage: str = ""
    """Launch fails there, half-made: `record`, `process`, `socket`. What was made before is undone."""
    leave_behind: bool = False
    """A failed launch does not undo what it made."""
    die_after_launch: bool = False
    no_hello: bool = False
    wrong_hello: bool = False
    silent: bool = False
    """aether says HELLO and never anything else."""
    corrupt: bool = False
    """aether answers a START with bytes that are no frames."""
    stop_fails: int = 0
    """So many stops raise, then they work."""
    destroy_fails: int = 0
    destroy_gate: asyncio.Event | None = None
    refuse_rules: str = ""
    """An error code: a change of network rules raises it."""
    connect_fails: bool = False


class FakeSandbox:
    """What exists of one sandbox on the host."""

    __slots__ = ("aether", "connection", "ended", "exit", "slot")

    def __init__(self, sandbox_id: str, slot: int) -> None:
        self.slot = slot
        self.aether = FakeAether(sandbox_id)
        self.connection: _End | None = None
        self.exit: Exit | None = None
        self.ended: list[asyncio.Future[None]] | None = None


class FakeHost:
    """The machine: what is on it stays when an edge dies."""

    def __init__(self) -> None:
        self.snapshots: set[Path] = set()
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.slots: set[int] = set()
        self.answered: set[str] = set()
        """Sandboxes whose first operation has ended."""
        self.ends: set[SocketEnd] = set()
        """Sockets that are open, or about to close."""

    def kill(self, sandbox_id: str, exit: Exit) -> None:
        """The sandbox's own process ends."""
        sandbox = self.sandboxes[sandbox_id]
        if sandbox.exit is not None:
            return
        sandbox.exit = exit
        sandbox.aether.die()
        self.disconnect(sandbox_id)
        for future in sandbox.ended or ():
            if not future.done():
                future.set_result(None)

    def disconnect(self, sandbox_id: str) -> None:
        """The connection breaks; the sandbox lives on."""
        sandbox = self.sandboxes[sandbox_id]
        if (end := sandbox.connection) is not None:
            sandbox.connection = None
            end.close()


class FakeBackend:
    name = "fake"
    capabilities: frozenset[str] = frozenset({"network", "pack"})

    def __init__(
        self, host: FakeHost | None = None, *, memory_only: bool = False, knobs: Knobs | None = None
    ) -> None:
        self.host = host or FakeHost()
        self.knobs = knobs or Knobs()
        self._memory_only = memory_only
        self.opened = False
        self.launches = 0
        self._snapshots: set[Path] = set()
        self.policies: dict[str, Policy] = {}
        """In force, by sandbox."""
        self.on_seen: Callable[[str, Seen], None] = lambda sandbox_id, seen: None

    async def open(self) -> None:
        self.opened = True

    async def close(self, *, keep: bool) -> None:
        if not keep:
            for sandbox_id in list(self.host.sandboxes):
                self._remove(sandbox_id)
            for where in list(self.host.snapshots):
                self._drop(where)
            await asyncio.gather(*(end.gone for end in self.host.ends))
        self.opened = False

    async def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            available=not self.knobs.unavailable,
            reason=self.knobs.unavailable,
            attributes={"sockets": "none" if self._memory_only else "socketpair"},
        )

    async def launch(self, spec: LaunchSpec) -> tuple[Handle, socket.socket]:
        knobs = self.knobs
        self.launches += 1
        if knobs.refuse_launch:
            raise from_code(knobs.refuse_launch, "the fake refuses")
        try:
            if knobs.launch_gate is not None:
                await knobs.launch_gate.wait()
            return self._launch(spec)
        except BaseException:
            if not knobs.leave_behind:
                self._remove(spec.sandbox_id)
            raise

    def _launch(self, spec: LaunchSpec) -> tuple[Handle, socket.socket]:
        knobs, sandbox_id = self.knobs, spec.sandbox_id
        self._fail_at("record")
        if spec.slot in self.host.slots:
            raise LaunchFailed(f"slot {spec.slot} is held: a bug of the edge")
        sandbox = self.host.sandboxes[sandbox_id] = FakeSandbox(sandbox_id, spec.slot)
        self.host.slots.add(spec.slot)
        self._fail_at("process")
        sandbox.aether.environment = {**spec.image.env, **spec.spec.env, **spec.spec.secrets}
        sandbox.aether.on_exit = lambda code: self.host.kill(sandbox_id, Exit(exit_code=code))
        if spec.policy is not None:
            self.policies[sandbox_id] = spec.policy
            sandbox.aether.environment = {**spec.network_env, **sandbox.aether.environment}
        self._fail_at("socket")
        sock = self._connect(sandbox_id)
        if knobs.die_after_launch:
            self.host.kill(sandbox_id, Exit(signal=9))
        handle = Handle(
            backend=self.name,
            sandbox_id=sandbox_id,
            slot=spec.slot,
            pid=0,
            start_time=0,
            boot_id=BOOT_ID,
            socket_path="",
        )
        return handle, sock

    async def set_network_rules(self, handle: Handle, policy: Policy, spec: SandboxSpec) -> None:
        if self.knobs.refuse_rules:
            raise from_code(self.knobs.refuse_rules, "the fake refuses the rules")
        self.policies[handle.sandbox_id] = policy

    def _fail_at(self, stage: str) -> None:
        if self.knobs.fail_stage == stage:
            raise LaunchFailed(f"the fake fails at stage {stage}")

    def _connect(self, sandbox_id: str) -> Any:
        sandbox = self.host.sandboxes[sandbox_id]
        if (before := sandbox.connection) is not None:
            before.close()
        self._apply(sandbox.aether)
        if self._memory_only:
            memory = MemorySocket(sandbox.aether)
            sandbox.connection = memory
            return memory
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        near.setblocking(False)
        far.setblocking(False)
        sandbox.connection = SocketEnd(self.host, sandbox.aether, far)
        return near

    def _apply(self, aether: FakeAether) -> None:
        knobs = self.knobs
        aether.silent, aether.corrupt = knobs.silent, knobs.corrupt
        aether.no_hello, aether.wrong_hello = knobs.no_hello, knobs.wrong_hello

    def _alive(self, handle: Handle) -> FakeSandbox:
        sandbox = self.host.sandboxes.get(handle.sandbox_id)
        if sandbox is None or sandbox.exit is not None:
            raise SandboxFailed(f"{handle.sandbox_id} is gone")
        return sandbox

    async def recover(self, handle: Handle) -> socket.socket:
        return await self.connect(handle)

    async def connect(self, handle: Handle) -> socket.socket:
        self._alive(handle)
        if self.knobs.connect_fails:
            raise Unavailable("the fake refuses a connection")
        sock: socket.socket = self._connect(handle.sandbox_id)
        return sock

    async def wait_exit(self, handle: Handle) -> Exit:
        sandbox = self.host.sandboxes.get(handle.sandbox_id)
        if sandbox is None:
            return Exit(log="it is not there")
        if sandbox.exit is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            sandbox.ended = [*(sandbox.ended or ()), future]
            await future
        assert sandbox.exit is not None
        return sandbox.exit

    async def stop(self, handle: Handle) -> None:
        if self.knobs.stop_fails > 0:
            self.knobs.stop_fails -= 1
            raise Unavailable("the fake fails to stop")
        if handle.sandbox_id in self.host.sandboxes:
            self.host.kill(handle.sandbox_id, Exit(signal=9))

    async def destroy(self, handle: Handle) -> None:
        if self.knobs.destroy_gate is not None:
            await self.knobs.destroy_gate.wait()
        if self.knobs.destroy_fails > 0:
            self.knobs.destroy_fails -= 1
            raise Unavailable("the fake fails to destroy")
        self._remove(handle.sandbox_id)

    def _remove(self, sandbox_id: str) -> None:
        if sandbox_id in self.host.sandboxes:
            self.host.kill(sandbox_id, Exit(signal=9))
            self.host.slots.discard(self.host.sandboxes.pop(sandbox_id).slot)
        self.policies.pop(sandbox_id, None)

    async def stats(self, handle: Handle) -> Stats:
        self._alive(handle)
        return Stats(
            memory_bytes=1 << 20, memory_peak_bytes=1 << 20, cpu_us=0, pids=1, disk_bytes=0, oom_kills=0
        )

    def answered(self, handle: Handle) -> None:
        self.host.answered.add(handle.sandbox_id)

    async def reclaim(self, claimed: frozenset[str]) -> list[str]:
        lost = [i for i in self.host.sandboxes if i not in claimed]
        for sandbox_id in lost:
            self._remove(sandbox_id)
        left = self.host.snapshots - self._snapshots
        for where in left:
            self._drop(where)
        return lost + [f"snapshot {where}" for where in left]

    async def snapshot_writable(self, handle: Handle) -> WritableSnapshot:
        files = self._alive(handle).aether.files
        where = Path(tempfile.mkdtemp(prefix="dsec-fake-"))
        self.host.snapshots.add(where)
        self._snapshots.add(where)
        for path, data in sorted(files.items()):
            _put(where / "upper" / path.lstrip("/"), data)
        return WritableSnapshot(where / "upper", frozen_s=0.0, how="copy", close=lambda: self._drop(where))

    def _drop(self, where: Path) -> None:
        shutil.rmtree(where, ignore_errors=True)
        self.host.snapshots.discard(where)
        self._snapshots.discard(where)

    def half_made(self, sandbox_id: str, slot: int) -> Handle:
        return Handle(
            backend=self.name,
            sandbox_id=sandbox_id,
            slot=slot,
            pid=0,
            start_time=0,
            boot_id=BOOT_ID,
            socket_path="",
        )


def _put(path: Path, data: bytes | None) -> None:
    """None: a directory."""
    if data is None:
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(path.parent, exist_ok=True)
        path.write_bytes(data)


class _End(Protocol):
    """aether's end of a connection."""

    def close(self) -> None: ...


class SocketEnd(asyncio.Protocol):
    """A FakeAether on a socket. It reads no more while what it has to say is not taken."""

    def __init__(self, host: FakeHost, aether: FakeAether, sock: socket.socket) -> None:
        self._host = host
        self._aether = aether
        self._sock = sock
        self._transport: Any = None
        self._closed = self._ready = False
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = loop.create_future()
        host.ends.add(self)
        self._task = loop.create_task(self._open())

    async def _open(self) -> None:
        if self._closed:
            self._sock.close()
            self._leave()
            return
        await connect(self, self._sock)
        self._ready = True
        if self._closed:
            self._transport.abort()
        else:
            self._aether.connected(self._transport.write, self.close)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._closed:
            self._aether.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._aether.disconnected()
        self._leave()

    def _leave(self) -> None:
        self._host.ends.discard(self)
        if not self.gone.done():
            self.gone.set_result(None)

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._aether.disconnected()
            if self._ready:
                self._transport.close()


class MemorySocket:
    """A connection with no descriptor: bytes are handed over by the loop. Both its ends in one object."""

    __slots__ = ("_aether", "_closed", "_protocol")

    def __init__(self, aether: FakeAether) -> None:
        self._aether = aether
        self._protocol: Any = None
        self._closed = False

    def open_transport(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self._soon(self._begin)
        protocol.connection_made(self)  # type: ignore[arg-type]

    def _begin(self) -> None:
        if not self._closed:
            self._aether.connected(self._deliver, self.close)

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    def _deliver(self, data: bytes) -> None:
        self._soon(self._to_edge, data)

    def _to_edge(self, data: bytes) -> None:
        if not self._closed:
            self._protocol.data_received(data)

    def _to_aether(self, data: bytes) -> None:
        if not self._closed:
            self._aether.received(data)

    # As the edge's transport:

    def write(self, data: bytes) -> None:
        self._soon(self._to_aether, data)

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._aether.disconnected()
            if self._protocol is not None:
                self._soon(self._protocol.connection_lost, None)
