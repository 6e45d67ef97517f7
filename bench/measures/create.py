"""A burst of creations through the HTTP SDK, creation to ready."""

from __future__ import annotations

from bench import docker, host, tools
from bench.load import Fleet, Timings
from bench.measures import Options
from bench.measures.common import number, target, tried, with_client, with_docker
from bench.result import Result, ratio, rounded
from bench.server import Target
from dsec.client import DSecClient


def measure(options: Options) -> Result:
    count, concurrency = options.count or 2000, options.concurrency or 64
    absent: dict[str, str] = {}
    limit = tried("kernel_limit", absent, lambda: tools.best_limit(count, concurrency))
    with target(options) as to:
        made, stopped = with_client(to, lambda client: _burst(client, to, count, concurrency))
    theirs = with_docker(options, absent, _docker)
    by_jobs = {f"limit_{jobs}_workers_per_s": rate for jobs, rate in limit.get("rate_by_jobs", {}).items()}
    return Result(
        measure="create",
        value=round(made.rate, 1),
        unit="per second",
        ratios=rounded(
            {
                "kernel_limit": ratio(made.rate, number(limit, "rate")),
                "docker": ratio(made.rate, number(theirs, "rate")),
                "docker_api": ratio(made.rate, number(theirs, "api_rate")),
            }
        ),
        figures=rounded(
            {
                "p50_ms": made.p50,
                "p99_ms": made.p99,
                "failed": made.failed,
                "in_flight": concurrency,
                "limit_per_s": number(limit, "rate"),
                **by_jobs,
                "limit_p50_ms": number(limit, "p50_ms"),
                "docker_per_s": number(theirs, "rate"),
                "docker_api_per_s": number(theirs, "api_rate"),
                "stop_per_s": stopped.rate,
                "stop_failed": stopped.failed,
            }
        ),
        samples=count,
        host=host.describe(),
        absent=absent,
    )


async def _burst(client: DSecClient, to: Target, count: int, concurrency: int) -> tuple[Timings, Timings]:
    fleet = Fleet(client, to)
    warm = Fleet(client, to)
    await warm.grow(4, 4)
    made = await fleet.grow(count, concurrency)
    stopped = await fleet.stop(concurrency)
    await warm.stop()
    return made, stopped


async def _docker(daemon: docker.Docker) -> dict[str, float]:
    found = await docker.creations(daemon)
    return {**found, "api_rate": await docker.api_creations(daemon)}
