"""Create, one command, destroy, again and again: nothing grows, nothing is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.e2e.host import footprint
from tests.e2e.server import ServerProcess

from dsec.client import DSecClient, DSecContainerRunArgs

pytestmark = pytest.mark.kernel
IN_FLIGHT = 16


def is_log(fd: Path) -> bool:
    """Operation logs are kept open, the 512 that were used last."""
    try:
        return "/edge/operations/" in str(fd.readlink())
    except FileNotFoundError:
        return True  # closed since it was listed


def counts(process: ServerProcess) -> dict[str, int]:
    """Of the server and the host: descriptors, resident memory (KiB), mounts, groups, processes of ours."""
    assert process.process is not None
    proc = Path(f"/proc/{process.process.pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
    return {
        "fds": sum(not is_log(fd) for fd in (proc / "fd").iterdir()),
        "rss_kib": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "mounts": len((proc / "mountinfo").read_text().splitlines()),
        "host": len(footprint(process.data)),
    }


async def cycles(process: ServerProcess, number: int) -> None:
    async with DSecClient(url=process.url, token=process.token) as client:
        left = iter(range(number))

        async def worker() -> None:
            for _ in left:
                sandbox = await client.run_container(DSecContainerRunArgs(container_image="base"))
                result = await sandbox.exec(["/bin/echo", "x"])
                assert result.stdout == b"x\n"
                await sandbox.stop()

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(worker())


async def run(process: ServerProcess, warm: int, number: int, growth_kib: int) -> None:
    await cycles(process, warm)
    before = counts(process)
    await cycles(process, number)
    after = counts(process)
    assert after["host"] == 0
    assert after["mounts"] == before["mounts"]
    assert after["threads"] <= before["threads"] + 2
    # The client's connections, which the server may not have seen closed yet.
    assert after["fds"] <= before["fds"] + IN_FLIGHT + 4, (before, after)
    assert after["rss_kib"] <= before["rss_kib"] + growth_kib, (before, after)


async def test_a_few_hundred(server):
    await run(server, warm=100, number=300, growth_kib=16_384)


@pytest.mark.slow
async def test_ten_thousand(server):
    """The last 10,000 records are kept for look-ups: they are made first, then nothing may grow."""
    await run(server, warm=10_000, number=10_000, growth_kib=16_384)
