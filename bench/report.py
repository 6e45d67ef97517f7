"""Figures for people: on the terminal, and in docs/benchmarks.md."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.result import Result

NOTES: Final = re.compile(r"<!-- notes -->\n.*?<!-- /notes -->", re.S)
"""Written by hand in docs/benchmarks.md; kept when the rest is written anew."""
NO_NOTES: Final = "<!-- notes -->\n<!-- /notes -->"


INTRODUCTION: Final = """\
Written by `make bench`, but for the notes. Ratios compare with what ran on the same machine in the same run;
absolute figures drift with the machine. Nothing fails on a time."""

METHOD: Final = """\
## What is measured

- The load comes from a separate process on the same cores, through the HTTP SDK. A sandbox has three layers
  (a Debian base with Python and git, a workspace, a toolkit) and limits on memory, CPU, processes and disk.
- **Limit program** (`bench/limit.c`): what the kernel must do for such a sandbox and nothing else: the same
  namespaces, idmapped overlay on the same layers, writable layer with a quota, control groups, /proc, /dev,
  pivot_root, a PID 1 that stays; no masks of /proc, no seccomp, no server. The fastest of several numbers of
  workers counts, so that it does not idle where the kernel waits.
- **Spawn limit** (`bench/spawn_limit.c`): a bare posix_spawn loop of /bin/true.
- **Docker**: the distribution's dockerd with the same root imported, no network, the same limits. `docker` is
  its command line at 8 in flight, `docker_api` its HTTP interface.
