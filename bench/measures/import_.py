"""An image of a registry to a layer that can be mounted, against skopeo, umoci and mkfs.erofs in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from bench import host, registry
from bench.measures import Options
from bench.measures.common import number, tried
from bench.result import Result, ratio, rounded
from bench.tools import CACHE, Unavailable


def measure(options: Options) -> Result:
    """`count` is how often; the fastest counts, of both."""
    absent: dict[str, str] = {}
    ours, theirs = [], []
    with registry.served() as reference:
        for _ in range(options.count or 2):
            ours.append(_ours(reference))
            theirs.append(tried("skopeo_umoci_mkfs", absent, lambda: _theirs(reference)))
    best = min(ours, key=lambda run: run["s"])
    other = min(theirs, key=lambda run: number(run, "s"))
    return Result(
        measure="import",
        value=round(best["s"], 2),
        unit="s",
        ratios=rounded({"skopeo_umoci_mkfs": ratio(number(other, "s"), best["s"])}),
        figures=rounded(
            {
                "peak_rss_mb": best["peak_mb"],
                "theirs_s": number(other, "s"),
                "theirs_peak_rss_mb": number(other, "peak_mb"),
                **{f"{step}_s": number(other, step) for step in ("skopeo", "umoci", "mkfs.erofs")},
            }
        ),
        samples=len(ours),
        host=host.describe(),
        absent=absent,
    )


def _ours(reference: str) -> dict[str, float]:
    """Into an empty store, by the program that people call; its start counts."""
    with TemporaryDirectory(dir=CACHE, prefix="import-") as top:
        argv = [sys.executable, "-m", "dsec.cli.main", "layer", "import", "--data", top, reference, "image:1"]
        took, peak = timed(argv)
    return {"s": took, "peak_mb": peak}


def _theirs(reference: str) -> dict[str, Any]:
    with TemporaryDirectory(dir=CACHE, prefix="umoci-") as top:
        layout, bundle = f"{top}/layout:x", f"{top}/bundle"
        steps = (
            ["skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{reference}", f"oci:{layout}"],
            ["umoci", "unpack", "--image", layout, bundle],
            ["mkfs.erofs", "--quiet", f"{top}/image.erofs", f"{bundle}/rootfs"],
        )
        found = {argv[0]: timed(argv) for argv in steps}
        assert Path(top, "image.erofs").stat().st_size
    return {
        "s": sum(took for took, _ in found.values()),
        "peak_mb": max(peak for _, peak in found.values()),
        **{name: took for name, (took, _) in found.items()},
    }


def timed(argv: Sequence[str]) -> tuple[float, float]:
    """Seconds, and the highest resident memory of one of its processes in MB. Raises Unavailable."""
    with TemporaryFile() as said:
        start = time.perf_counter()
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        except FileNotFoundError:
            raise Unavailable(f"{argv[0]} is not installed") from None
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise Unavailable(f"{argv[0]}: {said.read()[-300:].decode(errors='replace')}")
    return took, usage.ru_maxrss / 1024
