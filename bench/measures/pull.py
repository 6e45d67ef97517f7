"""An image that is not there, from a registry on this machine to a program's result: ours against Docker's.

Bytes written are those of /proc/PID/io, of the server and all that it started (and has waited for).
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import docker, host, registry
from bench.load import Fleet
from bench.measures import Options
from bench.measures.common import number, with_client, with_docker
from bench.result import Result, ratio, rounded
from bench.server import Target, on_store
from bench.tools import CACHE, Unavailable
from dsec.client import DSecClient

COMMAND = ["python3", "-c", "print(6 * 7)"]


def measure(options: Options) -> Result:
    absent: dict[str, str] = {}
    with registry.served() as reference:
        with TemporaryDirectory(dir=CACHE, prefix="pull-") as top, on_store(Path(top), reference) as to:
            took = with_client(to, lambda client: _first_result(client, to))
            ours = {"s": took, "written": host.written_mb(_all(to))}

        async def pulled(daemon: docker.Docker) -> dict[str, float]:
            return await _docker(daemon, reference)

        theirs = with_docker(options, absent, pulled)
    return Result(
        measure="pull-vs-docker",
        value=round(ours["s"], 2),
        unit="s",
        ratios=rounded(
            {
                "docker": ratio(number(theirs, "s"), ours["s"]),
                "bytes_written_less": ratio(number(theirs, "written"), ours["written"]),
            }
        ),
        figures=rounded(
            {
                "written_mb": ours["written"],
                "docker_s": number(theirs, "s"),
                "docker_written_mb": number(theirs, "written"),
            }
        ),
        samples=1,
        host=host.describe(),
        absent=absent,
    )


def _all(to: Target) -> set[int]:
    return to.pids | host.members(host.groups_of(to.edge))


async def _first_result(client: DSecClient, to: Target) -> float:
    fleet = Fleet(client, to)
    start = time.perf_counter()
    sandbox = await fleet.make()
    done = await sandbox.exec(COMMAND)
    took = time.perf_counter() - start
    if done.exit_code:
        raise Unavailable(f"the image's program failed: {done.stderr!r:.300}")
    return took


async def _docker(daemon: docker.Docker, reference: str) -> dict[str, float]:
    pids = host.descendants(daemon.process.pid)
    before = host.written_mb(pids)
    pull_ms = await daemon.client("pull", "--quiet", reference)
    run_ms = await daemon.client("run", "--rm", *docker.LIMITS, reference, *COMMAND)
    after = host.written_mb(host.descendants(daemon.process.pid))
    return {"s": (pull_ms + run_ms) / 1e3, "written": after - before}
