"""What COPY and ADD take, and where they put it: Docker's rules on a real directory."""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument
from dsec.layers.dockerfile import cache, ignore
from dsec.layers.dockerfile.faults import At, shown

MAX_LINKS: Final = 40
MAX_SOURCES: Final = 100_000
_REMOTE: Final = re.compile(r"(?i)(https?|ftp|git|ssh)://|git@|github\.com/")
_MODE: Final = re.compile(r"[0-7]{3,4}\Z")
_OWNER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?\Z")


class Local(msgspec.Struct, frozen=True):
    """A file or directory of the context."""

    path: Path
    """On this host; no symbolic link."""
    name: str
    """What a file is called in a directory that it is put into."""
    inside: str
    """Relative to the context, with `/`; empty for the context itself."""
    context: Context

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.path.lstat().st_mode)

    def leaves_out(self, path: str) -> bool:
        """Whether a path in this directory, relative to it, is not to be copied."""
        return self.context.leaves_out(posixpath.join(self.inside, path))

    def digest(self) -> str:
        """Of its names, modes and contents. Raises OSError."""
        return cache.tree(self.path, self.leaves_out)


class Text(msgspec.Struct, frozen=True):
    """A heredoc, as a file."""

    name: str
    body: str


class Elsewhere(msgspec.Struct, frozen=True):
    """What patterns match in another stack of layers; a runner looks."""

    layers: tuple[str, ...]
    patterns: tuple[str, ...]
    """Relative to its root, without a leading slash."""


Source = Local | Text | Elsewhere


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Put `sources` into a stack. Without sources: see that `destination` is a directory."""

    layers: list[str]
    """What it is put on, bottom to top."""
    sources: list[Source]
    destination: str
    """Absolute; with a slash at its end it is a directory. Its parents are made where they are missing."""
    chown: str = ""
    """USER or USER:GROUP, names or numbers, names by the stack's /etc/passwd; empty: root."""
    chmod: str = ""
    """In octal; empty: as it is."""
    is_add: bool = False
    """Local tar archives are unpacked into `destination`."""


class Context:
    """The directory that COPY takes from. Paths never lead out of it, by no symbolic link either."""

    def __init__(self, root: Path, left_out: ignore.Ignore | None = None) -> None:
        self.root = root.resolve()
        self._ignore = left_out or ignore.Ignore()
        self._holding: dict[str, bool] = {}

    def leaves_out(self, inside: str) -> bool:
        """A directory that is left out stays when an exception of .dockerignore lies in it."""
        if not inside or not self._ignore(inside):
            return False
        return not (self._ignore.has_exceptions and self._holds(inside))

    def _holds(self, inside: str) -> bool:
        if inside not in self._holding:
            self._holding[inside] = any(not self._ignore(path) for path in self._below(inside))
        return self._holding[inside]

    def _below(self, inside: str) -> Iterator[str]:
        for where, directories, files in os.walk(self.root / inside):
            for name in (*directories, *files):
                yield os.path.relpath(os.path.join(where, name), self.root)

    def expand(self, patterns: Sequence[str], at: At) -> list[Local]:
        """What sources mean, in their order, matches of one by name. Raises InvalidArgument for no match."""
        found: list[Local] = []
        for pattern in patterns:
            try:
                matched = self._matched(pattern, at)
            except OSError as e:
                raise at.bad(f"{shown(pattern)}: {e.strerror}: choose another source") from e
            if not matched:
                why = "it is not in the context, or .dockerignore leaves it out"
                raise at.bad(f"{shown(pattern)}: {why}")
            found += matched
            if len(found) > MAX_SOURCES:
                raise at.bad(f"more than {MAX_SOURCES} sources: copy their directory")
        return found

    def _matched(self, pattern: str, at: At) -> list[Local]:
        clean = inside(pattern, at)
        paths = [()] if clean == "" else self._walk(ignore.compile_pattern(clean, at), clean, at)
        locals_ = (self._local(parts, at) for parts in paths)
        return [local for local in locals_ if local is not None]

    def _walk(self, segments: Sequence[ignore.Segment], clean: str, at: At) -> list[tuple[str, ...]]:
        """Paths that match, level by level."""
        words = clean.split("/")
        if not ignore.is_pattern(clean):
            return [tuple(words)]
        found: list[tuple[str, ...]] = [()]
        for word, segment in zip(words, segments, strict=False):
            if segment is None:
                raise at.bad("'**' in a source is not supported: name the directory, or use '*'")
            if not ignore.is_pattern(word):
                found = [(*parts, word) for parts in found]
                continue
            found = [(*p, n) for p in found for n in self._names(p, at) if segment.match(n)]
        return found

    def _names(self, parts: tuple[str, ...], at: At) -> list[str]:
        try:
            return sorted(os.listdir(self._resolved(parts, at)))
        except OSError:
            return []

    def _local(self, parts: tuple[str, ...], at: At) -> Local | None:
        if self.leaves_out("/".join(parts)):
            return None
        path = self._resolved(parts, at)
        if not os.path.lexists(path):
            return None
        where = path.relative_to(self.root).as_posix()
        return Local(path, parts[-1] if parts else "", "" if where == "." else where, self)

    def _resolved(self, parts: Sequence[str], at: At) -> Path:
        """Links followed as if the context were the root of everything."""
        done: list[str] = []
        waiting = list(reversed(parts))
        links = 0
        while waiting:
            part = waiting.pop()
            if part == "..":
                done = done[:-1]
                continue
            here = self.root.joinpath(*done, part)
            if not here.is_symlink():
                done.append(part)
                continue
            links += 1
            if links > MAX_LINKS:
                raise at.bad(f"{shown('/'.join(parts))}: more than {MAX_LINKS} symbolic links on the way")
            target = os.readlink(here)
            done = [] if target.startswith("/") else done
            waiting += [p for p in reversed(target.split("/")) if p not in ("", ".")]
        return self.root.joinpath(*done)


