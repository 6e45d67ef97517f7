"""The lines of a Dockerfile as instructions: directives, comments, continuations, flags, heredocs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from dsec.layers.dockerfile.faults import At, shown
from dsec.layers.dockerfile.words import SPACE, Cursor, expand, split

MAX_FILE: Final = 1 << 20
MAX_LINE: Final = 64 << 10
"""Characters of an instruction, its continuations included; heredocs are apart."""
MAX_INSTRUCTIONS: Final = 2000
MAX_HEREDOCS: Final = 64
HEREDOCS: Final = frozenset({"RUN", "COPY", "ADD"})
_DIRECTIVE: Final = re.compile(r"#[ \t]*([A-Za-z][A-Za-z0-9]*)[ \t]*=[ \t]*(.*)\Z")
_HEREDOC: Final = re.compile(r"\d*<<(-?)([^<\s]+)\Z")

Said = Callable[[str], None]


class Heredoc(NamedTuple):
    name: str
    body: str
    """With its last newline; without leading tabs for `<<-`."""
    raw: bool
    """Its name was quoted: no variable in it is replaced."""
    word: str
    """As it stands in the instruction."""


class Flag(NamedTuple):
    name: str
    value: str
    """Empty for a flag without `=`."""


class Instruction(msgspec.Struct, frozen=True):
    line: int
    """Of its first line, from 1."""
    name: str
    """In capitals."""
    flags: tuple[Flag, ...]
    text: str
    """What follows the flags, its lines joined."""
    heredocs: tuple[Heredoc, ...] = ()


class Source(NamedTuple):
    """A file's instructions, and the escape character that it chose."""

    file: str
    escape: str
    instructions: tuple[Instruction, ...]


def read(data: bytes, file: str, said: Said) -> Source:
    """Raises InvalidArgument with file and line. said: told of what is ignored."""
    at = At(file, 1)
    if len(data) > MAX_FILE:
        raise at.bad(f"the file has more than {MAX_FILE} bytes: split it")
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as e:
        raise At(file, data[: e.start].count(b"\n") + 1).bad("this is no UTF-8: save it as UTF-8") from None
    if "\0" in text:
        raise At(file, text[: text.index("\0")].count("\n") + 1).bad("a NUL: take it out")
    return _Reader(file, [line.removesuffix("\r") for line in text.split("\n")], said).run()


class _Reader:
    def __init__(self, file: str, lines: list[str], said: Said) -> None:
        self._file = file
        self._lines = lines
        self._said = said
        self._next = 0
        self._escape = "\\"

    def run(self) -> Source:
        self._directives()
        found: list[Instruction] = []
        while self._next < len(self._lines):
            line = self._lines[self._next].strip(SPACE)
            if not line or line.startswith("#"):
                self._next += 1
                continue
            if len(found) == MAX_INSTRUCTIONS:
                raise self._at().bad(f"more than {MAX_INSTRUCTIONS} instructions: split the file")
            if made := self._instruction():
                found.append(made)
        return Source(self._file, self._escape, tuple(found))

    def _at(self) -> At:
        return At(self._file, min(self._next, len(self._lines) - 1) + 1)

    def _directives(self) -> None:
        """They come first, before any comment or blank line."""
        seen: set[str] = set()
        while self._next < len(self._lines) and (
            found := _DIRECTIVE.match(self._lines[self._next].strip(SPACE))
        ):
            name, value = found[1].lower(), found[2].strip(SPACE)
            if name not in {"escape", "syntax", "check"}:
                return
            if name in seen:
                raise self._at().bad(f"directive {name!r} is there twice: keep one")
            seen.add(name)
            self._directive(name, value)
            self._next += 1

    def _directive(self, name: str, value: str) -> None:
        if name != "escape":
            self._said(f"{self._at()}: directive {name!r} is ignored")
        elif value not in {"\\", "`"}:
            raise self._at().bad(f"escape={shown(value)}: a backslash or a backtick")
        else:
            self._escape = value

    def _instruction(self) -> Instruction | None:
        at = self._at()
        text = self._joined(at).strip(SPACE)
        if not text:
            return None
        name, _, rest = _partition(text)
        name = name.upper()
        if not re.fullmatch(r"[A-Z]+", name):
            raise at.bad(f"{shown(name)} is no instruction: begin the line with one such as RUN")
        at.name = name
        flags, rest = self._flags(rest, at)
        heredocs = self._heredocs(rest, at) if name in HEREDOCS else ()
        return Instruction(at.line, name, flags, rest, heredocs)

    def _joined(self, at: At) -> str:
        """An instruction's lines without their escapes; comments and blank lines in between are nothing."""
        parts: list[str] = []
        size = 0
        while self._next < len(self._lines):
            line = self._lines[self._next]
            self._next += 1
            if parts and (not line.strip(SPACE) or line.lstrip(SPACE).startswith("#")):
                continue
            part, goes_on = self._continued(line if parts else line.lstrip(SPACE))
            parts.append(part)
            size += len(part)
            if size > MAX_LINE:
                raise at.bad(f"more than {MAX_LINE} characters: use a script that is copied in")
            if not goes_on:
                break
        return "".join(parts)

    def _continued(self, line: str) -> tuple[str, bool]:
        bare = line.rstrip(" \t")
        if not bare.endswith(self._escape) or bare.endswith(self._escape * 2):
            return line, False
        return bare[:-1], True

    def _flags(self, text: str, at: At) -> tuple[tuple[Flag, ...], str]:
        flags: list[Flag] = []
        text = text.lstrip(SPACE)
        while text.startswith("--"):
            cursor = Cursor(text, self._escape)
            word = cursor.word()
            text = cursor.rest().lstrip(SPACE)
            if word == "--":
                break
            name, _, value = word[2:].partition("=")
            if any(name == flag.name for flag in flags) and name != "mount":
                raise at.bad(f"--{name} is there twice: keep one")
            flags.append(Flag(name, value))
        return tuple(flags), text

    def _heredocs(self, text: str, at: At) -> tuple[Heredoc, ...]:
        if "<<" not in text or (text.startswith("[") and text.endswith("]")):
            return ()
        found: list[Heredoc] = []
        for word in split(text, self._escape):
            if opened := _HEREDOC.match(word):
                if len(found) == MAX_HEREDOCS:
                    raise at.bad(f"more than {MAX_HEREDOCS} heredocs")
                found.append(self._heredoc(word, opened[1] == "-", opened[2], at))
        return tuple(found)

    def _heredoc(self, word: str, chomp: bool, quoted: str, at: At) -> Heredoc:
        name = expand(quoted, {}, self._escape, at)
        body: list[str] = []
        while self._next < len(self._lines):
            line = self._lines[self._next]
            self._next += 1
            line = line.lstrip("\t") if chomp else line
            if line == name:
                return Heredoc(name, "".join(one + "\n" for one in body), name != quoted, word)
            body.append(line)
        raise at.bad(f"the heredoc {shown(word)} has no end: add a line {shown(name)}")


def _partition(text: str) -> tuple[str, str, str]:
    for place, char in enumerate(text):
        if char in SPACE:
            return text[:place], char, text[place + 1 :]
    return text, "", ""
