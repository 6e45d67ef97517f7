"""`make demo`: layers from real code, a burst of rollouts, a table of what came of them.

    demo/run.py [--count 200] [--work .demo] [--parallel N]

What is made is kept below the work directory, so that the second run is quick.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).parent))

from packing import Environment, pack, try_out
from prepare import Layers, Say, Store, make_base, make_toolkit, make_workspaces, suite
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rollout import MEMORY_MB, Rollout, rollout
from tasks import Task

from dsec.client import DSecClient, DSecContainerRunArgs, DSecError, Sandbox
from report import Measures, as_json, show, unexpected
from server import Server

console = Console(highlight=False)
if not console.is_terminal:  # a pipe has no width of its own
    console = Console(highlight=False, width=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="rollouts")
    parser.add_argument("--work", type=Path, default=Path(__file__).parents[1] / ".demo")
    parser.add_argument("--parallel", type=int, default=4 * (os.cpu_count() or 1), help="agents at a time")
    parser.add_argument("--suite", default=suite(), help="of the base layer")
    options = parser.parse_args()
    if options.count < 1 or options.parallel < 1:
        parser.error("--count and --parallel begin at 1")
    if os.geteuid() != 0:
        raise SystemExit("the demo needs root: it makes namespaces, mounts and control groups")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        return demo(work, options.count, options.parallel, options.suite)
    except KeyboardInterrupt:
        console.print("interrupted; the server was stopped")
        return 130


def demo(work: Path, count: int, parallel: int, suite: str) -> int:
    begin = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - begin:6.1f} s[/]  {escape(text)}")

    data = work / "data"
    store = Store(data)
    base = make_base(store, suite, say)
    toolkit = make_toolkit(store, work, say)
    measures = Measures(count)
    server = Server(data)
    with server:
        say(f"dsec up: {server.url}")
        rollouts = asyncio.run(session(server, store, base, toolkit, work, measures, parallel, say))
    say("server stopped")
    measures.left = server.left()
    show(console, rollouts, measures)
    result = work / "result.json"
    result.write_text(json.dumps(as_json(rollouts, measures), indent=2) + "\n")
    console.print(f"all of it: {result}")
    wrong = unexpected(rollouts, measures)
    for line in wrong[:20]:
        console.print(f"[red]unexpected:[/] {escape(line)}")
    return 1 if wrong else 0


async def session(
    server: Server,
    store: Store,
    base: str,
    toolkit: str,
    work: Path,
    measures: Measures,
    parallel: int,
    say: Say,
) -> list[Rollout]:
    async with DSecClient(url=server.url, token=server.token) as client:
        workspaces = await make_workspaces(client, store, base, work, say)
        layers = Layers(base, toolkit, workspaces)
        await warm(client, layers)
        return await burst(client, server, layers, measures, parallel)


def arguments(layers: Layers, task: Task) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image=layers.base,
        layers=[layers.workspaces[task.package], layers.toolkit],
        memory_limit_mb=MEMORY_MB,
        cpu_cores_limit=1,
        pids_limit=64,
        disk_limit_mb=256,
        ttl_max=3600,
        project="demo",
        task=task.package,
    )


async def warm(client: DSecClient, layers: Layers) -> None:
    """Each stack once, so that the burst measures sandboxes and not the first mount of a layer."""
    for task in layers.tasks:
        async with await client.run_container(arguments(layers, task)):
            pass


async def burst(
    client: DSecClient, server: Server, layers: Layers, measures: Measures, parallel: int
) -> list[Rollout]:
    columns = (SpinnerColumn(), TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console
    ) as progress:
        async with AsyncExitStack() as stack:
            sandboxes = await create(client, server, layers, measures, progress)
            for sandbox, _, _ in sandboxes:
                stack.push_async_callback(stopped, sandbox)
            rollouts = await run_all(sandboxes, measures, parallel, progress)
            measures.server_bytes = server.memory()
            if measures.packed is not None:
                await try_out(client, measures.packed, arguments(layers, measures.packed.task))
        return rollouts


Made = list[tuple[Sandbox, Task, int]]


async def create(
    client: DSecClient, server: Server, layers: Layers, measures: Measures, progress: Progress
) -> Made:
    """All sandboxes, asked for at once."""
    bar = progress.add_task("sandboxes", total=measures.count, note="")
    made: Made = []
    free, begin = available(), time.monotonic()

    async def some(index: int, task: Task) -> None:
        numbers = range(index, measures.count, len(layers.tasks))
        if not numbers:
            return
        found = client.run_many(
            arguments(layers, task),
            len(numbers),
            on_error=lambda _, e: measures.failures.append(f"{e.code}: {e.message}"),
        )
        left = iter(numbers)
        async for sandbox in found:
            made.append((sandbox, task, next(left)))
            measures.create_seconds = time.monotonic() - begin
            measures.create_ms.append(sandbox.info.timings_ms.get("total", 0.0))
            progress.update(bar, completed=len(made), note=f"{len(made) / measures.create_seconds:.0f}/s")

    async with asyncio.TaskGroup() as group:
        for index, task in enumerate(layers.tasks):
            group.create_task(some(index, task))
    measures.host_bytes = free - available()
    return sorted(made, key=lambda m: m[2])


async def run_all(made: Made, measures: Measures, parallel: int, progress: Progress) -> list[Rollout]:
    bar = progress.add_task("agents", total=len(made), note="")
    room, begin = asyncio.Semaphore(parallel), time.monotonic()
    done: list[Rollout] = []

    async def one(sandbox: Sandbox, task: Task, number: int) -> None:
        async with room:
            result = await rollout(sandbox, task, number)
            if result.outcome == "solved" and measures.packed is None:
                measures.packed = Environment(task, "")  # taken: the others go on
                measures.packed = await pack(sandbox, task)
            done.append(result)
            await stopped(sandbox)
        seen = Counter(r.outcome for r in done)
        note = ", ".join(f"{count} {outcome}" for outcome, count in seen.most_common())
        progress.update(bar, completed=len(done), note=note)

    async with asyncio.TaskGroup() as group:
        for entry in made:
            group.create_task(one(*entry))
    measures.rollout_seconds = time.monotonic() - begin
    return sorted(done, key=lambda r: r.number)


async def stopped(sandbox: Sandbox) -> None:
    try:
        await sandbox.stop()
    except DSecError as e:
        console.print(f"[red]stopping {sandbox.id}: {e.code}: {escape(e.message)}[/]")


def available() -> int:
    """Bytes of memory that this host could still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024


if __name__ == "__main__":
    sys.exit(main())
