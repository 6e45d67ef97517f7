"""What is left out of a layer that is made of a sandbox: caches, histories, logs, temporary files.

Whiteouts and opaque directories always stay, and so do the directories above them: what they hide of the
layers below must not come back. A file left out shows the one of its name in the layers below, if any.

Globs are from the root, with or without a slash before: `*`, `?` and `[...]` within a name, `**` for any
number of names; a slash at the end means all below. Case matters.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument

MAX_GLOBS: Final = 512
MAX_GLOB: Final = 1024
MAX_DEPTH: Final = 1024
"""Of directories that stay. Whiteouts that lie deeper in what is left out go with it."""
OPAQUE: Final = ("trusted.overlay.opaque", "user.overlay.opaque")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PIECE: Final = 2048
_HOMES: Final = ("root", "home/*")

CACHES: Final = (
    "var/cache/apt/**",
    "var/lib/apt/lists/**",
    "var/cache/debconf/*-old",
    "var/lib/dpkg/*-old",
    "var/cache/yum/**",
    "var/cache/dnf/**",
    "var/cache/apk/**",
    "etc/apk/cache/**",
    *(f"{home}/{name}/**" for home in _HOMES for name in (".cache", ".npm/_cacache", ".npm/_logs")),
)
"""pip's lie in a home's .cache. Compiled Python (*.pyc) is no cache here: programs start faster with it."""
HISTORIES: Final = tuple(
    f"{home}/{name}" for home in _HOMES for name in (".*_history", ".lesshst", ".viminfo", ".wget-hsts")
)
LOGS: Final = ("var/log/**",)
TEMPORARY: Final = ("tmp/**", "var/tmp/**", "run/**", "var/run/**")


class _Globs:
    """Matching takes time in proportion to glob and path, whatever is in them."""

    def __init__(self, globs: Iterable[str]) -> None:
        self._by_first: dict[str, list[list[re.Pattern[str] | None]]] = {}
        self._anywhere: list[list[re.Pattern[str] | None]] = []
        for glob in globs:
            first, compiled = _compile(glob)
            self._by_first.setdefault(first, []).append(compiled) if first else self._anywhere.append(
                compiled
            )

    def match(self, names: list[str]) -> bool:
        globs = self._by_first.get(names[0], []) if names else []
        return any(_match(glob, names) for glob in (*globs, *self._anywhere))


def _compile(glob: str) -> tuple[str, list[re.Pattern[str] | None]]:
    """Its first name, if that has no wildcard, and a pattern for each name; None: `**`."""
    if not 0 < len(glob) <= MAX_GLOB or "\0" in glob:
        raise InvalidArgument(f"scrub rules: {glob[:80]!r}: a glob has 1 to {MAX_GLOB} characters, no NUL")
    names = [name for name in glob.split("/") if name]
    if not names or "." in names or ".." in names:
        raise InvalidArgument(f"scrub rules: {glob[:80]!r}: globs are from the root, with no . or .. in them")
    if glob.endswith("/"):
        names.append("**")
    first = "" if set(names[0]) & set("*?[") else names[0]
    return first, [None if name == "**" else re.compile(fnmatch.translate(name)) for name in names]


def _match(glob: list[re.Pattern[str] | None], names: list[str]) -> bool:
    """Only the last `**` met ever takes more: what those before it took was enough. The last of all takes one
    name at least."""
    at = i = 0
    retry: tuple[int, int] | None = None
    while i < len(names):
        if at < len(glob) and glob[at] is None:
            if at == len(glob) - 1:
                return True
            retry = (at + 1, i)
            at += 1
        elif at < len(glob) and (pattern := glob[at]) is not None and pattern.match(names[i]):
            at, i = at + 1, i + 1
        elif retry:
            retry = (retry[0], retry[1] + 1)
            at, i = retry
        else:
            return False
    return at == len(glob)


def _names(path: bytes) -> list[str]:
    return [name for name in path.decode("utf-8", "surrogateescape").split("/") if name]


class Rules(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """Globs, by why they are left out. `keep` wins over all. A bad glob is found by `check`, or when used."""

    caches: tuple[str, ...] = CACHES
    histories: tuple[str, ...] = HISTORIES
    logs: tuple[str, ...] = LOGS
    """Files alone: programs want their directory to be there."""
    temporary: tuple[str, ...] = TEMPORARY
    more: tuple[str, ...] = ()
    """The builder's own."""
    keep: tuple[str, ...] = ()

    def matches(self, path: bytes, *, directory: bool = False) -> bool:
        """Whether what has that path is left out, going by its path alone (see Scrub)."""
        out, logs, keep = self._compiled()
        names = _names(path)
        return (out.match(names) or (not directory and logs.match(names))) and not keep.match(names)

    def keeps(self, path: bytes) -> bool:
        return self._compiled()[2].match(_names(path))

    def check(self) -> None:
        """Raises InvalidArgument for a glob that is none, or too many of them."""
        self._compiled()

    def _compiled(self) -> tuple[_Globs, _Globs, _Globs]:
        found: tuple[_Globs, _Globs, _Globs] | None = self.__dict__.get("compiled")
        if found is None:
            out = (*self.caches, *self.histories, *self.temporary, *self.more)
            if len(out) + len(self.logs) + len(self.keep) > MAX_GLOBS:
                raise InvalidArgument(f"scrub rules: more than {MAX_GLOBS} globs")
            found = self.__dict__["compiled"] = (_Globs(out), _Globs(self.logs), _Globs(self.keep))
        return found


