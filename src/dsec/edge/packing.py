"""`pack_diff`: what a sandbox has changed, as a layer from which others start."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast
from uuid import uuid4

import msgspec

from dsec.backends.base import Handle, Packs
from dsec.core.errors import Conflict, Unsupported, WrongState
from dsec.core.ids import edge_of, new_sandbox_id
from dsec.core.images import ImageConfig
from dsec.core.sandbox_state import State
from dsec.core.specs import SandboxSpec
from dsec.edge.lifecycle import Lifecycle
from dsec.edge.sandbox import Sandbox
from dsec.wire import aether as w
from dsec.wire import edge as m
from dsec.wire.layers import PackDiff, Packed

CREATION_DEADLINE_S = 120.0
OUTPUT_LIMIT = 64 << 10


class LayerPacker(Protocol):
    """What the layers' side does; it blocks, and is called in threads."""

    def pack(
        self,
        upper: Path,
        wanted: PackDiff,
        below: list[str],
        config: ImageConfig,
        platform: Mapping[str, str],
    ) -> Packed:
        """A nameless layer of that directory. Raises InvalidArgument for a finding that is refused."""

    def name(self, packed: Packed, name: str) -> Packed:
        """Gives it its name."""

    def drop(self, packed: Packed) -> None:
        """It did not pass: it is not to be found any more, unless something else has the same content."""


class Packing:
    """Of one edge. One layer at a time is taken of a sandbox."""

    def __init__(
        self,
        packer: LayerPacker | None,
        lifecycle: Lifecycle,
        create: Callable[[m.CreateSandbox], Awaitable[m.SandboxInfo]],
        operate: Callable[[m.Operate], Awaitable[m.OperationInfo]],
        stop: Callable[[m.StopSandbox], Awaitable[m.SandboxInfo]],
    ) -> None:
        self._packer = packer
        self._lifecycle = lifecycle
        self._create = create
        self._operate = operate
        self._stop = stop
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def pack(self, sandbox: Sandbox, msg: PackDiff) -> Packed:
        """The layer, checked, tried and named. The sandbox goes on, whatever comes of it."""
        packer = self._packer
        if packer is None or "pack" not in self._lifecycle.backend(sandbox).capabilities:
            raise Unsupported(f"backend {sandbox.record.spec.backend!r} has no pack_diff")
        lock = self._busy[sandbox.id]
        try:
            async with lock:
                packed = await self._take(packer, sandbox, msg)
        finally:
            if not lock.locked():
                self._busy.pop(sandbox.id, None)
        if not msg.smoke:
            return await self._named(packer, packed, msg)
        try:
            packed = await self._tried(sandbox.record.spec, packed, msg)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(packer.drop, packed))
            raise
        return await self._named(packer, packed, msg)

    async def _take(self, packer: LayerPacker, sandbox: Sandbox, msg: PackDiff) -> Packed:
        record = sandbox.record
        if sandbox.state is not State.RUNNING or record.handle is None:
            raise WrongState(f"{sandbox.id} is {sandbox.state.value}: only a running sandbox can be packed")
        handle: Handle = record.handle
        backend = cast("Packs", self._lifecycle.backend(sandbox))
        config = record.image or ImageConfig()
        snapshot = await backend.snapshot_writable(handle)
        try:
            packed = await asyncio.to_thread(
                packer.pack, snapshot.upper, msg, record.layers, config, snapshot.platform
            )
        finally:
            await asyncio.shield(asyncio.to_thread(snapshot.close))
        return msgspec.structs.replace(packed, frozen_s=snapshot.frozen_s, how=snapshot.how)

    @staticmethod
    async def _named(packer: LayerPacker, packed: Packed, msg: PackDiff) -> Packed:
        return await asyncio.to_thread(packer.name, packed, msg.name) if msg.name else packed

    async def _tried(self, spec: SandboxSpec, packed: Packed, msg: PackDiff) -> Packed:
        """In a sandbox like the one that was packed, but fresh."""
        fresh = msgspec.structs.replace(
            spec, image=packed.layer.digest, layers=[], secrets={}, labels={**spec.labels, "dsec/smoke": "1"}
        )
        made = new_sandbox_id(edge_of(msg.sandbox_id))
        await self._create(
            m.CreateSandbox(
                sandbox_id=made, spec=fresh, deadline_s=CREATION_DEADLINE_S, principal=msg.principal
            )
        )
        try:
            ended = await self._operate(m.Operate(sandbox_id=made, request=_shell(msg)))
        finally:
            await asyncio.shield(self._stop(m.StopSandbox(sandbox_id=made, reason="smoke test")))
        output = (ended.stdout + ended.stderr).decode(errors="replace")[-4000:]
        result: Any = ended.result
        if result is None or result.reason != "exited" or result.exit_code != 0:
            how = f"{result.reason}, exit code {result.exit_code}" if result else "it did not run"
            raise Conflict(f"the packed layer did not pass {msg.smoke[:200]!r}: {how}: {output}")
        return msgspec.structs.replace(packed, smoke_output=output)


def _shell(msg: PackDiff) -> w.Shell:
    return w.Shell(
        op_id=f"smoke-{uuid4().hex}",
        session="smoke",
        command=msg.smoke.encode(),
        cwd="",
        env={},
        user="",
        stdin=False,
        background=False,
        timeout_ms=int(msg.smoke_timeout_s * 1000),
        output_limit=OUTPUT_LIMIT,
        kill_at_limit=False,
    )
