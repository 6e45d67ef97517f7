"""A tar stream as a tree, every archive taken for hostile, with no right but to read it.

Names are relative and without `..`; no entry is reached through a symbolic link; whatever is odd is refused
with the entry's name. OCI whiteouts (`.wh.NAME`, `.wh..wh..opq`) become an overlay's own: a character device
0:0, trusted.overlay.opaque.
"""

from __future__ import annotations

import copy
import lzma
import os
import stat
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

from dsec.core.errors import InvalidArgument
from dsec.layers.erofs.data import BlobWriter
from dsec.layers.erofs.encode import CannotWrite, xattrs_size
from dsec.layers.erofs.tree import OPAQUE, Directory, File, Inode, Special, Symlink, Tree, Xattrs
from dsec.layers.tar_acls import add_acls
from dsec.layers.tar_headers import FILES, MAX_FILE, BadEntry, Entry, Source, Stream, Tar, xattrs

MAX_LINK: Final = 4095
_NODES: Final = {ord("3"): stat.S_IFCHR, ord("4"): stat.S_IFBLK, ord("6"): stat.S_IFIFO}
_ACLS: Final = (b"system.posix_acl_access", b"system.posix_acl_default")
_WHITEOUT: Final = b".wh."
_LABEL: Final = b"security.selinux"
"""Of the host where it was packed: left out."""

Parts = tuple[bytes, ...]
Below = Callable[[bytes], Inode | None]


class Limits(NamedTuple):
    """Of one archive."""

    entries: int = 20_000_000
    """Directories that are implied by a path count too."""
    path: int = 3072
    xattr: int = 0xFFFF
    file: int = MAX_FILE
    total: int = 1 << 46
    """Bytes of all files as they read."""
    metadata: int = 4 << 30
    """Bytes of all names, targets and attributes: they are held in memory."""


class Summary(NamedTuple):
    """What was read."""

    entries: int
    size: int
    """Bytes of all files as they read."""


class LinkBelow(InvalidArgument):
    """A hard link to what is not in this archive, and the layers below are not known: give `below`."""


