"""The demo's table, and the same as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from packing import Environment
from rich.console import Console
from rich.table import Table
from rollout import EXPECTED, OUTCOMES, Rollout


@dataclass
class Measures:
    """Of the run as a whole."""

    count: int
    create_seconds: float = 0.0
    create_ms: list[float] = field(default_factory=list)
    """Of each creation, as the server saw it."""
    rollout_seconds: float = 0.0
    host_bytes: int = 0
    """By which the host's available memory shrank while all sandboxes were made."""
    server_bytes: int = 0
    packed: Environment | None = None
    """What became of one that was solved."""
    failures: list[str] = field(default_factory=list)
    """Creations that failed."""
    left: list[str] = field(default_factory=list)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def unexpected(rollouts: list[Rollout], measures: Measures) -> list[str]:
    """What should not have been: infrastructure that failed, an end taken for another."""
    out = [f"creation: {f}" for f in measures.failures] + [f"left behind: {what}" for what in measures.left]
    for r in rollouts:
        wanted = EXPECTED.get(r.temper)
        if r.outcome == "error" or (wanted and r.outcome != wanted):
            out.append(f"rollout {r.number} ({r.task.package}, {r.temper}): {r.outcome}: {r.detail}")
    if measures.packed is not None and measures.packed.detail:
        out.append(f"packing a solved sandbox: {measures.packed.detail}")
    if not any(r.outcome == "solved" for r in rollouts):
        out.append("no rollout was solved")
    return out


def as_json(rollouts: list[Rollout], measures: Measures) -> dict[str, Any]:
    peaks = [float(r.memory_peak) for r in rollouts if r.memory_peak is not None]
    execs = [s * 1e3 for r in rollouts for s in r.execs]
    return {
        "rollouts": len(rollouts),
        "outcomes": dict(Counter(r.outcome for r in rollouts)),
        "create_rate_per_s": len(measures.create_ms) / max(measures.create_seconds, 1e-9),
        "create_ms": {
            "p50": percentile(measures.create_ms, 0.5),
            "p99": percentile(measures.create_ms, 0.99),
        },
        "exec_ms": {"p50": percentile(execs, 0.5), "p99": percentile(execs, 0.99)},
        "rollout_s": {
            "p50": percentile([r.seconds for r in rollouts], 0.5),
            "p99": percentile([r.seconds for r in rollouts], 0.99),
        },
        "rollouts_per_min": 60 * len(rollouts) / measures.rollout_seconds
        if measures.rollout_seconds
        else None,
        "host_memory_bytes_per_idle_sandbox": measures.host_bytes / max(len(measures.create_ms), 1),
        "server_memory_bytes": measures.server_bytes,
        "packed": _packed(measures.packed),
        "peak_memory_bytes": {"p50": percentile(peaks, 0.5), "max": max(peaks, default=0)},
        "unexpected": unexpected(rollouts, measures),
        "each": [
            {
                "number": r.number,
                "package": r.task.package,
                "temper": r.temper,
                "outcome": r.outcome,
                "reward": round(r.reward, 4),
                "passed": r.passed,
                "failed": r.failed,
                "tried": r.tried,
                "detail": r.detail,
                "seconds": round(r.seconds, 3),
            }
            for r in rollouts
        ],
    }


def _packed(made: Environment | None) -> dict[str, Any] | None:
    if made is None:
        return None
    return {
        "name": made.name,
        "bytes": made.bytes,
        "frozen_ms": round(made.frozen_ms, 1),
        "left_out": made.left_out,
        "findings": made.findings,
        "works": not made.detail,
    }


def show(console: Console, rollouts: list[Rollout], measures: Measures) -> None:
    table = Table(title=f"{len(rollouts)} rollouts", title_justify="left", box=None, pad_edge=False)
    table.add_column("package")
    for column in ("rollouts", *(o for o in OUTCOMES if o != "error"), "reward"):
        table.add_column(column, justify="right")
    by_package: dict[str, list[Rollout]] = {}
    for r in rollouts:
        by_package.setdefault(f"{r.task.package} {r.task.version}", []).append(r)
    for package, group in by_package.items():
        table.add_row(package, *_cells(group))
    table.add_section()
    table.add_row("all", *_cells(rollouts), style="bold")
    console.print(table)
    _figures(console, as_json(rollouts, measures), measures)


def _cells(group: list[Rollout]) -> list[str]:
    seen = Counter(r.outcome for r in group)
    numbers = [str(seen[o]) if seen[o] else "." for o in OUTCOMES if o != "error"]
    return [str(len(group)), *numbers, f"{sum(r.reward for r in group) / len(group):.3f}"]


def _figures(console: Console, data: dict[str, Any], measures: Measures) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    create, command, whole = data["create_ms"], data["exec_ms"], data["rollout_s"]
    mib = 1 << 20
    for name, text in (
        (
            "created",
            f"{len(measures.create_ms)} in {measures.create_seconds:.2f} s: "
            f"{data['create_rate_per_s']:.0f} a second",
        ),
        (
            "creation",
            f"p50 {create['p50']:.1f} ms, p99 {create['p99']:.1f} ms (all at once; queueing counts)",
        ),
        (
            "short command",
            f"p50 {command['p50']:.1f} ms, p99 {command['p99']:.1f} ms (agents running beside it)",
        ),
        (
            "rollout",
            f"p50 {whole['p50']:.1f} s, p99 {whole['p99']:.1f} s: {data['rollouts_per_min']:.0f} a minute",
        ),
        (
            "memory",
            f"{data['host_memory_bytes_per_idle_sandbox'] / mib:.2f} MiB of the host for an idle sandbox; "
            f"a rollout p50 {data['peak_memory_bytes']['p50'] / mib:.0f} MiB, "
            f"most {data['peak_memory_bytes']['max'] / mib:.0f} MiB; "
            f"server {data['server_memory_bytes'] / mib:.0f} MiB",
        ),
        ("packed", _packed_text(measures.packed)),
    ):
        table.add_row(f"[bold]{name}[/]", text)
    console.print(table)


def _packed_text(made: Environment | None) -> str:
    if made is None:
        return "nothing: no rollout was solved"
    if made.detail:
        return f"[red]{made.name}: {made.detail}[/]"
    return (
        f"one that was solved, as {made.name}: {made.bytes / 1024:.0f} KiB, "
        f"frozen for {made.frozen_ms:.0f} ms; "
        "its tests pass in a new sandbox of it"
    )
