"""One creation at a time, and the first command's result in it."""

from __future__ import annotations

import time

from bench import docker, host, tools
from bench.load import Fleet
from bench.measures import Options
from bench.measures.common import number, target, tried, with_client, with_docker
from bench.result import Result, percentile, ratio, rounded
from bench.server import Target
from dsec.client import DSecClient


def measure(options: Options) -> Result:
    count = options.count or 200
    absent: dict[str, str] = {}
    limit = tried("kernel_limit", absent, lambda: tools.limit(count, 1))
    with target(options) as to:
        ready, first = with_client(to, lambda client: _one_by_one(client, to, count))
    theirs = with_docker(options, absent, lambda daemon: docker.creations(daemon, burst=1, concurrency=1))
    p50 = percentile(ready, 0.5)
    return Result(
        measure="create-alone",
        value=round(p50, 2),
        unit="ms (p50)",
        ratios=rounded(
            {
                "docker": ratio(number(theirs, "p50_ms"), p50),
                "kernel_limit": ratio(p50, number(limit, "p50_ms")),
            }
        ),
        figures=rounded(
            {
                "p50_ms": p50,
                "p99_ms": percentile(ready, 0.99),
                "first_result_p50_ms": percentile(first, 0.5),
                "first_result_p99_ms": percentile(first, 0.99),
                "limit_p50_ms": number(limit, "p50_ms"),
                "docker_p50_ms": number(theirs, "p50_ms"),
            }
        ),
        samples=count,
        host=host.describe(),
        absent=absent,
    )


async def _one_by_one(client: DSecClient, to: Target, count: int) -> tuple[list[float], list[float]]:
    """Ms from the request to ready, and to the first command's result."""
    ready, first = [], []
    for i in range(count + 3):
        fleet = Fleet(client, to)
        start = time.perf_counter()
        sandbox = await fleet.make()
        made = time.perf_counter()
        await sandbox.run_shell("true")
        done = time.perf_counter()
        await fleet.stop()
        if i >= 3:  # the first ones warm the caches
            ready.append((made - start) * 1e3)
            first.append((done - start) * 1e3)
    return ready, first
