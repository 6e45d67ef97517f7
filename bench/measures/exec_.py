"""Round trips in warm sandboxes, alone and with many in flight."""

from __future__ import annotations

from bench import docker, host, tools
from bench.load import Fleet, Timings, flight
from bench.measures import Options
from bench.measures.common import number, target, tried, with_client, with_docker
from bench.result import Result, ratio, rounded
from bench.server import Target
from dsec.client import DSecClient

PROGRAM = ["/bin/true"]


def measure(options: Options) -> Result:
    count, concurrency = options.count or 5000, options.concurrency or 64
    absent: dict[str, str] = {}
    bare = tried("spawn_limit", absent, lambda: tools.spawn_limit(count, concurrency))
    with target(options) as to:
        runs = with_client(to, lambda client: _round_trips(client, to, count, concurrency))
    theirs = with_docker(options, absent, _docker)
    rate, alone = runs["exec"].rate, runs["exec_alone"].p50
    return Result(
        measure="exec",
        value=round(rate, 1),
        unit=f"per second at {concurrency} in flight",
        ratios=rounded(
            {
                "spawn_limit": ratio(rate, number(bare, "rate")),
                "docker_exec": ratio(number(theirs, "p50_ms"), alone),
            }
        ),
        figures=rounded(
            {
                "run_shell_p50_ms": runs["shell_alone"].p50,
                "run_shell_p99_ms": runs["shell_alone"].p99,
                "exec_p50_ms": alone,
                "exec_p99_ms": runs["exec_alone"].p99,
                "run_shell_per_s": runs["shell"].rate,
                "loaded_exec_p50_ms": runs["exec"].p50,
                "loaded_run_shell_p50_ms": runs["shell"].p50,
                "failed": sum(run.failed for run in runs.values()),
                "spawn_limit_per_s": number(bare, "rate"),
                "docker_exec_p50_ms": number(theirs, "p50_ms"),
            }
        ),
        samples=count,
        host=host.describe(),
        absent=absent,
    )


async def _docker(daemon: docker.Docker) -> dict[str, float]:
    return {"p50_ms": await docker.execs(daemon)}


async def _round_trips(client: DSecClient, to: Target, count: int, concurrency: int) -> dict[str, Timings]:
    fleet = Fleet(client, to)
    await fleet.grow(concurrency, 8)
    boxes = fleet.sandboxes
    for sandbox in boxes:  # the first command in a sandbox starts its shell
        await sandbox.run_shell("true")
    few = min(count, 500)
    runs = {
        "shell_alone": await flight(few, 1, lambda _: boxes[0].run_shell("true")),
        "exec_alone": await flight(few, 1, lambda _: boxes[0].exec(PROGRAM)),
        "exec": await flight(count, concurrency, lambda i: boxes[i % len(boxes)].exec(PROGRAM)),
        "shell": await flight(count, concurrency, lambda i: boxes[i % len(boxes)].run_shell("true")),
    }
    for name, timings in runs.items():
        timings.complain(name)
    await fleet.stop()
    return runs
