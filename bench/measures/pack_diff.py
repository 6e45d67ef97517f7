"""What a sandbox has changed, as a layer: 100 MB in 1,000 files, and how long the sandbox stands still."""

from __future__ import annotations

import time

from bench import host
from bench.load import Fleet
from bench.measures import Options
from bench.measures.common import target, with_client
from bench.result import Result, percentile, rounded
from bench.server import Target
from bench.tools import Unavailable
from dsec.client import DSecClient

FILES = 1000
FILE_SIZE = 100_000
FILL = f"""
import os
for n in range({FILES}):
    os.makedirs(f"/srv/{{n % 10}}", exist_ok=True)
    with open(f"/srv/{{n % 10}}/{{n}}", "wb") as f:
        f.write(os.urandom({FILE_SIZE}))
"""


def measure(options: Options) -> Result:
    """`count` is how often it is packed."""
    with target(options) as to:
        took, frozen = with_client(to, lambda client: _packs(client, to, options.count or 5))
    size = FILES * FILE_SIZE / 1e6
    p50 = percentile(took, 0.5)
    return Result(
        measure="pack-diff",
        value=round(p50, 3),
        unit="s",
        figures=rounded(
            {"frozen_ms": percentile(frozen, 0.5), "frozen_max_ms": max(frozen), "mb_s": size / p50}
        ),
        samples=len(took),
        host=host.describe(),
    )


async def _packs(client: DSecClient, to: Target, count: int) -> tuple[list[float], list[float]]:
    """Each one's seconds, and the ms that the sandbox was frozen. New content each time: nothing is known."""
    took, frozen = [], []
    fleet = Fleet(client, to)
    sandbox = await fleet.make()
    for _ in range(count):
        filled = await sandbox.exec(["python3", "-c", FILL])
        if filled.exit_code:
            raise Unavailable(f"filling the sandbox: {filled.stderr!r:.300}")
        start = time.perf_counter()
        packed = await sandbox.pack_diff()
        took.append(time.perf_counter() - start)
        frozen.append(packed.frozen_s * 1e3)
    await fleet.stop()
    return took, frozen