def inside(pattern: str, at: At) -> str:
    """A source as a path relative to the root that it is looked up in. Raises InvalidArgument for `..`."""
    if _REMOTE.match(pattern):
        raise at.bad(f"{shown(pattern)}: only local files are supported: fetch it with RUN")
    clean = posixpath.normpath(pattern.lstrip("/") or ".")
    if clean == ".." or clean.startswith("../"):
        raise at.bad(f"{shown(pattern)} leads out of the context: copy it into the context")
    return "" if clean == "." else clean


def destination(text: str, workdir: str, at: At) -> str:
    """Absolute, with a slash at its end where it is to be a directory."""
    if not text:
        raise at.bad("the destination is empty: name a path")
    full = posixpath.normpath(posixpath.join("/", workdir, text)).replace("//", "/")
    is_directory = text.endswith(("/", "/.")) or text in (".", "..") or full == "/"
    return full if not is_directory or full == "/" else full + "/"


def place(name: str, *, is_directory: bool, destination: str, is_there: bool) -> str:
    """Where one source goes: a directory's content into `destination`, a file in it or under its name.

    is_there: `destination` is a directory already.
    """
    if not is_directory and (destination.endswith("/") or is_there):
        return posixpath.join(destination, name)
    return destination.rstrip("/") or "/"


def check(copy: Copy, at: At) -> Copy:
    """Raises InvalidArgument."""
    several = len(copy.sources) > 1 or any(
        isinstance(s, Elsewhere) and len(s.patterns) > 1 for s in copy.sources
    )
    if several and not copy.destination.endswith("/"):
        raise at.bad(f"{shown(copy.destination)}: for several sources it must end with a slash")
    if copy.chown and not _OWNER.match(copy.chown):
        raise at.bad(f"--chown={shown(copy.chown)}: USER or USER:GROUP")
    if copy.chmod and not _MODE.match(copy.chmod):
        raise at.bad(f"--chmod={shown(copy.chmod)}: in octal, such as 755")
    return copy


def contents(copy: Copy, at: At) -> list[str]:
    """A digest for each source of the context. Blocks. Raises InvalidArgument."""
    found: list[str] = []
    for source in copy.sources:
        if isinstance(source, Text):
            found.append(cache.of_text(source.name, source.body))
        elif isinstance(source, Local):
            found.append(f"{source.name}={_digest(source, at)}")
    return found


def _digest(source: Local, at: At) -> str:
    try:
        return source.digest()
    except OSError as e:
        raise InvalidArgument(f"{at}: reading {e.filename}: {e.strerror}") from e
