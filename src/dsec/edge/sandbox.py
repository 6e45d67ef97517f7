"""A sandbox in the edge's memory: its record, its state machine, its connection. Small: there are
thousands."""

from __future__ import annotations

import asyncio
from typing import Protocol

from dsec.core.errors import BY_CODE, DSecError, Internal, TooManyOperations, from_code
from dsec.core.sandbox_state import Failure, SandboxMachine, State
from dsec.edge.aether import AetherConnection
from dsec.edge.operation import Operation
from dsec.edge.records import Record
from dsec.wire import aether as w
from dsec.wire.edge import ErrorInfo, SandboxInfo


class Watcher(Protocol):
    """Who is told what happens to a sandbox's connection."""

    def connection_ended(self, sandbox: Sandbox, connection: AetherConnection, error: DSecError) -> None: ...
    def event(self, sandbox: Sandbox, event: w.Event) -> None: ...


class Hearer(Protocol):
    """A connection to a port inside."""

    def lost(self, error: DSecError) -> None: ...


class Sandbox:
    __slots__ = (
        "_watcher",
        "answered",
        "attached",
        "breaches",
        "connection",
        "creators",
        "dials",
        "dials_total",
        "due",
        "ends_at",
        "failures",
        "last_used",
        "launch",
        "machine",
        "mending",
        "operations_total",
        "record",
        "running",
        "secrets",
        "unmatched",
        "waiters",
    )

    def __init__(self, record: Record, machine: SandboxMachine, watcher: Watcher) -> None:
        self._watcher = watcher
        self.record = record
        self.machine = machine
        self.connection: AetherConnection | None = None
        self.running: dict[str, Operation] = {}
        self.attached = 0
        """Streams that follow its operations."""
        self.last_used = 0.0
        self.answered = False
        """Whether an operation of it has ended in this life of the edge."""
        """On the loop's clock: its start, then the end of the last operation."""
        self.due = 0.0
        """When the TTL heap looks at it next; 0: never."""
        self.ends_at: float | None = None
        """When `ttl_max` is over, on the loop's clock."""
        self.breaches = 0
        """In a row."""
        self.mending = False
        """Somebody makes a new connection."""
        self.unmatched = False
        """A new edge has not yet compared its log with what aether knows."""
        self.failures = 0
        """Failed stops and destroys in a row."""
        self.creators = 0
        """Callers that wait for its creation."""
        self.operations_total = 0
        self.dials: set[Hearer] | None = None
        """Connections to ports inside that aether has not said the end of."""
        self.dials_total = 0
        self.launch: asyncio.Task[None] | None = None
        self.secrets: dict[str, str] | None = None
        """Only while it is launched; then they are in the sandbox and nowhere else."""
        self.waiters: list[asyncio.Future[None]] | None = None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def busy(self) -> bool:
        return bool(self.running) or self.attached > 0

    # --- Owner of its connection ---

    def connection_ended(self, connection: AetherConnection, error: DSecError) -> None:
        self._watcher.connection_ended(self, connection, error)

    def event(self, event: w.Event) -> None:
        self._watcher.event(self, event)

    # --- connections to ports inside ---

    def dialled(self, dial: Hearer, limit: int) -> None:
        """Raises TooManyOperations past `limit`."""
        if self.dials is None:
            self.dials = set()
        if len(self.dials) >= limit:
            raise TooManyOperations(f"{self.id} has {limit} connections to its ports; close some")
        self.dials.add(dial)
        self.dials_total += 1

    def hung_up(self, dial: Hearer) -> None:
        if self.dials is not None:
            self.dials.discard(dial)

    def lose_dials(self, error: DSecError) -> None:
        for dial in list(self.dials or ()):
            dial.lost(error)

    # --- waiting ---

    async def changed(self) -> None:
        """Until something is announced of it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(future)
        await future

    def announce(self) -> None:
        for future in self.waiters or ():
            if not future.done():
                future.set_result(None)
        self.waiters = None

    def error(self) -> DSecError | None:
        """Why it failed."""
        f = self.machine.failure
        return from_code(f.code, f.message, sandbox_id=self.id) if f else None


def error_info(error: DSecError) -> ErrorInfo:
    return ErrorInfo(code=error.code, message=error.message, retry=error.retry, details=error.details)


def failure_info(failure: Failure) -> ErrorInfo:
    retry = BY_CODE.get(failure.code, Internal).retry
    return ErrorInfo(code=failure.code, message=failure.message, retry=retry)


def info_of(sandbox: Sandbox, edge_id: str, wall_of: float) -> SandboxInfo:
    """`wall_of`: what turns the loop's clock into Unix seconds, by addition."""
    record, machine = sandbox.record, sandbox.machine
    spec, failure = record.spec, machine.failure
    return SandboxInfo(
        id=record.id,
        state=machine.state.value,
        edge=edge_id,
        backend=spec.backend,
        image=spec.image,
        layers=spec.layers,
        project=spec.project,
        task=spec.task,
        labels=spec.labels,
        created_at=record.created_at,
        ready_at=record.ready_at,
        ended_at=record.ended_at,
        last_used_at=sandbox.last_used + wall_of if sandbox.last_used else record.created_at,
        ttl_running_stop=spec.ttl_running_stop,
        ttl_max=spec.ttl_max,
        memory_limit_mb=spec.memory_limit_mb,
        cpu_cores_limit=spec.cpu_cores_limit,
        reason=machine.reason or (failure.code if failure else ""),
        error=failure_info(failure) if failure else None,
        warnings=record.warnings,
        timings_ms=record.timings_ms,
    )
