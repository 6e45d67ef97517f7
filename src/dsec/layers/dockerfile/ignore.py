"""Patterns of paths as Docker has them: .dockerignore, and the sources of COPY."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from dsec.layers.dockerfile.faults import At, shown

MAX_FILE: Final = 1 << 20
MAX_PATTERNS: Final = 2000
MAX_PATTERN: Final = 4096
_MAGIC: Final = frozenset("*?[\\")
Segment = re.Pattern[str] | None
"""None: `**`, any number of directories."""


class Rule(NamedTuple):
    segments: tuple[Segment, ...]
    keeps: bool
    """It began with `!`."""


class Ignore:
    """What a .dockerignore leaves out of the context."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = rules
        self.has_exceptions = any(rule.keeps for rule in rules)
        """Then a directory that is left out may hold what is not."""

    def __call__(self, path: str) -> bool:
        """Whether a path, relative to the context, is left out. The last rule that matches says so."""
        parts = path.split("/")
        for rule in reversed(self._rules):
            if any(matches(rule.segments, parts[:size]) for size in range(len(parts), 0, -1)):
                return not rule.keeps
        return False


def parse(data: bytes, file: str = ".dockerignore") -> Ignore:
    """Raises InvalidArgument with the line that is no pattern."""
    if len(data) > MAX_FILE:
        raise At(file, 1).bad(f"the file has more than {MAX_FILE} bytes")
    rules: list[Rule] = []
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    for number, line in enumerate(text.split("\n"), 1):
        if rule := _rule(line, At(file, number)):
            rules.append(rule)
        if len(rules) > MAX_PATTERNS:
            raise At(file, number).bad(f"more than {MAX_PATTERNS} patterns: use wildcards")
    return Ignore(rules)


def _rule(line: str, at: At) -> Rule | None:
    if line.startswith("#"):
        return None
    line = line.strip()
    keeps = line.startswith("!")
    pattern = line[1:].strip() if keeps else line
    if keeps and not pattern:
        raise at.bad("'!' without a pattern: add one, or take the line out")
    clean = posixpath.normpath(pattern).lstrip("/") if pattern else ""
    if clean in ("", "."):
        return None
    return Rule(compile_pattern(clean, at), keeps)


def compile_pattern(pattern: str, at: At) -> tuple[Segment, ...]:
    """Segment by segment: `*` never spans a slash, `**` as a whole segment does. Raises InvalidArgument."""
    if len(pattern) > MAX_PATTERN:
        raise at.bad(f"{shown(pattern)}: more than {MAX_PATTERN} characters")
    segments: list[Segment] = []
    for part in pattern.split("/"):
        made = None if part == "**" else _segment(part, at)
        if made is not None or not segments or segments[-1] is not None:
            segments.append(made)
    return tuple(segments)


def _segment(part: str, at: At) -> re.Pattern[str]:
    out: list[str] = []
    place = 0
    while place < len(part):
        char = part[place]
        place += 1
        if char == "\\":
            char, place = part[place : place + 1], place + 1
            if not char:
                raise at.bad(f"{shown(part)}: a backslash at the end of a name")
            out.append(f"[{char}]" if char in "*?[" else char)
        elif char == "[":
            end = part.find("]", place + 1)
            if end < 0:
                raise at.bad(f"{shown(part)}: a [ has no end: add ], or write \\[")
            out.append(_class(part[place:end]))
            place = end + 1
        else:
            out.append(char)
    return re.compile(fnmatch.translate("".join(out)))


def _class(inside: str) -> str:
    return "[!" + inside[1:] + "]" if inside.startswith("^") else "[" + inside + "]"


def matches(segments: Sequence[Segment], parts: Sequence[str]) -> bool:
    """Whether a whole path matches: the places in the pattern that each part may have reached."""
    states = _closure({0}, segments)
    for part in parts:
        after: set[int] = set()
        for state in states:
            if state == len(segments):
                continue
            segment = segments[state]
            if segment is None:
                after.add(state)
            elif segment.match(part):
                after.add(state + 1)
        states = _closure(after, segments)
        if not states:
            return False
    return len(segments) in states


def _closure(states: set[int], segments: Sequence[Segment]) -> set[int]:
    """With those that a `**` reaches as no directory at all."""
    found = set(states)
    for state in states:
        while state < len(segments) and segments[state] is None:
            state += 1
            found.add(state)
    return found


def is_pattern(path: str) -> bool:
    return not _MAGIC.isdisjoint(path)
