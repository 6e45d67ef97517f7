"""A new edge takes over from one that was killed, at whatever instant.

Every step here may be cut off by the next SIGKILL, and is then done again: nothing is decided but from
records, and nothing is reclaimed before all records were read.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dsec.core import sandbox_state as sm
from dsec.core.errors import DSecError, OutcomeUnknown
from dsec.core.sandbox_state import Action, SandboxMachine
from dsec.edge.sandbox import Sandbox

if TYPE_CHECKING:
    from dsec.edge.service import EdgeService

log = logging.getLogger(__name__)


async def recover(edge: EdgeService) -> None:
    """Returns when every live sandbox was tried, and what nobody claims is gone."""
    found = [
        edge.adopt(r, SandboxMachine.restored(r.state, r.reason, r.failure, r.gone))
        for r in sorted(edge.records.load(), key=lambda r: r.ended_at or r.created_at)
    ]
    edge.slots.restore({s.record.slot for s in found if not s.machine.gone})
    for sandbox in found:
        if not sandbox.machine.gone:
            await _restore_network(edge, sandbox)
    for sandbox in found:
        _settle(edge, sandbox)
    claimed = frozenset(s.id for s in found if not s.machine.gone)
    for name, backend in edge.backends.items():
        for what in await backend.reclaim(claimed):
            log.warning("reclaimed from %s: %s", name, what)
    for sandbox in found:
        while sandbox.machine.pending is Action.RECOVER:
            await sandbox.changed()


async def _restore_network(edge: EdgeService, sandbox: Sandbox) -> None:
    """Before anything is reclaimed: what no rules are known of is taken down."""
    try:
        await edge.lifecycle.restore_network(sandbox)
    except DSecError as e:
        log.error("the network of %s is not restored: %s", sandbox.id, e.message)


def _settle(edge: EdgeService, sandbox: Sandbox) -> None:
    if sandbox.machine.gone:
        edge.retention.keep(sandbox)
        return
    sandbox.unmatched = True
    edge.lifecycle.feed(sandbox, sm.Restarted())
    if not sandbox.machine.live:
        edge.operations.lose_all(sandbox, OutcomeUnknown("the sandbox ended while the server was away"))
