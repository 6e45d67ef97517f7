"""Create, one command, destroy, thousands of times; then what is left on the host."""

from __future__ import annotations

import asyncio
import math

from bench import docker, host, tools
from bench.load import Timings, arguments, flight
from bench.measures import Options
from bench.measures.common import number, target, tried, with_client, with_docker
from bench.result import Result, ratio, rounded
from bench.server import Target
from dsec.client import DSecClient

SETTLE_S = 30
WARM = 600
"""More than the files that the server keeps open for a while."""


def measure(options: Options) -> Result:
    count, concurrency = options.count or 5000, options.concurrency or 16
    absent: dict[str, str] = {}
    limit = tried("kernel_limit", absent, lambda: tools.limit(min(count, 2000), 16, ["--cycle"]))
    with target(options) as to:
        timings, left, grown_mb = with_client(to, lambda client: _cycles(client, to, count, concurrency))
    theirs = with_docker(options, absent, _docker)
    if not to.pid:
        absent["leaked"] = "the server is not ours: what it left on its host is not known here"
    return Result(
        measure="cycle",
        value=round(timings.rate, 1),
        unit="per second",
        ratios=rounded(
            {
                "docker": ratio(timings.rate, number(theirs, "rate")),
                "kernel_limit": ratio(timings.rate, number(limit, "rate")),
            }
        ),
        figures=rounded(
            {
                "leaked": float(sum(left.values())) if to.pid else math.nan,
                **{f"leaked_{name}": float(n) for name, n in left.items()},
                "p50_ms": timings.p50,
                "p99_ms": timings.p99,
                "failed": timings.failed,
                "in_flight": concurrency,
                "server_growth_mb": grown_mb,
                "limit_cycle_per_s": number(limit, "rate"),
                "docker_per_s": number(theirs, "rate"),
            }
        ),
        samples=count,
        host=host.describe(),
        absent=absent,
    )


async def _docker(daemon: docker.Docker) -> dict[str, float]:
    return {"rate": await docker.cycles(daemon)}


async def _cycles(
    client: DSecClient, to: Target, count: int, concurrency: int
) -> tuple[Timings, dict[str, int], float]:
    args = arguments(to)

    async def one(_: int) -> None:
        sandbox = await client.run_container(args, timeout=120)
        try:
            await sandbox.run_shell("true")
        finally:
            await sandbox.stop()

    await flight(WARM, concurrency, one)
    before = await _settled(to, {})
    memory = host.rss_mb(to.pids)
    timings = await flight(count, concurrency, one)
    timings.complain("cycle")
    after = await _settled(to, before)
    left = {name: after[name] - n for name, n in before.items() if after[name] > n}
    return timings, left, host.rss_mb(to.pids) - memory


async def _settled(to: Target, wanted: dict[str, int]) -> dict[str, int]:
    """What the server holds once the kernel and the reclaimer are done with what has ended."""
    if not to.pid or to.data is None:
        return {}
    found: dict[str, int] = {}
    for _ in range(SETTLE_S):
        last, found = found, host.holdings(to.pid, to.edge, to.data)
        done = all(found[name] <= n for name, n in wanted.items()) if wanted else found == last
        if done:
            break
        await asyncio.sleep(1)
    return found
