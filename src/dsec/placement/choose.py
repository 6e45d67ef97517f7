"""Where a sandbox goes: filter, then the least loaded of k nodes taken at random. Pure.

Sampling instead of sorting keeps instances that do not talk to each other from all choosing one node (the
power of two choices); each adds what it has placed itself since the last report.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Final

from dsec.core.specs import SandboxSpec
from dsec.wire.edge import NodeInfo

K: Final = 3
LIVE: Final = ("creating", "running", "pausing", "paused", "resuming", "stopping")


def choose(
    nodes: Iterable[NodeInfo],
    spec: SandboxSpec,
    recent: Mapping[str, int],
    rng: random.Random,
    *,
    without: frozenset[str] = frozenset(),
) -> str | None:
    """The edge to ask; None when no node qualifies. `recent`: own placements since each node's report."""
    fit = [n for n in nodes if n.edge not in without and qualifies(n, spec, recent.get(n.edge, 0))]
    if not fit:
        return None
    sample = fit if len(fit) <= K else rng.sample(fit, K)
    return min(sample, key=lambda n: (occupancy(n, recent.get(n.edge, 0)), rng.random())).edge


def qualifies(node: NodeInfo, spec: SandboxSpec, recent: int) -> bool:
    """Healthy, has the backend, has room."""
    has_backend = any(b.name == spec.backend and b.available for b in node.backends)
    return not node.draining and has_backend and occupancy(node, recent) < 1.0


def occupancy(node: NodeInfo, recent: int) -> float:
    """0 to 1: how full the node is, by sandboxes or by memory in use, whichever is fuller."""
    live = sum(node.counts.get(state, 0) for state in LIVE) + recent
    memory = 1 - node.memory_available_mb / node.memory_total_mb if node.memory_total_mb else 0.0
    return max(live / node.max_sandboxes if node.max_sandboxes else 1.0, memory)
