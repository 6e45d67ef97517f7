"""A Dockerfile's instructions, checked: what is not supported is refused by name.

`RUN --mount=type=cache` and `type=tmpfs` are ignored with a word: what they hold is no part of a layer, and a
build is right without a cache. Any other mount would change what the command sees, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import msgspec

from dsec.layers.dockerfile.faults import At, shown
from dsec.layers.dockerfile.lines import Heredoc, Instruction, Said, Source, read
from dsec.layers.dockerfile.words import split

MAX_STAGES: Final = 100
FLAGS: Final[dict[str, frozenset[str]]] = {
    "FROM": frozenset({"platform"}),
    "RUN": frozenset({"mount"}),
    "COPY": frozenset({"from", "chown", "chmod"}),
    "ADD": frozenset({"chown", "chmod"}),
}
IGNORED: Final = {
    "HEALTHCHECK": "a sandbox has no health check",
    "MAINTAINER": "use LABEL",
    "VOLUME": "a sandbox has no volumes: the directory is one of the layer's",
}
MOUNTS: Final = frozenset({"cache", "tmpfs"})
_COMMANDS: Final = frozenset({"RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD", "VOLUME"})
_KNOWN: Final = frozenset(
    {"ARG", "ENV", "EXPOSE", "FROM", "LABEL", "STOPSIGNAL", "USER", "WORKDIR"} | _COMMANDS | set(IGNORED)
)
Pair = tuple[str, str | None]


class Parsed(msgspec.Struct, frozen=True):
    """One instruction; no variable in it is replaced yet."""

    line: int
    name: str
    text: str
    """What follows the flags."""
    flags: dict[str, str] = {}
    words: tuple[str, ...] = ()
    """Of the JSON form, or raw words."""
    json: bool = False
    pairs: tuple[Pair, ...] = ()
    """Of ENV, LABEL and ARG, raw; None: an ARG without a default."""
    heredocs: tuple[Heredoc, ...] = ()


class Stage(msgspec.Struct, frozen=True):
    """FROM, and what follows it."""

    start: Parsed
    base: str
    """Raw: its variables are not replaced yet."""
    name: str
    """In small letters; empty when it has none."""
    body: tuple[Parsed, ...]


class Dockerfile(msgspec.Struct, frozen=True):
    file: str
    escape: str
    args: tuple[Parsed, ...]
    """The ARGs before the first FROM."""
    stages: tuple[Stage, ...]

    def at(self, parsed: Parsed) -> At:
        return At(self.file, parsed.line, parsed.name)


def parse(data: bytes, file: str = "Dockerfile", said: Said = lambda _: None) -> Dockerfile:
    """Raises InvalidArgument, which names the file, the line and the instruction, and says what to do.

    said: told a line for each thing that is ignored.
    """
    source = read(data, file, said)
    parsed = [_Parser(source, one, said).run() for one in source.instructions]
    return _staged(source, parsed)


def _staged(source: Source, parsed: list[Parsed]) -> Dockerfile:
    args: list[Parsed] = []
    stages: list[tuple[Parsed, list[Parsed]]] = []
    for one in parsed:
        at = At(source.file, one.line, one.name)
        if one.name == "FROM":
            stages.append((one, []))
            if len(stages) > MAX_STAGES:
                raise at.bad(f"more than {MAX_STAGES} stages: split the file")
        elif stages:
            stages[-1][1].append(one)
        elif one.name == "ARG":
            args.append(one)
        else:
            raise at.bad("only ARG may stand before the first FROM: begin with FROM")
    if not stages:
        raise At(source.file, 1).bad("there is no FROM: begin with one")
    made = tuple(_stage(start, body) for start, body in stages)
    _check_names(source.file, made)
    return Dockerfile(source.file, source.escape, tuple(args), made)


def _stage(start: Parsed, body: list[Parsed]) -> Stage:
    name = start.words[2].lower() if len(start.words) == 3 else ""
    return Stage(start, start.words[0], name, tuple(body))


def _check_names(file: str, stages: tuple[Stage, ...]) -> None:
    seen: set[str] = set()
    for stage in stages:
        if stage.name and stage.name in seen:
            raise At(file, stage.start.line, "FROM").bad(
                f"another stage is called {stage.name!r}: rename one"
            )
        seen.add(stage.name)


class _Parser:
    def __init__(self, source: Source, one: Instruction, said: Said) -> None:
        self._escape = source.escape
        self._one = one
        self._said = said
        self._at = At(source.file, one.line, one.name)

    def run(self) -> Parsed:
        one = self._one
        if one.name == "ONBUILD":
            raise self._at.bad("is not supported: write the instruction into the Dockerfiles that need it")
        if one.name not in _KNOWN:
            raise self._at.bad("there is no such instruction: look at its spelling")
        if one.name in IGNORED:
            self._said(f"{self._at} is ignored: {IGNORED[one.name]}")
        flags = {} if one.name in IGNORED else self._flags()
        parsed = Parsed(one.line, one.name, one.text, flags, heredocs=one.heredocs)
        if not one.text and one.name != "HEALTHCHECK":
            raise self._at.bad("needs an argument")
        return self._filled(parsed)

    def _flags(self) -> dict[str, str]:
        known = FLAGS.get(self._one.name, frozenset())
        found: dict[str, str] = {}
        for flag in self._one.flags:
            if flag.name not in known:
                raise self._at.bad(f"--{flag.name} is not supported: leave it out")
            if not flag.value:
                raise self._at.bad(f"--{flag.name} needs a value: --{flag.name}=...")
            if flag.name == "mount":
                self._mount(flag.value)
            else:
                found[flag.name] = flag.value
        return found

    def _mount(self, value: str) -> None:
        kind = dict(part.partition("=")[::2] for part in value.split(",")).get("type", "bind")
        if kind not in MOUNTS:
            raise self._at.bad(f"--mount=type={kind} is not supported: use COPY, or a cache or tmpfs")
        self._said(f"{self._at}: --mount=type={kind} is ignored: the command sees the layer's own directory")

    def _filled(self, parsed: Parsed) -> Parsed:
        fill: Callable[[Parsed], Parsed]
        if parsed.name in _COMMANDS:
            fill = self._command
        elif parsed.name in {"ENV", "LABEL"}:
            fill = self._pairs
        else:
            fill = {"ARG": self._arg, "FROM": self._from}.get(parsed.name, lambda p: p)
        return fill(parsed)

    def _command(self, parsed: Parsed) -> Parsed:
        words = json_words(parsed.text)
        if words is not None:
            parsed = msgspec.structs.replace(parsed, words=tuple(words), json=True)
        elif parsed.name in {"COPY", "ADD"}:
            parsed = msgspec.structs.replace(parsed, words=tuple(parsed.text.split()))
        if parsed.name == "SHELL" and not parsed.words:
            raise self._at.bad('needs the JSON form: SHELL ["/bin/bash", "-c"]')
        if parsed.name == "RUN" and parsed.json and not any(parsed.words):
            raise self._at.bad("the list is empty: name a program")
        if parsed.name in {"COPY", "ADD"} and len(parsed.words) < 2:
            raise self._at.bad("needs a source and a destination")
        return parsed

    def _pairs(self, parsed: Parsed) -> Parsed:
        words = split(parsed.text, self._escape)
        if "=" not in words[0]:
            return msgspec.structs.replace(parsed, pairs=(self._spaced(parsed.text, words[0]),))
        for word in words:
            if "=" not in word:
                raise self._at.bad(f"{shown(word)} has no '=': write KEY=VALUE, and quote spaces")
            if word.startswith("="):
                raise self._at.bad(f"{shown(word)} has no name before '='")
        found = [word.partition("=")[::2] for word in words]
        return msgspec.structs.replace(parsed, pairs=tuple(found))

    def _spaced(self, text: str, first: str) -> Pair:
        """The old form: KEY, a space, and the value to the end of the line."""
        rest = text[len(first) :].strip()
        if not rest:
            raise self._at.bad(f"{shown(first)} has no value: write KEY=VALUE")
        return first, rest

    def _arg(self, parsed: Parsed) -> Parsed:
        pairs: list[Pair] = []
        for word in split(parsed.text, self._escape):
            name, sign, default = word.partition("=")
            if not name:
                raise self._at.bad(f"{shown(word)} has no name before '='")
            pairs.append((name, default if sign else None))
        return msgspec.structs.replace(parsed, pairs=tuple(pairs))

    def _from(self, parsed: Parsed) -> Parsed:
        words = split(parsed.text, self._escape)
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
            raise self._at.bad("write FROM IMAGE, or FROM IMAGE AS NAME")
        if len(words) == 3 and not _is_name(words[2]):
            raise self._at.bad(f"{shown(words[2])}: a stage's name has letters, figures and ._- alone")
        return msgspec.structs.replace(parsed, words=tuple(words))


def _is_name(word: str) -> bool:
    return word.isascii() and word[0].isalpha() and all(c.isalnum() or c in "._-" for c in word)


def json_words(text: str) -> list[str] | None:
    """The JSON form's words, or None when it is the shell form."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, list) and all(isinstance(word, str) for word in found)
    return _clean(found) if whole else None


def _clean(words: list[str]) -> list[str] | None:
    """JSON can write a NUL or half a character, which no program can be given."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return None
    return None if any("\0" in word for word in words) else words
