"""Keeps each running sandbox connected, and finds out when one has ended.

Nothing polls. The process of a sandbox holds its end of the connection for as long as it lives, so its end
shows as a lost connection; only then is it asked whether the process ended or a new connection can be made.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from dsec.backends.base import Exit
from dsec.core import sandbox_state as sm
from dsec.core.errors import AetherLost, DSecError, ProtocolError
from dsec.core.sandbox_state import Failure, State
from dsec.edge.aether import AetherConnection, Watchdog
from dsec.edge.config import EdgeConfig
from dsec.edge.lifecycle import Lifecycle, check_instance
from dsec.edge.operations import Operations
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import Tasks
from dsec.wire import aether as w

log = logging.getLogger(__name__)
QUICK_S: Final = 1.0
"""A connection that ends sooner, with no operation ended on it, counts as a breach."""
FIRST_PAUSE_S: Final = 0.01
MAX_PAUSE_S: Final = 2.0


class Link:
    """Watcher of all sandboxes."""

    lifecycle: Lifecycle
    """Set once, after both are made."""

    def __init__(self, operations: Operations, watchdog: Watchdog, tasks: Tasks, config: EdgeConfig) -> None:
        self._operations = operations
        self._watchdog = watchdog
        self._tasks = tasks
        self._config = config

    def event(self, sandbox: Sandbox, event: w.Event) -> None:
        log.info("%s says %s %.80r %.80r", sandbox.id, event.kind[:40], event.subject, event.detail)

    def connection_ended(self, sandbox: Sandbox, connection: AetherConnection, error: DSecError) -> None:
        if sandbox.connection is not connection:
            return
        sandbox.connection = None
        self._operations.disconnected(sandbox)
        if sandbox.state is not State.RUNNING:
            return
        quick = asyncio.get_running_loop().time() - connection.since < QUICK_S
        if isinstance(error, ProtocolError):
            log.warning("%s broke the protocol: %s", sandbox.id, error.message)
            sandbox.breaches += 1
        elif quick:
            sandbox.breaches += 1
        self.mend(sandbox, error)

    def mend(self, sandbox: Sandbox, error: DSecError) -> None:
        """See to it that a sandbox without a connection gets one, or fails. `error`: why it has none."""
        if not sandbox.mending:
            sandbox.mending = True
            self._tasks.spawn(self._mend(sandbox, error))

    async def _mend(self, sandbox: Sandbox, error: DSecError) -> None:
        try:
            event = await self._outcome(sandbox, error)
        finally:
            sandbox.mending = False
        if event is not None and sandbox.machine.live:
            self.lifecycle.feed(sandbox, event)
        elif sandbox.state is State.RUNNING and sandbox.connection is None:
            self.mend(sandbox, error)  # it was lost again meanwhile

    async def _outcome(self, sandbox: Sandbox, error: DSecError) -> sm.Event | None:
        """None when it is connected again, or somebody stops it; else how it has failed."""
        handle = sandbox.record.handle
        assert handle is not None
        exited = asyncio.ensure_future(self.lifecycle.backend(sandbox).wait_exit(handle))
        connected = asyncio.ensure_future(self._connect(sandbox, error))
        try:
            await asyncio.wait(
                {exited, connected},
                timeout=self._config.lost_after_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return _verdict(exited, connected, self._config.lost_after_s)
        finally:
            await _end(exited, connected)

    async def _connect(self, sandbox: Sandbox, error: DSecError) -> None:
        """Raises ProtocolError after too many breaches, and nothing else that comes from the sandbox."""
        pause = FIRST_PAUSE_S
        while sandbox.state is State.RUNNING and sandbox.connection is None:
            if sandbox.breaches >= self._config.breaches:
                raise ProtocolError(f"{sandbox.breaches} breaches of the protocol in a row: {error.message}")
            # Also before the first try: a process that has just died is found dead, not refused.
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)
            try:
                await self._attempt(sandbox)
            except ProtocolError as e:
                if sandbox.connection is None:
                    log.warning("%s broke the protocol: %s", sandbox.id, e.message)
                    sandbox.breaches += 1
                error = e
            except (DSecError, OSError) as e:
                log.debug("%s: no connection yet: %s", sandbox.id, e)

    async def _attempt(self, sandbox: Sandbox) -> None:
        handle = sandbox.record.handle
        assert handle is not None
        sock = await self.lifecycle.backend(sandbox).connect(handle)
        connection = await AetherConnection.open(
            sock, sandbox, self._watchdog, deadline_s=self._config.hello_deadline_s
        )
        check_instance(sandbox, connection)
        if sandbox.state is not State.RUNNING:
            connection.close()
            return
        sandbox.connection = connection
        await self._operations.reconnected(sandbox, connection)


def _verdict(
    exited: asyncio.Future[Exit], connected: asyncio.Future[None], lost_after_s: float
) -> sm.Event | None:
    if exited.done():
        exit = exited.result()
        return sm.Exited(exit.exit_code, exit.signal, exit.host_oom, exit.log)
    if not connected.done():
        error = AetherLost(f"the sandbox could not be reached for {lost_after_s:.0f} s, though it runs")
        return sm.Lost(Failure(error.code, error.message))
    e = connected.exception()
    if isinstance(e, ProtocolError):
        return sm.Breached(Failure(e.code, e.message))
    if e is not None:
        raise e
    return None


async def _end(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
