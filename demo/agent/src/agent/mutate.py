"""Candidate edits of one line of source."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SWAPS = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("//",),
    "//": ("*",),
    "and": ("or",),
    "or": ("and",),
    "not": ("",),
    "True": ("False",),
    "False": ("True",),
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
}


class Edit(NamedTuple):
    """One token of one line, replaced. Lines count from 1, columns from 0."""

    path: Path
    line: int
    column: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column + 1}: {self.old} -> {self.new or 'nothing'}"

    def apply(self) -> str:
        """Writes it; the file's text before, to be put back."""
        before = self.path.read_text()
        lines = before.splitlines(keepends=True)
        text = lines[self.line - 1]
        lines[self.line - 1] = text[: self.column] + self.new + text[self.column + len(self.old) :]
        self.path.write_text("".join(lines))
        return before


def edits(path: Path, reached: set[int]) -> Iterator[Edit]:
    """Every edit of the lines that the failing tests reach."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        line, column = token.start
        if line in reached and token.start[0] == token.end[0]:
            for new in _instead(token):
                yield Edit(path, line, column, token.string, new)


def _instead(token: tokenize.TokenInfo) -> tuple[str, ...]:
    if token.type == tokenize.NUMBER and token.string.isdigit():
        number = int(token.string)
        return tuple(str(n) for n in (number - 1, number + 1) if n >= 0)
    if token.type in (tokenize.OP, tokenize.NAME):
        return SWAPS.get(token.string, ())
    return ()
