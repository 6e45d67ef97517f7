"""A look over a layer before it is published: what is too large, dangerous, secret or broken in it.

Only metadata is read, and the beginnings of files that are small. No finding ever repeats what it found.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec

from dsec.layers import secrets
from dsec.layers.erofs.format import BLOCK
from dsec.layers.erofs.tree import (
    HOLE,
    Directory,
    File,
    Inode,
    Special,
    Symlink,
    Tree,
    is_opaque,
    is_whiteout,
    tail_size,
)

Kind = Literal["size", "files", "setuid", "capabilities", "secret", "dangling", "writable", "device", "more"]
Severity = Literal["note", "warning", "refuse"]
Read = Callable[[File], Iterator[bytes]]
Lookup = Callable[[bytes], Inode | None]

MAX_FOLLOWED: Final = 40
"""Symbolic links in one path, as the kernel has it."""
MOUNTED: Final = frozenset({b"proc", b"sys", b"dev", b"run"})
"""What lies there is not in layers: a link to it is not dangling."""
CAPABILITY: Final = b"security.capability"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_bytes: int = 64 << 30
    """Of what is stored: holes do not count, a file with several names counts once."""
    max_files: int = 4_000_000
    """Entries of every kind but whiteouts, by name."""
    scan_below: int = 8 << 20
    """Larger files are not searched for secrets."""
    scan_first: int = 1 << 20
    """So much of a file is searched."""
    max_findings: int = 200
    """Of one kind; how many more there were is told in one more."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    severity: Severity
    """refuse: not to be published as it is."""
    path: str
    """From the root; bytes that are no UTF-8 as \\xNN. Empty: the layer as a whole."""
    message: str


def check(
    tree: Tree,
    *,
    read: Read,
    below: Lookup,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    allow: Callable[[bytes], bool] = lambda path: False,
) -> list[Finding]:
    """All findings, those of the layer as a whole first.

    read: the content of a file, in pieces. below: what a path, followed through no symbolic link, is in the
    stack of layers below, if anything. allow: paths at which a secret is no more than a note.
    """
    return _Check(tree, read, below, limits, allow).run()