class Scrub:
    """For a walk over an upper directory that nothing writes to: whether it passes an entry by.

    An entry is given by its path from `upper`; of a directory that is passed by nothing is looked at. Raises
    InvalidArgument past MAX_DEPTH, and for what cannot be looked at.
    """

    def __init__(self, upper: Path, rules: Rules, platform: Mapping[str, str] | None = None) -> None:
        """platform: names in /etc and contents of files that are the sandbox's, not the image's; as they were
        written they are left out, and stay where they were changed. Raises InvalidArgument as Rules.check."""
        rules.check()
        self._upper = os.fsencode(upper)
        self._rules = rules
        self._platform = {f"etc/{name}".encode(): text.encode() for name, text in (platform or {}).items()}
        self._staying: set[bytes] = set()
        self._walked: set[bytes] = set()
        self.entries = 0
        """Left out so far; a directory with all below it counts once."""

    def __call__(self, path: bytes) -> bool:
        path = path.strip(b"/")
        try:
            out = self._is_platforms(path) or self._left_out(path)
        except OSError as e:
            raise InvalidArgument(f"scrubbing {path[:300]!r}: {e.strerror}") from e
        self.entries += out
        return out

    def _is_platforms(self, path: bytes) -> bool:
        text = self._platform.get(path)
        if text is None:
            return False
        try:
            fd = os.open(self._upper + b"/" + path, _READ)
        except OSError:
            return False
        try:
            return stat.S_ISREG(os.fstat(fd).st_mode) and os.read(fd, len(text) + 1) == text
        finally:
            os.close(fd)

    def _left_out(self, path: bytes) -> bool:
        if path.count(b"/") > MAX_DEPTH:
            raise InvalidArgument(
                f"scrubbing {path[:100]!r}...: directories lie over {MAX_DEPTH} deep: remove them"
            )
        if not self._rules.matches(path):
            return False
        st = self._stat(path)
        if not stat.S_ISDIR(st.st_mode):
            return not _is_whiteout(st)
        if not self._rules.matches(path, directory=True):
            return False
        if not any(above in self._walked for above in _above(path)):
            self._walk(path)
        return path not in self._staying

    def _walk(self, top: bytes) -> None:
        """Notes all directories below `top` that hold something that stays."""
        self._walked.add(top)
        waiting = [top]
        while waiting:
            here = waiting.pop()
            with self._opened(here) as fd:
                if any(name in OPAQUE for name in os.listxattr(fd)):
                    self._stays(here, top)
                for name in map(os.fsencode, os.listdir(fd)):
                    if self._look(fd, name, here, top) and here.count(b"/") < MAX_DEPTH:
                        waiting.append(here + b"/" + name)

    def _look(self, fd: int, name: bytes, here: bytes, top: bytes) -> bool:
        """Whether it is a directory, to be looked at as well."""
        path = here + b"/" + name
        st = os.stat(name, dir_fd=fd, follow_symlinks=False)
        directory = stat.S_ISDIR(st.st_mode)
        if not self._rules.matches(path, directory=directory) or _is_whiteout(st):
            self._stays(path if directory else here, top)
        return directory

    def _stat(self, path: bytes) -> os.stat_result:
        above, _, name = path.rpartition(b"/")
        with self._opened(above) as fd:
            return os.stat(name, dir_fd=fd, follow_symlinks=False)

    @contextlib.contextmanager
    def _opened(self, path: bytes) -> Iterator[int]:
        """A directory. In pieces: a path as a whole may be longer than the kernel takes."""
        fd = os.open(self._upper, _DIRECTORY)
        try:
            while path:
                end = len(path) if len(path) <= _PIECE else path.rindex(b"/", 0, _PIECE)
                below = os.open(path[:end], _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd, path = below, path[end + 1 :]
            yield fd
        finally:
            os.close(fd)

    def _stays(self, path: bytes, top: bytes) -> None:
        while path not in self._staying:
            self._staying.add(path)
            if path == top:
                return
            path = path.rpartition(b"/")[0]


def _above(path: bytes) -> Iterator[bytes]:
    """Directories above it, the nearest first."""
    while path := path.rpartition(b"/")[0]:
        yield path


def _is_whiteout(st: os.stat_result) -> bool:
    return stat.S_ISCHR(st.st_mode) and st.st_rdev == 0


Exclude = Callable[[bytes], bool]
"""What a walk asks; a Scrub is one."""
