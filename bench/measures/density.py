"""How many idle sandboxes live at once, and what each costs the host while it does nothing."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from bench import host
from bench.load import Fleet, flight
from bench.measures import Options
from bench.measures.common import target, with_client
from bench.result import Result, ratio, rounded
from bench.server import Target
from dsec.client import DSecClient

IDLE_WINDOW_S = 30
SETTLE_S = 10
BATCH = 200


@dataclass
class Found:
    live: int
    answered: int
    failed: int
    seconds: float
    memory: dict[str, float]
    idle: dict[str, float]
    server_kb_each: float


def measure(options: Options) -> Result:
    count, concurrency = options.count or 3200, options.concurrency or 32
    with target(options) as to:
        found = with_client(to, lambda client: _fill(client, to, count, concurrency))
    return Result(
        measure="density",
        value=float(found.answered),
        unit="live",
        figures=rounded(
            {
                "live": float(found.answered),
                "failed": found.failed,
                "create_s": found.seconds,
                **found.memory,
                **found.idle,
                "server_kb_each": found.server_kb_each,
            }
        ),
        samples=count,
        host=host.describe(),
    )


async def _fill(client: DSecClient, to: Target, count: int, concurrency: int) -> Found:
    fleet, warm = Fleet(client, to), Fleet(client, to)
    await warm.grow(8, 8)
    await asyncio.sleep(SETTLE_S)  # what the start used is given back
    before, server = host.Memory.now(), host.rss_mb(to.pids)
    made = await fleet.grow(count, concurrency)
    await asyncio.sleep(SETTLE_S)
    after, grown = host.Memory.now(), host.rss_mb(to.pids) - server
    n = len(fleet.sandboxes)
    idle = await _idle_cpu(to)
    answers = await flight(n, concurrency, lambda i: fleet.sandboxes[i].exec(["/bin/true"]))
    answers.complain("answer")
    await fleet.stop()
    await warm.stop()
    return Found(
        live=n,
        answered=len(answers.ms),
        failed=made.failed + answers.failed,
        seconds=made.seconds,
        memory={
            "mb_each": ratio(after.used - before.used, n),
            "mb_available_each": ratio(before.available - after.available, n),
            "slab_mb_each": ratio(after.slab - before.slab, n),
            "page_cache_mb_each": ratio(after.page_cache - before.page_cache, n),
        },
        idle=idle,
        server_kb_each=ratio(grown * 1024, n) if to.pid else math.nan,
    )


async def _idle_cpu(to: Target) -> dict[str, float]:
    """Share of one core while nothing is asked: server, sandboxes and kernel threads; and the whole host."""
    groups = {"server": to.pids, "sandboxes": set(), "kernel": host.kernel_threads()}
    if to.pid:
        groups["sandboxes"] = host.members(host.groups_of(to.edge)) - to.pids
    start = time.monotonic()
    before = {name: host.cpu_seconds(pids) for name, pids in groups.items()}
    busy = host.host_busy_seconds()
    await asyncio.sleep(IDLE_WINDOW_S)
    span = time.monotonic() - start
    busy = (host.host_busy_seconds() - busy) / span
    shares = {f"idle_{name}_share": (host.cpu_seconds(p) - before[name]) / span for name, p in groups.items()}
    whole = sum(shares.values()) if to.pid else math.nan
    return {"idle_core_share": whole, **shares, "idle_host_share": busy}
