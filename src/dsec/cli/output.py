"""Tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

# Into a pipe a line is a line: nothing that a program cuts at spaces is folded.
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document, and a line's end."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.buffer.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """A plain table. Cells may hold markup; nothing that a sandbox printed goes through here unescaped."""
    out = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, overflow="fold", no_wrap=i == 0)
    for row in rows:
        out.add_row(*(str(cell) for cell in row))
    console.print(out)


def size(n: float | None) -> str:
    """Bytes for people."""
    if n is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def ago(seconds: float) -> str:
    """A span of time for people."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
