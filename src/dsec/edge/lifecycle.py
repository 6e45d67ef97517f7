"""Carries out what the state machine decides, and feeds it what came of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from inspect import isawaitable
from typing import Any, Final, Protocol, cast

import msgspec

from dsec.backends.base import Backend, Handle, ImageConfig, LaunchSpec, LayerRef, Networks
from dsec.core import sandbox_state as sm
from dsec.core.errors import (
    Cancelled,
    DSecError,
    InvalidArgument,
    OutcomeUnknown,
    ProtocolError,
    SandboxFailed,
    Unavailable,
    Unsupported,
)
from dsec.core.network import Policy, compile_rules, environment
from dsec.core.sandbox_state import Action, Failure, State
from dsec.core.specs import SandboxSpec
from dsec.edge.aether import AetherConnection, Watchdog
from dsec.edge.config import EdgeConfig
from dsec.edge.operations import Operations
from dsec.edge.records import RecordStore
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import Tasks

log = logging.getLogger(__name__)
_CANCELLED: Final = Failure(Cancelled.code, "the creation was cancelled")


class Resolved(Protocol):
    @property
    def layers(self) -> list[LayerRef]: ...
    @property
    def config(self) -> ImageConfig: ...


class LayerResolver(Protocol):
    def resolve(self, image: str, layers: list[str]) -> Any:
        """A Resolved, or an awaitable of one. Raises UnknownLayer, LayerCorrupt."""


class Lifecycle:
    def __init__(
        self,
        *,
        backends: dict[str, Backend],
        layers: LayerResolver,
        records: RecordStore,
        operations: Operations,
        watchdog: Watchdog,
        tasks: Tasks,
        config: EdgeConfig,
        released: Callable[[Sandbox], None],
        running: Callable[[Sandbox], None],
        mend: Callable[[Sandbox, DSecError], None],
    ) -> None:
        self._backends = backends
        self._layers = layers
        self._records = records
        self._operations = operations
        self._watchdog = watchdog
        self._tasks = tasks
        self._config = config
        self._released = released
        """Told when nothing of a sandbox is left."""
        self._running = running
        """Told when a sandbox has begun to run."""
        self._mend = mend
        """Told to connect a sandbox that runs."""
        self._launching = asyncio.Semaphore(config.launches_at_once)
        self._stopping = asyncio.Semaphore(config.stops_at_once)
        self._closed = False
        self.counts: Counter[str] = Counter()
        self._do: dict[Action, Callable[[Sandbox], None]] = {
            Action.SAVE: self._save,
            Action.ANNOUNCE: Sandbox.announce,
            Action.LAUNCH: self._begin_launch,
            Action.CANCEL_LAUNCH: self._cancel_launch,
            Action.RECOVER: lambda s: self._run(self._recover(s)),
            Action.STOP: lambda s: self._run(self._stop(s)),
            Action.DESTROY: lambda s: self._run(self._destroy(s)),
            Action.RETRY: self._retry,
            Action.RELEASE: self._release,
        }

    def backend(self, sandbox: Sandbox) -> Backend:
        name = sandbox.record.spec.backend
        backend = self._backends.get(name)
        if backend is None:
            raise InvalidArgument(f"backend {name!r} is not on this node")
        return backend

    def policy(self, spec: SandboxSpec) -> Policy | None:
        """What a spec's network_rules come to on this node. Raises InvalidArgument, Unsupported."""
        if spec.network_rules is None:
            return None
        if "network" not in self._backends[spec.backend].capabilities:
            raise Unsupported(f"network_rules: sandboxes of backend {spec.backend!r} have no network")
        return compile_rules(spec.network_rules, self._config.services, drop=self._config.drop_denied)

    async def restore_network(self, sandbox: Sandbox) -> None:
        """The rules of a sandbox of an earlier life, in force again."""
        record = sandbox.record
        policy = self.policy(record.spec) if record.handle else None
        if policy is not None and record.handle is not None:
            backend = cast("Networks", self.backend(sandbox))
            await backend.set_network_rules(record.handle, policy, record.spec)

    def feed(self, sandbox: Sandbox, event: sm.Event) -> None:
        """One event, and all that follows from it."""
        if self._closed:
            return  # the next edge finds the record
        before = sandbox.state
        actions = sandbox.machine.handle(event)
        if sandbox.state is not before:
            self.counts[before.value] -= 1
            self.counts[sandbox.state.value] += 1
            self._moved(sandbox)
        for action in actions:
            self._do[action](sandbox)

    def close(self) -> None:
        """Nothing happens any more."""
        self._closed = True

    def adopt(self, sandbox: Sandbox) -> None:
        """A sandbox that is new here counts from now on."""
        self.counts[sandbox.state.value] += 1

    def _moved(self, sandbox: Sandbox) -> None:
        """Into another state: connection and operations end with the life of the sandbox."""
        machine, record = sandbox.machine, sandbox.record
        record.state, record.reason, record.failure = machine.state, machine.reason, machine.failure
        if machine.live:
            return
        if record.ended_at is None:
            record.ended_at = time.time()
        if (connection := sandbox.connection) is not None:
            sandbox.connection = None
            connection.close()
        sandbox.lose_dials(sandbox.error() or Unavailable(f"the sandbox was stopped: {machine.reason}"))
        if sandbox.running or sandbox.unmatched:
            why = sandbox.error() or OutcomeUnknown(f"the sandbox was stopped: {machine.reason}")
            self._operations.lose_all(sandbox, why)

    def _save(self, sandbox: Sandbox) -> None:
        sandbox.record.gone = sandbox.machine.gone
        self._records.save(sandbox.record)

    def _run(self, coro: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(coro)

    # --- launch ---

    def _begin_launch(self, sandbox: Sandbox) -> None:
        task = sandbox.launch = self._tasks.spawn(self._launch(sandbox))
        task.add_done_callback(lambda t: self._never_begun(sandbox) if t.cancelled() else None)

    def _never_begun(self, sandbox: Sandbox) -> None:
        """The task was cancelled before its first step, so nothing in it could say so."""
        if sandbox.launch is not None:
            self._launch_failed(sandbox, _CANCELLED)

    def _cancel_launch(self, sandbox: Sandbox) -> None:
        if sandbox.launch is not None:
            sandbox.launch.cancel()

    async def _launch(self, sandbox: Sandbox) -> None:
        try:
            await self._launch_stages(sandbox)
        except asyncio.CancelledError:
            failure = _CANCELLED
        except ProtocolError as e:
            failure = Failure("launch_failed", f"its aether broke the protocol: {e.message}")
        except DSecError as e:
            failure = Failure(e.code if e.code != "aether_lost" else "launch_failed", e.message)
        except Exception as e:
            log.exception("launch of %s", sandbox.id)
            failure = Failure("internal", f"launch: {e!r}")
        else:
            sandbox.launch = sandbox.secrets = None
            self.feed(sandbox, sm.Launched())
            if sandbox.machine.live:
                self._running(sandbox)
            return
        self._launch_failed(sandbox, failure)

    def _launch_failed(self, sandbox: Sandbox, failure: Failure) -> None:
        sandbox.launch = sandbox.secrets = None
        self._drop_connection(sandbox)
        self.feed(sandbox, sm.LaunchFailed(failure, dead=sandbox.record.handle is None))

    async def _launch_stages(self, sandbox: Sandbox) -> None:
        record, clock = sandbox.record, time.perf_counter
        begin = clock()
        # An image may have to be fetched first: that must not hold up the launches of others.
        resolved = self._layers.resolve(record.spec.image, record.spec.layers)
        if isawaitable(resolved):
            resolved = await resolved
        record.layers, record.image = [ref.digest for ref in resolved.layers], resolved.config
        found = clock()
        async with self._launching:
            queued = clock()
            backend = self.backend(sandbox)
            handle, sock = await backend.launch(
                LaunchSpec(
                    sandbox_id=record.id,
                    slot=record.slot,
                    spec=with_secrets(record.spec, sandbox.secrets),
                    layers=list(resolved.layers),
                    image=resolved.config,
                    policy=self.policy(record.spec),
                    network_env=environment(record.spec.network_rules, self._config.services),
                )
            )
            record.handle = handle
            launched = clock()
            sandbox.connection = connection = await AetherConnection.open(
                sock, sandbox, self._watchdog, deadline_s=self._config.hello_deadline_s
            )
        assert connection.hello is not None
        record.instance = connection.hello.instance
        record.ready_at = time.time()
        stages = (queued - found, found - begin, launched - queued, clock() - launched, clock() - begin)
        names = ("queued", "layers", "launch", "hello", "total")
        record.timings_ms = {n: round(s * 1e3, 3) for n, s in zip(names, stages, strict=True)}

    def _drop_connection(self, sandbox: Sandbox) -> None:
        if (connection := sandbox.connection) is not None:
            sandbox.connection = None
            connection.close()
            sandbox.lose_dials(Unavailable(f"the connection with {sandbox.id} was lost"))

    # --- recover ---

    async def _recover(self, sandbox: Sandbox) -> None:
        handle = sandbox.record.handle
        assert handle is not None
        try:
            async with self._launching:
                sock = await self.backend(sandbox).recover(handle)
                connection = await AetherConnection.open(
                    sock, sandbox, self._watchdog, deadline_s=self._config.hello_deadline_s
                )
                check_instance(sandbox, connection)
                sandbox.connection = connection
                await self._operations.reconnected(sandbox, connection)
        except SandboxFailed as e:
            self._drop_connection(sandbox)
            self.feed(sandbox, sm.RecoverFailed(Failure(e.code, e.message)))
        except (DSecError, OSError) as e:
            log.warning("%s is not connected yet: %s", sandbox.id, e)
            self._drop_connection(sandbox)
            self._recovered(sandbox)
            if sandbox.state is State.RUNNING:
                self._mend(sandbox, e if isinstance(e, DSecError) else Unavailable(str(e)))
        else:
            self._recovered(sandbox)

    def _recovered(self, sandbox: Sandbox) -> None:
        self.feed(sandbox, sm.Recovered())
        if sandbox.machine.live:
            self._running(sandbox)

    # --- stop, destroy ---

    def _handle(self, sandbox: Sandbox) -> Handle:
        record = sandbox.record
        return record.handle or self.backend(sandbox).half_made(record.id, record.slot)

    async def _stop(self, sandbox: Sandbox) -> None:
        await self._undo(sandbox, "stop", sm.Stopped(), sm.StopFailed())

    async def _destroy(self, sandbox: Sandbox) -> None:
        await self._undo(sandbox, "destroy", sm.Destroyed(), sm.DestroyFailed())

    async def _undo(self, sandbox: Sandbox, verb: str, done: sm.Event, failed: sm.Event) -> None:
        try:
            async with self._stopping:
                await getattr(self.backend(sandbox), verb)(self._handle(sandbox))
        except asyncio.CancelledError:
            raise
        except Exception as e:
            sandbox.failures += 1
            log.error("%s of %s failed, to be tried again: %s", verb, sandbox.id, e)
            self.feed(sandbox, failed)
        else:
            sandbox.failures = 0
            self.feed(sandbox, done)

    def _retry(self, sandbox: Sandbox) -> None:
        delay = min(60.0, self._config.retry_s * 2 ** min(sandbox.failures - 1, 10))
        asyncio.get_running_loop().call_later(delay, self.feed, sandbox, sm.RetryDue())

    def _release(self, sandbox: Sandbox) -> None:
        self._released(sandbox)


def with_secrets(spec: SandboxSpec, secrets: dict[str, str] | None) -> SandboxSpec:
    return msgspec.structs.replace(spec, secrets=secrets) if secrets else spec


def check_instance(sandbox: Sandbox, connection: AetherConnection) -> None:
    """Raises ProtocolError when another aether answers than the one that was launched."""
    hello = connection.hello
    if hello is None or (sandbox.record.instance and hello.instance != sandbox.record.instance):
        connection.close()
        raise ProtocolError("another aether answers than the one that was launched")