def read_tar(
    stream: Source,
    tree: Tree,
    blob: BlobWriter,
    *,
    whiteouts: bool,
    below: Below | None = None,
    limits: Limits = Limits(),  # noqa: B008
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Applies the archive to `tree`, entry by entry, with the bodies of files going to `blob`.

    whiteouts: false for a base, below which is nothing to hide, so that they are left out. below: what the
    layers below have under a path, its extents and tail as places in `tree`; a hard link to it becomes an
    inode of this layer with the same data. progress: told the bytes read so far. Raises InvalidArgument with
    the name of the entry that is at fault, LinkBelow among them.
    """
    source = Stream(stream, progress)
    tar = Tar(source)
    reader = _Reader(tree, blob, whiteouts, below, limits)
    try:
        return _read(source, tar, reader)
    except _Refused as e:
        raise _refused(LinkBelow, reader.name or tar.name, str(e)) from e
    except BadEntry as e:
        raise _refused(InvalidArgument, reader.name or tar.name, str(e)) from e
    except (EOFError, zlib.error, lzma.LZMAError, OverflowError) as e:
        raise _damaged(reader.name or tar.name, e) from e
    except OSError as e:
        if e.errno is None:  # gzip and bz2: a bad checksum, a bad stream
            raise _damaged(reader.name or tar.name, e) from e
        raise


class _Refused(BadEntry):
    """A link to what only the layers below can have."""


def _read(source: Stream, tar: Tar, reader: _Reader) -> Summary:
    for entry in tar:
        reader.add(tar, entry)
    source.drain()
    reader.finish()
    return Summary(reader.entries, reader.size)


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "replace")[:300]


def _refused(error: type[InvalidArgument], name: bytes, why: str) -> InvalidArgument:
    shown = _shown(name)
    return error(f"reading a tar archive: entry {shown!r}: {why}", entry=shown)


def _damaged(name: bytes, e: Exception) -> InvalidArgument:
    return _refused(InvalidArgument, name, f"the archive is damaged or cut short here: {e}")


class _Reader:
    def __init__(
        self, tree: Tree, blob: BlobWriter, whiteouts: bool, below: Below | None, limits: Limits
    ) -> None:
        self._tree = tree
        self._blob = blob
        self._whiteouts = whiteouts
        self._below = below
        self._limits = limits
        self._hidden: set[Parts] = set()
        self._opaque: set[Parts] = set()
        self._near: tuple[Parts, Directory] = ((), tree.root)
        """The directory used last: entries of one lie together."""
        self._copies: dict[Parts, Inode] = {}
        """Of files below that were linked to."""
        self._metadata = 0
        self.name = b""
        """Of the whiteout that is applied at the end."""
        self.entries = self.size = 0

    def add(self, tar: Tar, entry: Entry) -> None:
        self._count(len(entry.name))
        parts = self._parts(entry.name)
        if not parts:
            self._dress_root(entry)
        elif parts[-1].startswith(_WHITEOUT):
            self._note_whiteout(parts)
        else:
            self._make(tar, entry, parts, self._directory(parts[:-1]))

    def _count(self, metadata: int) -> None:
        self.entries += 1
        if self.entries > self._limits.entries:
            raise BadEntry(f"more than {self._limits.entries} entries")
        self._hold(metadata)

    def _hold(self, metadata: int) -> None:
        self._metadata += metadata
        if self._metadata > self._limits.metadata:
            raise BadEntry(f"names and attributes of more than {self._limits.metadata} bytes")

    def _parts(self, name: bytes) -> Parts:
        self._check_text(name, self._limits.path)
        if name.startswith(b"/"):
            raise BadEntry("an absolute name")
        parts = tuple(p for p in name.split(b"/") if p and p != b".")
        if b".." in parts:
            raise BadEntry("a name with '..'")
        # A whiteout is longer than the name it hides.
        if parts and max(*map(len, parts[:-1]), len(parts[-1].removeprefix(_WHITEOUT)), 0) > 255:
            raise BadEntry("a name of more than 255 bytes")
        return parts

    @staticmethod
    def _check_text(text: bytes, limit: int) -> None:
        if not text or b"\0" in text:
            raise BadEntry("an empty name, or one with a NUL")
        if len(text) > limit:
            raise BadEntry(f"a path of more than {limit} bytes")

    def _dress_root(self, entry: Entry) -> None:
        if entry.type != ord("5"):
            raise BadEntry("it stands where the root is, and is no directory")
        self._dress(self._tree.root, entry)

    def _directory(self, parts: Parts) -> Directory:
        """Made where it is missing. Never through a link."""
        if self._near[0] == parts:
            return self._near[1]
        here = self._tree.root
        for depth, part in enumerate(parts, 1):
            found = here.children.get(part)
            if found is None:
                self._count(len(part))
                found = here.children[part] = Directory(stat.S_IFDIR | 0o755)
            if not isinstance(found, Directory):
                raise _through(parts[:depth])
            here = found
        self._near = (parts, here)
        return here

    def _make(self, tar: Tar, entry: Entry, parts: Parts, parent: Directory) -> None:
        old = parent.children.get(parts[-1])
        if entry.type == ord("5") and isinstance(old, Directory):
            self._dress(old, entry)
            return
        made = self._link(entry, parts) if entry.type == ord("1") else self._inode(tar, entry)
        parent.children[parts[-1]] = made
        if isinstance(old, Directory):
            self._near = ((), self._tree.root)

    def _inode(self, tar: Tar, entry: Entry) -> Inode:
        made: Inode
        if entry.type in FILES:
            made = self._file(tar, entry)
        elif entry.type == ord("5"):
            made = Directory(stat.S_IFDIR)
        elif entry.type == ord("2"):
            self._check_text(entry.link, MAX_LINK)
            self._hold(len(entry.link))
            made = Symlink(stat.S_IFLNK, target=entry.link)
        elif entry.type in _NODES:
            made = Special(_NODES[entry.type], rdev=_device(entry))
        else:
            raise BadEntry(f"a type {bytes([entry.type])!r} that layers do not have")
        self._dress(made, entry)
        return made

    def _file(self, tar: Tar, entry: Entry) -> File:
        if entry.size > self._limits.file:
            raise BadEntry(f"a size of {entry.size} bytes, of which {self._limits.file} are allowed")
        self.size += entry.size
        if self.size > self._limits.total:
            raise BadEntry(f"files of more than {self._limits.total} bytes")
        extents, tail = self._blob.add(tar.content, entry.size, entry.runs)
        return File(stat.S_IFREG, size=entry.size, extents=extents, tail=tail)

    def _dress(self, inode: Inode, entry: Entry) -> None:
        for owner in (entry.uid, entry.gid):
            if not 0 <= owner < (1 << 32) - 1:
                raise BadEntry(f"an owner {owner}")
        kind = stat.S_IFMT(inode.mode)
        inode.mode = kind | (0o777 if kind == stat.S_IFLNK else entry.mode)
        inode.uid, inode.gid, inode.mtime_ns = entry.uid, entry.gid, entry.mtime_ns
        inode.xattrs = self._xattrs(entry, kind) if entry.pax else None

    def _xattrs(self, entry: Entry, kind: int) -> Xattrs | None:
        found = xattrs(entry.pax)
        if kind != stat.S_IFLNK:
            add_acls(entry.pax, found)
        kept = {name: value for name, value in found.items() if name != _LABEL}
        for name, value in kept.items():
            _check_xattr(name, value, kind, self._limits.xattr)
        try:
            self._hold(xattrs_size(kept))
        except CannotWrite as e:
            raise BadEntry(f"an attribute which cannot be kept here: {e}") from e
        return kept or None

    def _link(self, entry: Entry, parts: Parts) -> Inode:
        """What it links to; a link below gets the target's data and attributes."""
        shown = _shown(entry.link)
        target = self._parts(entry.link)
        if not target or target == parts:
            raise BadEntry(f"a hard link to {shown!r}")
        found = self._find(target) or self._copy(target, shown)
        if isinstance(found, Directory):
            raise BadEntry(f"a hard link to {shown!r}, a directory")
        if target[: len(parts)] == parts:
            raise BadEntry(f"a hard link to {shown!r}, which it replaces")
        return found

    def _find(self, parts: Parts) -> Inode | None:
        here: Inode = self._tree.root
        for depth, part in enumerate(parts):
            if not isinstance(here, Directory):
                raise _through(parts[:depth])
            found = here.children.get(part)
            if found is None:
                return None
            here = found
        return here

    def _copy(self, target: Parts, shown: str) -> Inode:
        if target not in self._copies:
            why = f"a hard link to {shown!r}, which is not in the archive before it"
            if self._below is None:
                raise _Refused(why)
            found = self._below(b"/".join(target))
            if found is None:
                raise BadEntry(f"{why}, nor in the layers below")
            self._copies[target] = copy.copy(found)
        return self._copies[target]

    def _note_whiteout(self, parts: Parts) -> None:
        hidden = parts[-1].removeprefix(_WHITEOUT)
        if hidden == b".wh..opq":
            self._directory(parts[:-1])
            self._opaque.add(parts[:-1])
        elif hidden.startswith(b".wh."):
            pass  # bookkeeping of AUFS, which hides nothing
        elif hidden in (b"", b".", b".."):
            raise BadEntry("a whiteout of nothing")
        else:
            self._hidden.add((*parts[:-1], hidden))

    def finish(self) -> None:
        """Whiteouts hide what lies below, never what this archive holds."""
        if not self._whiteouts:
            return
        for parts in sorted(self._hidden):
            self.name = b"/".join(parts)
            self._white_out(parts)
        for parts in sorted(self._opaque):
            self.name = b"/".join(parts)
            directory = self._directory(parts)
            directory.xattrs = {**(directory.xattrs or {}), OPAQUE: b"y"}

    def _white_out(self, parts: Parts) -> None:
        if any(parts[:depth] in self._opaque for depth in range(len(parts))):
            return  # hidden already, and a device there would be seen
        parent = self._directory(parts[:-1])
        found = parent.children.get(parts[-1])
        if found is None:
            parent.children[parts[-1]] = Special(stat.S_IFCHR)
        elif isinstance(found, Directory):
            self._opaque.add(parts)


def _through(parts: Parts) -> BadEntry:
    return BadEntry(f"its path leads through {_shown(b'/'.join(parts))!r}, which is no directory")


def _check_xattr(name: bytes, value: bytes, kind: int, limit: int) -> None:
    """As the kernel would: attributes of users are for files and directories."""
    if name.startswith(b"trusted."):
        raise BadEntry(f"an attribute {_shown(name)}: what an overlay obeys cannot come from an archive")
    plain = kind in (stat.S_IFREG, stat.S_IFDIR)
    if name in _ACLS:
        fits = kind != stat.S_IFLNK and len(value) % 8 == 4 and value[:4] == b"\2\0\0\0"
    else:
        fits = name.startswith(b"security.") or (name.startswith(b"user.") and plain)
    if not fits:
        raise BadEntry(f"an attribute {_shown(name)!r}, which cannot be kept here")
    if len(value) > limit:
        raise BadEntry(f"an attribute {_shown(name)!r} of {len(value)} bytes")


def _device(entry: Entry) -> int:
    if entry.type == ord("6"):
        return 0
    major, minor = entry.device
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise BadEntry(f"a device {major}:{minor}")
    return os.makedev(major, minor)
