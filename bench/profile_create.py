"""Where the time of a burst of creations goes: `python -m bench.profile_create [--count N]`.

Two views. Processor time by party (load, server, launchers, sandboxes, kernel threads), per creation:
what must shrink for a higher rate. Then, with py-spy installed, the server's and the load's own stacks: by
component and by function.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from bench import host
from bench.load import Fleet, Timings
from bench.measures import Options
from bench.measures.common import target, with_client
from bench.server import Target
from dsec.client import DSecClient

RATE_HZ = 500
FRAME = re.compile(r"^(?P<function>.+) \((?P<file>[^():]+)(?::\d+)?\)$")


@click.command()
@click.option("--count", default=1000, show_default=True)
@click.option("--concurrency", default=64, show_default=True)
@click.option("--stacks/--no-stacks", default=True, help="Sample stacks, which costs time itself.")
@click.option("--lines", default=25, show_default=True, help="Functions shown.")
def main(count: int, concurrency: int, stacks: bool, lines: int) -> None:
    """Profile a burst on a server of its own."""
    with target(Options()) as to, TemporaryDirectory() as top:
        with_client(
            to, lambda client: _profile(client, to, count, concurrency, Path(top) if stacks else None)
        )
        for who in ("server", "load"):
            samples = Path(top) / who
            if samples.exists():
                show_stacks(who, samples.read_text().splitlines(), lines)


async def _profile(client: DSecClient, to: Target, count: int, concurrency: int, top: Path | None) -> None:
    warm, fleet = Fleet(client, to), Fleet(client, to)
    await warm.grow(8, 8)
    with sampled(to.pid, top, "server"), sampled(os.getpid(), top, "load"):
        before, busy = _spent(to), host.host_busy_seconds()
        made = await fleet.grow(count, concurrency)
        busy = host.host_busy_seconds() - busy
        after = _spent(to)
    _show_parties(made, {name: after[name] - before.get(name, 0) for name in after}, busy)
    await fleet.stop()
    await warm.stop()


def _spent(to: Target) -> dict[str, float]:
    """Seconds of processor time so far, by party."""
    children = to.pids - {to.pid}
    sandboxes = host.members(host.groups_of(to.edge)) - to.pids
    return {
        "load generator": host.cpu_seconds([os.getpid()]),
        "server": host.cpu_seconds([to.pid]),
        "launchers": host.cpu_seconds(children),
        "sandboxes": host.cpu_seconds(sandboxes),
        "kernel threads": host.cpu_seconds(host.kernel_threads()),
    }


def _show_parties(made: Timings, seconds: dict[str, float], busy: float) -> None:
    n = max(1, len(made.ms))
    print(f"{n} creations, {made.rate:.1f} a second, p50 {made.p50:.1f} ms, p99 {made.p99:.1f} ms")
    print(f"  {'party':20} {'ms each':>8}")
    for name, spent in seconds.items():
        print(f"  {name:20} {spent * 1e3 / n:8.3f}")
    there = made.seconds * 1e3 * (os.cpu_count() or 1) / n
    print(f"  {'all of the host':20} {busy * 1e3 / n:8.3f}   of {there:.3f}")


@contextmanager
def sampled(pid: int, top: Path | None, who: str) -> Iterator[None]:
    """py-spy on a process, where it is installed; its samples are in `top / who` afterwards."""
    if top is None:
        yield
        return
    out = top / who
    beside = Path(sys.executable).with_name("py-spy")
    spy = str(beside) if beside.exists() else shutil.which("py-spy")
    if not spy:
        print("py-spy is not installed: no stacks", file=sys.stderr)
        yield
        return
    argv = [
        spy,
        "record",
        "-p",
        str(pid),
        "-r",
        str(RATE_HZ),
        "-f",
        "raw",
        "-o",
        str(out),
        "-d",
        "3600",
        "--nonblocking",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(2)  # it writes what it has
        process.wait(timeout=60)


def component(frame: str) -> str:
    """The room that a frame belongs to: a package of ours, or a library."""
    match = FRAME.match(frame)
    path = match["file"] if match else frame
    for mark in ("site-packages/", "/src/", "/"):
        if mark in path:
            path = path.rpartition(mark)[2] if mark != "/" else path
            break
    parts = path.strip("/").split("/")
    return "/".join(parts[:2]) if parts[0] == "dsec" else parts[0]


def show_stacks(who: str, lines: list[str], count: int) -> None:
    """Collapsed stacks (`a;b;c 12`) as shares: by innermost component of ours, and by function."""
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    total = 0
    for line in lines:
        stack, _, times = line.rpartition(" ")
        frames, n = stack.split(";"), int(times)
        total += n
        own[frames[-1]] += n
        rooms[next((component(f) for f in reversed(frames) if component(f).startswith("dsec")), "other")] += n
        for frame in set(frames):
            within[frame] += n
    print(f"\n{who}: {total} samples")
    for title, counter in (
        ("component", rooms),
        ("function, itself", own),
        ("function, with what it calls", within),
    ):
        print(f"  {title}")
        for name, n in counter.most_common(count):
            print(f"    {n / max(1, total):6.1%}  {name}")


if __name__ == "__main__":
    main()
