"""`dsec top`: the node and its busiest sandboxes, live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import click
from rich.live import Live
from rich.table import Table

from dsec.cli.output import ago, console, print_json, size
from dsec.cli.session import with_client
from dsec.client import DSecClient, SandboxInfo, SandboxStats


@click.command()
@click.option("--once", is_flag=True, help="Print once and end.")
@click.option("--json", "as_json", is_flag=True, help="Print once, for programs.")
@click.option("--interval", type=click.FloatRange(0.2), default=2.0, show_default=True)
@click.option("-n", "--rows", type=click.IntRange(1, 500), default=20, show_default=True)
@with_client
async def top(client: DSecClient, once: bool, as_json: bool, interval: float, rows: int) -> None:
    """The node, and the sandboxes that use most."""
    if as_json:
        print_json({"node": await client.node(), "sandboxes": [s for _, s in await _gather(client, rows)]})
        return
    if once:
        console.print(await _picture(client, rows, {}))
        return
    before: dict[str, tuple[float, int]] = {}
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(await _picture(client, rows, before), refresh=True)
            await asyncio.sleep(interval)


async def _gather(client: DSecClient, most: int) -> Sequence[tuple[SandboxInfo, SandboxStats]]:
    """The most recently used sandboxes and what they use; those that end meanwhile are left out."""
    infos = [i async for i in client.list_sandboxes(states=["running"])]
    infos.sort(key=lambda i: i.last_used_at, reverse=True)
    sandboxes = [await client.get_sandbox(i.id) for i in infos[:most]]
    stats = await asyncio.gather(*(s.stats() for s in sandboxes), return_exceptions=True)
    return [(i, s) for i, s in zip(infos, stats, strict=False) if isinstance(s, SandboxStats)]


async def _picture(client: DSecClient, rows: int, before: dict[str, tuple[float, int]]) -> Table:
    node, found = await client.node(), await _gather(client, rows)
    counts = ", ".join(f"{n} {state}" for state, n in sorted(node.counts.items()) if n)
    used = node.memory_total_mb - node.memory_available_mb
    title = (
        f"edge {node.edge}   {counts or 'no sandboxes'}   memory {used}/{node.memory_total_mb} MiB   "
        f"load {node.load:.2f} on {node.cpus}   created {node.created_total}, failed {node.failed_total}"
    )
    out = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("ID", "CPU %", "MEMORY", "PIDS", "DISK", "OOM", "UP"):
        out.add_column(column)
    now = time.monotonic()
    for info, stats in found:
        share = "-"
        if stats.cpu_us is not None:
            if info.id in before and now > before[info.id][0]:
                then, cpu = before[info.id]
                share = f"{(stats.cpu_us - cpu) / (now - then) / 1e4:.1f}"
            before[info.id] = (now, stats.cpu_us)
        out.add_row(
            info.id,
            share,
            size(stats.memory_bytes),
            str(stats.pids),
            size(stats.disk_bytes),
            str(stats.oom_kills or 0),
            ago(stats.uptime_s),
        )
    return out
