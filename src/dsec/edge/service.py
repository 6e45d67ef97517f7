"""The edge of one node: serves the subjects of dsec.wire.edge over the Bus.

This module answers; lifecycle.py launches and destroys, link.py keeps connected, operations.py holds what is
run, ttl.py ends what is idle, retention.py forgets, recovery.py takes over from an edge that was killed.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, cast

import msgspec

import dsec
from dsec.backends.base import Backend, Fingerprint, Networks, Seen
from dsec.core import sandbox_state as sm
from dsec.core.admission import Share, admit
from dsec.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DSecError,
    IdempotencyMismatch,
    InvalidArgument,
    SandboxNotFound,
    Unavailable,
    WrongEdge,
    WrongState,
)
from dsec.core.ids import EDGE_ID, edge_of
from dsec.core.sandbox_state import Failure, SandboxMachine, State
from dsec.core.specs import SandboxSpec, validate
from dsec.edge import recovery
from dsec.edge.aether import Watchdog
from dsec.edge.attach import Attachment
from dsec.edge.auditing import Auditing
from dsec.edge.config import EdgeConfig
from dsec.edge.dial import check as check_dial
from dsec.edge.dial import dial
from dsec.edge.events import Events
from dsec.edge.lifecycle import LayerResolver, Lifecycle
from dsec.edge.link import Link
from dsec.edge.node import NodeProbe, load
from dsec.edge.operation import Operation
from dsec.edge.operations import Operations
from dsec.edge.oplog import FileOperationLog
from dsec.edge.packing import LayerPacker, Packing
from dsec.edge.records import Record, RecordStore, Slots
from dsec.edge.retention import Retention
from dsec.edge.sandbox import Sandbox, info_of
from dsec.edge.spool import Spool
from dsec.edge.tasks import Tasks
from dsec.edge.ttl import TTLs
from dsec.wire import edge as m
from dsec.wire.audit import Sink
from dsec.wire.bus import Bus, Handler, Stream
from dsec.wire.layers import PackDiff, Packed

log = logging.getLogger(__name__)
MAX_PAGE: Final = 1000
YIELD_EVERY: Final = 2000
"""Sandboxes looked at by a list before others have their turn."""


class EdgeService:
    """`await start()`, then the subjects are served; `await stop()`, once each."""

    def __init__(
        self,
        bus: Bus,
        *,
        edge_id: str,
        data: Path,
        backends: dict[str, Backend],
        layers: LayerResolver,
        config: EdgeConfig,
        packer: LayerPacker | None = None,
        audit: Sink | None = None,
    ) -> None:
        if not EDGE_ID.match(edge_id):
            raise InvalidArgument(f"edge id {edge_id!r}: 1 to 24 of a-z, 0-9")
        self.edge_id = edge_id
        self.config = config
        self.backends = backends
        self._bus = bus
        self._data = data
        self._layers = layers
        self._packer = packer
        self.auditing = Auditing(audit)
        self.events = Events()
        self._fingerprints: dict[str, Fingerprint] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.tasks = Tasks()
        self._share = Share()
        self._started_at = 0.0
        self._created = self._failed = 0
        self._draining = False
        self._wall = 0.0

    # --- start and stop ---

    async def start(self) -> None:
        """Open the backends, take over what an earlier edge left, then serve."""
        config, loop = self.config, asyncio.get_running_loop()
        self._started_at = time.time()
        self._wall = time.time() - loop.time()
        data = self._data / "edge"
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.records = RecordStore(data / "sandboxes.db")
        self.slots = Slots(max(config.max_sandboxes + 64, config.max_sandboxes * 5 // 4))
        self.watchdog = Watchdog(config.answer_deadline_s)
        self.operations = Operations(
            FileOperationLog(data / "operations"),
            Spool(data / "spool", config.spool_per_sandbox),
            config,
            self._touch,
            self.auditing.operation_ended,
        )
        self.node = NodeProbe(config)
        self.link = Link(self.operations, self.watchdog, self.tasks, config)
        self.ttls = TTLs(self.sandboxes, self._expire)
        self.retention = Retention(self.operations, config, self._forget)
        self.lifecycle = self.link.lifecycle = Lifecycle(
            backends=self.backends,
            layers=self._layers,
            records=self.records,
            operations=self.operations,
            watchdog=self.watchdog,
            tasks=self.tasks,
            config=config,
            released=self._release,
            running=self._run,
            mend=self.link.mend,
        )
        self.packing = Packing(self._packer, self.lifecycle, self.create, self.operate, self.stop_sandbox)
        for name, backend in self.backends.items():
            if "network" in backend.capabilities:
                cast("Networks", backend).on_seen = self._seen
            await backend.open()
            self._fingerprints[name] = await backend.fingerprint()
        await recovery.recover(self)
        self._serve()

    def _serve(self) -> None:
        prefix = f"edge.{self.edge_id}."
        handlers: dict[str, Handler] = {
            "create": self.create,
            "get": self.get,
            "list": self.list_sandboxes,
            "stop": self.stop_sandbox,
            "operate": self.operate,
            "operation": self.operation,
            "operations": self.list_operations,
            "signal": self.signal,
            "input": self.input,
            "resize": self.resize,
            "sandbox_stats": self.sandbox_stats,
            "network": self.network,
            "set_network_rules": self.set_network_rules,
            "events": self.events_of,
            "pack": self.pack,
            "node": self.node_info,
        }
        for verb, handler in handlers.items():
            self._bus.serve(prefix + verb, handler)
        self._bus.serve_stream(prefix + "attach", self.attach)
        self._bus.serve_stream(prefix + "dial", self.dial)

    def drain(self) -> None:
        """Admit no more sandboxes; those that are here go on."""
        self._draining = True

    async def stop(self, *, keep: bool = False) -> None:
        """`keep`: leave sandboxes running for the next edge; otherwise stop and destroy all."""
        self.drain()
        if not hasattr(self, "lifecycle"):
            return
        for sandbox in list(self.sandboxes.values()):
            if sandbox.machine.live and (not keep or sandbox.state is State.CREATING):
                self.lifecycle.feed(sandbox, sm.StopAsked("server_stopped"))
        await self._settle(keep)
        for closing in (self.ttls, self.retention, self.watchdog):
            closing.close()
        await self.tasks.cancel()
        self.lifecycle.close()
        for sandbox in self.sandboxes.values():
            if (connection := sandbox.connection) is not None:
                sandbox.connection = None
                connection.close()
        self.operations.close()
        alive = any(not s.machine.gone for s in self.sandboxes.values())
        for backend in self.backends.values():
            await backend.close(keep=alive)
        self.records.close()

    async def _settle(self, keep: bool) -> None:
        """Until what is to end has ended."""

        def left() -> list[Sandbox]:
            return [
                s for s in self.sandboxes.values() if not s.machine.gone and not (keep and s.machine.live)
            ]

        try:
            async with asyncio.timeout(self.config.stop_deadline_s):
                for sandbox in left():
                    while not sandbox.machine.gone:
                        await sandbox.changed()
        except TimeoutError:
            log.error("not destroyed in time, left to the next start: %s", [s.id for s in left()])

    # --- told by the others ---

    def _touch(self, sandbox: Sandbox) -> None:
        sandbox.last_used = asyncio.get_running_loop().time()
        if not sandbox.answered and sandbox.operations_total and not sandbox.running:
            sandbox.answered = True
            if (handle := sandbox.record.handle) is not None:
                self.lifecycle.backend(sandbox).answered(handle)

    def _run(self, sandbox: Sandbox) -> None:
        self._touch(sandbox)
        self.ttls.watch(sandbox)

    def _expire(self, sandbox: Sandbox, reason: str) -> None:
        self.lifecycle.feed(sandbox, sm.StopAsked(reason))

    def _release(self, sandbox: Sandbox) -> None:
        self.slots.release(sandbox.record.slot)
        self._share = self._share.minus(share_of(sandbox.record.spec))
        if sandbox.state is State.FAILED:
            self._failed += 1
        self.auditing.ended(sandbox)
        self.retention.keep(sandbox)

    def _seen(self, sandbox_id: str, seen: Seen) -> None:
        """Something that the network's rules refused."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None:
            return
        self.events.seen(sandbox_id, seen)
        told = {k: v for k, v in msgspec.structs.asdict(seen).items() if v and k != "what"}
        self.auditing.misbehaved(sandbox, "network_denied", seen=seen.what, **told)

    def _forget(self, sandbox: Sandbox) -> None:
        self.events.forget(sandbox.id)
        self.records.drop(sandbox.id)
        del self.sandboxes[sandbox.id]
        self.lifecycle.counts[sandbox.state.value] -= 1

    def adopt(self, record: Record, machine: SandboxMachine) -> Sandbox:
        """A sandbox of this edge, new or of a record."""
        sandbox = Sandbox(record, machine, self.link)
        self.sandboxes[record.id] = sandbox
        self.lifecycle.adopt(sandbox)
        if not machine.gone:
            self._share = self._share.plus(share_of(record.spec))
        return sandbox

    # --- sandboxes ---

    def _find(self, sandbox_id: str) -> Sandbox:
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None:
            self._check_edge(sandbox_id)
            raise SandboxNotFound(f"no sandbox {sandbox_id}")
        return sandbox

    def _check_edge(self, sandbox_id: str) -> None:
        if edge_of(sandbox_id) != self.edge_id:
            raise WrongEdge(f"{sandbox_id} is not of edge {self.edge_id}")

    def _info(self, sandbox: Sandbox) -> m.SandboxInfo:
        return info_of(sandbox, self.edge_id, self._wall)

    async def create(self, msg: m.CreateSandbox) -> m.SandboxInfo:
        spec = msg.spec
        digest = digest_of(spec)
        sandbox = self.sandboxes.get(msg.sandbox_id)
        if sandbox is None:
            sandbox = self._admit(msg, digest)
        elif sandbox.record.digest != digest:
            raise IdempotencyMismatch(f"{msg.sandbox_id} was created with a different spec")
        await self._created_or_failed(sandbox, msg.deadline_s)
        if (error := sandbox.error()) is not None:
            raise error
        if sandbox.record.ready_at is None:
            raise Cancelled(f"{sandbox.id} was stopped while it was being made: {sandbox.machine.reason}")
        return self._info(sandbox)

    def _admit(self, msg: m.CreateSandbox, digest: bytes) -> Sandbox:
        self._check_edge(msg.sandbox_id)
        spec = validate(msg.spec)
        fingerprint = self._fingerprints.get(spec.backend)
        if fingerprint is None or not fingerprint.available:
            why = fingerprint.reason if fingerprint else "it is not configured"
            raise InvalidArgument(f"backend {spec.backend!r} is not available on this node: {why}")
        if self._draining:
            raise Unavailable("the node takes no more sandboxes: it is draining")
        self.lifecycle.policy(spec)  # rules that cannot be put in force are refused now
        available = self.node.memory_available_mb()
        admit(self.node.limits, self._share, share_of(spec), memory_available_mb=available)
        record = Record(
            id=msg.sandbox_id,
            slot=self.slots.take(),
            spec=msgspec.structs.replace(spec, secrets={}) if spec.secrets else spec,
            digest=digest,
            principal=msg.principal,
            created_at=time.time(),
        )
        sandbox = self.adopt(record, SandboxMachine())
        sandbox.secrets = spec.secrets or None
        self._created += 1
        self.auditing.created(sandbox)
        self.lifecycle.feed(sandbox, sm.Created())
        return sandbox

    async def _created_or_failed(self, sandbox: Sandbox, deadline_s: float) -> None:
        """The first caller's deadline is the creation's. When all callers have gone it is undone."""
        if sandbox.state is not State.CREATING:
            return
        timer = None
        if sandbox.creators == 0:
            late = Failure(DeadlineExceeded.code, f"the sandbox was not ready within {deadline_s:g} s")
            loop = asyncio.get_running_loop()
            timer = loop.call_later(deadline_s, self._feed_creating, sandbox, sm.DeadlinePassed(late))
        sandbox.creators += 1
        try:
            while sandbox.state is State.CREATING:
                await sandbox.changed()
        except asyncio.CancelledError:
            if sandbox.creators == 1:
                self._feed_creating(sandbox, sm.StopAsked("cancelled"))
            raise
        finally:
            sandbox.creators -= 1
            if timer is not None and sandbox.creators == 0:
                timer.cancel()

    def _feed_creating(self, sandbox: Sandbox, event: sm.Event) -> None:
        if sandbox.state is State.CREATING:
            self.lifecycle.feed(sandbox, event)

    async def get(self, msg: m.SandboxId) -> m.SandboxInfo:
        return self._info(self._find(msg.sandbox_id))

    async def list_sandboxes(self, msg: m.ListSandboxes) -> m.SandboxPage:
        limit = max(1, min(msg.limit, MAX_PAGE))
        ids, seen = [], 0
        for sandbox in list(self.sandboxes.values()):
            if sandbox.id > msg.after and _matches(sandbox, msg):
                ids.append(sandbox.id)
            if (seen := seen + 1) % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        page = heapq.nsmallest(limit + 1, ids)
        found = [self._info(s) for i in page[:limit] if (s := self.sandboxes.get(i)) is not None]
        return m.SandboxPage(sandboxes=found, next=page[limit - 1] if len(page) > limit else "")

    async def stop_sandbox(self, msg: m.StopSandbox) -> m.SandboxInfo:
        sandbox = self._find(msg.sandbox_id)
        if sandbox.machine.live:
            self.lifecycle.feed(sandbox, sm.StopAsked(msg.reason or "requested"))
        while not sandbox.machine.gone:
            await sandbox.changed()
        return self._info(sandbox)

    async def sandbox_stats(self, msg: m.SandboxId) -> m.SandboxStats:
        sandbox = self._find(msg.sandbox_id)
        if sandbox.state not in (State.RUNNING, State.PAUSED) or sandbox.record.handle is None:
            raise _not_running(sandbox)
        stats = await self.lifecycle.backend(sandbox).stats(sandbox.record.handle)
        return m.SandboxStats(
            sandbox_id=sandbox.id,
            operations=sandbox.operations_total,
            uptime_s=time.time() - (sandbox.record.ready_at or time.time()),
            **msgspec.structs.asdict(stats),
        )

    async def network(self, msg: m.SandboxId) -> m.NetworkInfo:
        spec = self._find(msg.sandbox_id).record.spec
        return m.NetworkInfo(sandbox_id=msg.sandbox_id, rules=spec.network_rules)

    async def set_network_rules(self, msg: m.SetNetworkRules) -> m.NetworkInfo:
        """In the sandbox's record first: a new life of the edge puts the same rules in force."""
        sandbox = self._find(msg.sandbox_id)
        record = sandbox.record
        if sandbox.state not in (State.RUNNING, State.PAUSED) or record.handle is None:
            raise _not_running(sandbox)
        if record.spec.network_rules is None:
            raise WrongState(f"{sandbox.id} has no network: create it with network_rules={{}} or more")
        spec = validate(msgspec.structs.replace(record.spec, network_rules=msg.rules))
        policy = self.lifecycle.policy(spec)
        assert policy is not None
        record.spec = spec
        self.records.save(record)
        backend = cast("Networks", self.lifecycle.backend(sandbox))
        await backend.set_network_rules(record.handle, policy, spec)
        return m.NetworkInfo(sandbox_id=sandbox.id, rules=msg.rules)

    async def events_of(self, msg: m.EventsQuery) -> m.EventPage:
        self._find(msg.sandbox_id)
        if not 1 <= msg.limit <= MAX_PAGE:
            raise InvalidArgument(f"limit: {msg.limit} is not in 1..{MAX_PAGE}")
        return await self.events.query(msg)

    async def pack(self, msg: PackDiff) -> Packed:
        return await self.packing.pack(self._find(msg.sandbox_id), msg)

    async def node_info(self, msg: m.NodeQuery) -> m.NodeInfo:
        return m.NodeInfo(
            edge=self.edge_id,
            version=dsec.__version__,
            backends=[
                m.BackendInfo(name=n, available=f.available, reason=f.reason, attributes=f.attributes)
                for n, f in self._fingerprints.items()
            ],
            counts={state: n for state, n in self.lifecycle.counts.items() if n},
            max_sandboxes=self.config.max_sandboxes,
            memory_total_mb=self.node.memory_total_mb,
            memory_available_mb=self.node.memory_available_mb(),
            load=load(),
            cpus=len(os.sched_getaffinity(0)),
            pressure=self.node.pressure(),
            created_total=self._created,
            failed_total=self._failed,
            operations_total=self.operations.total,
            started_at=self._started_at,
            draining=self._draining,
        )

    # --- operations ---

    def _matched(self, sandbox_id: str) -> Sandbox:
        """A sandbox whose operations are known."""
        sandbox = self._find(sandbox_id)
        if sandbox.unmatched:
            raise Unavailable(f"{sandbox_id} is being connected again after a restart of the server")
        return sandbox

    def _start(self, msg_id: str, request: Any, *, streamed: bool, **how: Any) -> tuple[Sandbox, Operation]:
        sandbox = self._matched(msg_id)
        if sandbox.state is State.RUNNING:
            return sandbox, self.operations.start(sandbox, request, streamed=streamed, **how)
        # A repeat is answered for as long as there is a record.
        if self.operations.look(sandbox, request.op_id) is None:
            raise _not_running(sandbox)
        return sandbox, self.operations.start(sandbox, request, streamed=streamed, **how)

    async def operate(self, msg: m.Operate) -> m.OperationInfo:
        _, operation = self._start(
            msg.sandbox_id, msg.request, stdin=msg.stdin, open_input=msg.open_input, streamed=False
        )
        await self.operations.wait(operation, msg.wait_s)
        return self.operations.info(operation)

    def _operation(self, sandbox_id: str, op_id: str) -> Operation:
        return self.operations.get(self._matched(sandbox_id), op_id)

    async def operation(self, msg: m.GetOperation) -> m.OperationInfo:
        operation = self._operation(msg.sandbox_id, msg.op_id)
        await self.operations.wait(operation, msg.wait_s)
        return self.operations.info(operation, msg.stdout_from, msg.stderr_from)

    async def list_operations(self, msg: m.SandboxId) -> m.OperationPage:
        found = self.operations.all(self._find(msg.sandbox_id), MAX_PAGE)
        past = 1 << 62
        return m.OperationPage(operations=[self.operations.info(o, past, past) for o in found])

    async def signal(self, msg: m.SignalOperation) -> m.OperationInfo:
        if not 1 <= msg.signal <= 64:
            raise InvalidArgument(f"signal {msg.signal}: not in 1..64")
        operation = self._operation(msg.sandbox_id, msg.op_id)
        operation.signal(msg.signal, tree=msg.tree)
        return self.operations.info(operation)

    async def input(self, msg: m.InputOperation) -> m.OperationInfo:
        operation = self._operation(msg.sandbox_id, msg.op_id)
        if not operation.running:
            raise WrongState(f"operation {operation.id} has ended: it takes no more input")
        data = msg.data if msg.offset is None else msg.data[operation.had(msg.offset) :]
        operation.put(data, eof=msg.eof)
        while operation.running and operation.input is not None and operation.input.full:
            await operation.changed_future()
        return self.operations.info(operation)

    async def resize(self, msg: m.ResizeOperation) -> m.OperationInfo:
        operation = self._operation(msg.sandbox_id, msg.op_id)
        operation.resize(check_size(msg.rows), check_size(msg.columns))
        return self.operations.info(operation)

    async def attach(self, msg: m.AttachOperation, stream: Stream) -> None:
        if msg.start is not None:
            if msg.start.op_id != msg.op_id:
                raise InvalidArgument("attach: the request's operation id is another one")
            sandbox, operation = self._start(msg.sandbox_id, msg.start, open_input=True, streamed=True)
        else:
            sandbox = self._matched(msg.sandbox_id)
            operation = self.operations.get(sandbox, msg.op_id)
        attachment = Attachment(self.operations, sandbox, operation, stream)
        await attachment.run(msg.stdout_from, msg.stderr_from, msg.stdin_from)

    async def dial(self, msg: m.DialPort, stream: Stream) -> None:
        """A connection to a port inside, for as long as the caller keeps the stream."""
        check_dial(msg)
        sandbox = self._find(msg.sandbox_id)
        if sandbox.state is not State.RUNNING:
            raise _not_running(sandbox)
        sandbox.attached += 1
        try:
            connection = await dial(sandbox, msg, self.config.max_connections)
            await connection.run(stream)
        finally:
            sandbox.attached -= 1
            self._touch(sandbox)


def check_size(n: int) -> int:
    if not 1 <= n <= 4096:
        raise InvalidArgument(f"a terminal of {n} rows or columns: not in 1..4096")
    return n


def share_of(spec: SandboxSpec) -> Share:
    return Share(1, spec.memory_limit_mb, spec.pids_limit)


def digest_of(spec: SandboxSpec) -> bytes:
    """Tells one spec from another. Of secrets only the names: a digest would be a way to guess them."""
    if spec.secrets:
        spec = msgspec.structs.replace(spec, secrets=dict.fromkeys(sorted(spec.secrets), ""))
    return blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()


def _matches(sandbox: Sandbox, msg: m.ListSandboxes) -> bool:
    spec = sandbox.record.spec
    return (
        (msg.project is None or spec.project == msg.project)
        and (msg.task is None or spec.task == msg.task)
        and (not msg.states or sandbox.state.value in msg.states)
        and all(spec.labels.get(k) == v for k, v in msg.labels.items())
    )


def _not_running(sandbox: Sandbox) -> DSecError:
    error = sandbox.error()
    if error is not None:
        return error
    return WrongState(f"{sandbox.id} is {sandbox.state.value}, not running")
