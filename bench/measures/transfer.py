"""A gibibyte into a sandbox and out of it again."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import host
from bench.load import Fleet
from bench.measures import Options
from bench.measures.common import target, with_client
from bench.result import Result, rounded
from bench.server import Target
from bench.tools import CACHE
from dsec.client import DSecClient

MIB = 1 << 20


def measure(options: Options) -> Result:
    """`count` is the size in MiB."""
    size = options.count or 1024
    with target(options) as to, TemporaryDirectory(dir=CACHE, prefix="transfer-") as top:
        source = Path(top) / "source"
        _fill(source, size)
        figures = with_client(to, lambda client: _there_and_back(client, to, source, size))
    return Result(
        measure="transfer",
        value=round(min(figures["up_mb_s"], figures["down_mb_s"]), 1),
        unit="MB/s, the lower of up and down",
        figures=rounded(figures),
        samples=1,
        host=host.describe(),
    )


def _fill(path: Path, size: int) -> None:
    """Bytes that nothing can compress, from a small pool so that making them is quick."""
    block = os.urandom(4 * MIB)
    with path.open("wb") as f:
        for i in range(0, size, 4):
            f.write(block[i % MIB :] + block[: i % MIB])
        f.truncate(size * MIB)


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


async def _there_and_back(client: DSecClient, to: Target, source: Path, size: int) -> dict[str, float]:
    fleet = Fleet(client, to, memory_limit_mb=4096, disk_limit_mb=2 * size + 1024, cpu_cores_limit=4)
    sandbox = await fleet.make()
    back = source.with_name("back")
    memory = host.rss_mb([to.pid]) if to.pid else 0.0
    if to.pid:
        host.reset_peak(to.pid)
    start = time.perf_counter()
    await sandbox.files.upload(source, "/data")
    up = time.perf_counter() - start
    start = time.perf_counter()
    await sandbox.files.download("/data", back)
    down = time.perf_counter() - start
    grown = host.peak_mb(to.pid) - memory if to.pid else float("nan")
    same = await asyncio.to_thread(lambda: _digest(source) == _digest(back))
    await fleet.stop()
    megabytes = size * MIB / 1e6
    return {
        "up_mb_s": megabytes / up,
        "down_mb_s": megabytes / down,
        "server_growth_mb": grown,
        "damaged": 0.0 if same else 1.0,
    }