class _Check:
    def __init__(
        self, tree: Tree, read: Read, below: Lookup, limits: Limits, allow: Callable[[bytes], bool]
    ) -> None:
        self._tree = tree
        self._read = read
        self._below = below
        self._limits = limits
        self._allow = allow
        self._found: list[Finding] = []
        self._counts: dict[Kind, int] = {}
        self._files = self._bytes = 0
        self._seen: set[int] = set()

    def run(self) -> list[Finding]:
        for path, inode in _walk(self._tree):
            self._files += 1
            self._entry(path, inode)
        return [*self._whole(), *self._found, *self._more()]

    def _whole(self) -> Iterator[Finding]:
        limits = self._limits
        if self._bytes > limits.max_bytes:
            yield Finding(
                kind="size",
                severity="refuse",
                path="",
                message=f"{self._bytes} bytes, the limit is {limits.max_bytes}: remove or scrub some",
            )
        if self._files > limits.max_files:
            yield Finding(
                kind="files",
                severity="refuse",
                path="",
                message=f"{self._files} entries, the limit is {limits.max_files}: remove or scrub some",
            )

    def _more(self) -> Iterator[Finding]:
        for kind, count in self._counts.items():
            if (more := count - self._limits.max_findings) > 0:
                yield Finding(kind="more", severity="note", path="", message=f"{more} more of kind {kind}")

    def _add(self, kind: Kind, severity: Severity, path: bytes, message: str) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] <= self._limits.max_findings:
            shown = path.decode("utf-8", "backslashreplace")
            self._found.append(Finding(kind=kind, severity=severity, path=shown, message=message))

    def _entry(self, path: bytes, inode: Inode) -> None:
        self._writable(path, inode)
        if isinstance(inode, File):
            self._privileges(path, inode)
            self._content(path, inode)
        elif isinstance(inode, Symlink):
            if self._dangles(path, inode):
                self._add("dangling", "note", path, "a symbolic link that leads nowhere")
        elif isinstance(inode, Special) and (stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode)):
            self._add("device", "warning", path, "a device node: in a sandbox it cannot be opened; remove it")

    def _writable(self, path: bytes, inode: Inode) -> None:
        if not inode.mode & stat.S_IWOTH:
            return
        if isinstance(inode, Directory):
            if not inode.mode & stat.S_ISVTX:
                self._add("writable", "warning", path, "a directory that all may write to: chmod o-w, or +t")
        elif isinstance(inode, File):
            self._add("writable", "warning", path, "a file that all may write to: chmod o-w")

    def _privileges(self, path: bytes, file: File) -> None:
        if file.mode & (stat.S_ISUID | stat.S_ISGID):
            which = "setuid" if file.mode & stat.S_ISUID else "setgid"
            self._add("setuid", "warning", path, f"runs {which} (owner {file.uid}:{file.gid})")
        if CAPABILITY in (file.xattrs or {}):
            self._add("capabilities", "warning", path, "runs with capabilities of its own (setcap)")

    def _content(self, path: bytes, file: File) -> None:
        if id(file) in self._seen and not secrets.is_named(path):
            return
        if id(file) not in self._seen:
            self._seen.add(id(file))
            self._bytes += stored(file)
        if not 0 < file.size < self._limits.scan_below:
            return
        for secret in secrets.search(path, self._beginning(file)):
            severity: Severity = "note" if self._allow(path) else "refuse" if secret.sure else "warning"
            self._add("secret", severity, path, f"{secret.what}: remove it, or say that it may be there")

    def _beginning(self, file: File) -> bytes:
        data = bytearray()
        for piece in self._read(file):
            data += piece
            if len(data) >= self._limits.scan_first:
                break
        return bytes(data[: self._limits.scan_first])

    # --- symbolic links: as a sandbox would follow them -----------------------------------------------------

    def _dangles(self, path: bytes, link: Symlink) -> bool:
        here = path.split(b"/")[:-1]
        waiting = _parts(link.target, here)
        followed = 1
        while waiting:
            name = waiting.pop()
            if name == b"..":
                here = here[:-1]
                continue
            if not here and name in MOUNTED:
                return False
            inode = self._lookup([*here, name])
            if inode is None or (waiting and not isinstance(inode, Directory | Symlink)):
                return True
            if not isinstance(inode, Symlink):
                here = [*here, name]
                continue
            followed += 1
            if followed > MAX_FOLLOWED:
                return True
            waiting += _parts(inode.target, here)
        return False

    def _lookup(self, names: list[bytes]) -> Inode | None:
        """In this layer over those below."""
        here: Inode | None = self._tree.root
        hidden = False
        for name in names:
            if not isinstance(here, Directory):
                return None
            hidden = hidden or is_opaque(here)
            here = here.children.get(name)
            if here is None:
                break
            if is_whiteout(here):
                return None
        if here is None and not hidden:
            here = self._below(b"/".join(names))
        return None if here is None or is_whiteout(here) else here


def _parts(target: bytes, here: list[bytes]) -> list[bytes]:
    """Names yet to be walked, the next one last. An absolute target starts at the root: `here` is emptied."""
    if target.startswith(b"/"):
        here.clear()
    return [name for name in reversed(target.split(b"/")) if name not in (b"", b".")]


def _walk(tree: Tree) -> Iterator[tuple[bytes, Inode]]:
    """By name, without whiteouts; paths with no slash before."""
    waiting = [(b"", tree.root)]
    while waiting:
        path, here = waiting.pop()
        for name, child in sorted(here.children.items()):
            below = path + b"/" + name if path else name
            if is_whiteout(child):
                continue
            yield below, child
            if isinstance(child, Directory):
                waiting.append((below, child))


def stored(file: File) -> int:
    """Bytes that it takes, holes aside."""
    return sum(e.blocks * BLOCK for e in file.extents if e.blob != HOLE) + tail_size(file.tail)