- Memory of a sandbox is what the whole host has used more, slab included, page cache of files left out.
"""


@dataclass(frozen=True)
class Aim:
    """What a number should be. `key` is `value`, or a name among ratios or figures."""

    measure: str
    key: str
    text: str
    """What is measured, for people."""
    low: float | None = None
    high: float | None = None

    def of(self, result: Result) -> float | None:
        if self.key == "value":
            return result.value
        return result.ratios.get(self.key, result.figures.get(self.key))

    @property
    def wanted(self) -> str:
        if self.low is not None:
            return f"at least {number(self.low)}"
        return f"at most {number(self.high)}" if self.high is not None else "-"

    def met(self, found: float) -> str:
        if self.low is None and self.high is None:
            return ""
        ok = (self.low is None or found >= self.low) and (self.high is None or found <= self.high)
        return "yes" if ok else "**no**"


AIMS: Final = (
    Aim("create", "value", "Creations a second, burst of 2,000 at 64 in flight"),
    Aim("create", "kernel_limit", "... of the limit program's rate", low=0.5),
    Aim("create", "docker", "... times Docker's", low=25),
    Aim("create", "failed", "... failed", high=0),
    Aim("create-alone", "p50_ms", "Creation alone, p50 ms", high=8),
    Aim("create-alone", "first_result_p50_ms", "... to the first command's result, p50 ms", high=15),
    Aim("exec", "run_shell_p50_ms", '`run_shell("true")` alone, p50 ms', high=2),
    Aim("exec", "exec_p50_ms", '`exec(["/bin/true"])` alone, p50 ms', high=5),
    Aim("exec", "spawn_limit", "... at 64 in flight, of a bare posix_spawn loop", low=0.3),
    Aim("exec", "docker_exec", "... times faster than `docker exec`, alone"),
    Aim("cycle", "value", "Cycles (create, one command, destroy) a second, sustained", low=100),
    Aim("cycle", "leaked", "... things left on the host", high=0),
    Aim("density", "live", "Live sandboxes, each answering", low=3200),
    Aim("density", "mb_each", "... MB of host memory for an idle one, everything counted", high=1.2),
    Aim("density", "server_kb_each", "... KB of the server's memory for each", high=20),
    Aim("density", "idle_core_share", "... share of one core while all are idle", high=0.1),
    Aim("transfer", "up_mb_s", "1 GiB up, MB/s", low=300),
    Aim("transfer", "down_mb_s", "1 GiB down, MB/s", low=300),
    Aim("transfer", "server_growth_mb", "... growth of the server's memory, MB", high=32),
    Aim("cold-start", "value", "First result on a node that holds nothing, from a slow store, ms"),
    Aim("cold-start", "bytes_share", "... share of the image that was read", high=0.1),
    Aim("cold-start", "full_copy", "... times faster than copying the image first", low=10),
    Aim("cold-start", "warm", "... times the warm start", high=5),
    Aim("cold-start", "prefetch_warm", "... times the warm start, with reading ahead", high=2),
    Aim("layers-vs-tar", "speedup", "200 sandboxes with layers, times faster than unpacking into each"),
    Aim("layers-vs-tar", "bytes_written_less", "... times fewer bytes written"),
    Aim("import", "skopeo_umoci_mkfs", "Import, times faster than skopeo, umoci and mkfs.erofs", low=1),
    Aim("import", "peak_rss_mb", "... peak memory, MB"),
    Aim("pull-vs-docker", "docker", "Image absent, to the first result, times faster than Docker"),
    Aim("catalogue", "lookup_ms", "Lookup in 113,540 layers, p50 ms", high=1),
    Aim("catalogue", "lookup_p99_ms", "... p99 ms", high=1),
    Aim("catalogue", "page_ms", "... a page of 1,000 over HTTP, ms", high=50),
    Aim("catalogue", "toolkit_update_empty_store", "... updating a toolkit, times that in an empty store"),
    Aim("pack-diff", "frozen_ms", "pack_diff of 100 MB in 1,000 files: frozen, ms", high=100),
)


def number(value: float | None) -> str:
    """Three significant digits, thousands apart."""
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show(result: Result) -> None:
    """On the terminal."""
    print(f"{result.measure}: {number(result.value)} {result.unit}")
    for kind, numbers in (("ratio", result.ratios), ("", result.figures)):
        for name, value in numbers.items():
            print(f"  {kind:5} {name:28} {number(value):>12}")
    for what, why in result.absent.items():
        print(f"  absent {what}: {why}")
    sys.stdout.flush()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows)]


def _aims(results: dict[str, Result]) -> list[str]:
    rows = []
    for aim in AIMS:
        found = aim.of(results[aim.measure]) if aim.measure in results else None
        met = aim.met(found) if found is not None else "not measured"
        rows.append([aim.measure, aim.text, number(found), aim.wanted, met])
    return _table(["Measure", "What", "Measured", "Wanted", "Met"], rows)


def _everything(result: Result) -> list[str]:
    lines = [
        f"### {result.measure}",
        "",
        f"{number(result.value)} {result.unit}; {result.samples:,} samples.",
        "",
    ]
    rows = [["ratio", k, number(v)] for k, v in result.ratios.items()]
    rows += [["figure", k, number(v)] for k, v in result.figures.items()]
    lines += _table(["", "Name", "Value"], rows)
    lines += [f"- {what} is absent: {why}" for what, why in result.absent.items()]
    return [*lines, ""]


def page(results: dict[str, Result], failures: dict[str, str], notes: str) -> str:
    """The text of docs/benchmarks.md."""
    machine = next(iter(results.values())).host if results else {}
    lines = [
        "# Benchmarks",
        "",
        INTRODUCTION,
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, on: "
        + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())
        + ".",
        "",
        "## Wanted and measured",
        "",
        *_aims(results),
        "",
        *(f"- {name} could not be measured: {why}\n" for name, why in failures.items()),
        "## Notes",
        "",
        notes,
        "",
        METHOD,
        "## Everything",
        "",
        *(line for result in results.values() for line in _everything(result)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def notes_of(path: Path) -> str:
    """The part that was written by hand."""
    found = NOTES.search(path.read_text()) if path.exists() else None
    return found[0] if found else NO_NOTES
