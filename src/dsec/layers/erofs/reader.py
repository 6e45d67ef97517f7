"""Reads an image as a tree, and believes nothing of it.

It takes what `writer` makes, and what mkfs.erofs makes without compression. Any bytes give a tree or an
error, in time and memory that are in proportion to the image.
"""

from __future__ import annotations

import stat
from typing import BinaryIO, Final, NamedTuple

from dsec.core.errors import LayerCorrupt
from dsec.layers.erofs.decode import (
    Addresses,
    Header,
    XattrReader,
    blocks_of,
    device_of,
    entries_of,
    extents_of,
    inline_size,
    parse_header,
)
from dsec.layers.erofs.format import FILE_TYPES, MAX_NAME, MAX_TARGET
from dsec.layers.erofs.image import Bad, Image, read_super
from dsec.layers.erofs.tree import (
    Blob,
    Directory,
    File,
    Inode,
    Span,
    Special,
    Symlink,
    Tail,
    Tree,
)

_DIRECT: Final = 64
"""Ends of files of at most this are read at once: a reference would be larger."""

_OWNERS: Final = 1 << 16


class Limits(NamedTuple):
    inodes: int = 20_000_000
    depth: int = 2048
    """Of directories in each other."""


_LIMITS: Final = Limits()


def read(image: BinaryIO, *, digest: str | None = None, limits: Limits = _LIMITS) -> Tree:
    """The tree in `image`, which must stay open and unchanged: ends of files are read from it later.

    digest: of the image itself, which is then a blob of the tree too, the last one, so that images whose
    files lie in themselves can be read. Raises LayerCorrupt, which says what is wrong and where; OSError.
    """
    reader = _Reader(image, limits)
    try:
        return reader.read(digest)
    except Bad as e:
        raise LayerCorrupt(f"reading an EROFS image: {reader.where}: {e}; build the layer again") from e


class _Pending(NamedTuple):
    """A directory whose entries are not yet read."""

    directory: Directory
    header: Header
    parent: int
    depth: int


class _Reader:
    def __init__(self, file: BinaryIO, limits: Limits) -> None:
        self._file = file
        self._limits = limits
        self._place: tuple[object, ...] = ("its start",)
        self._count = 0
        self._seen: dict[int, int] = {}
        """A bit for each nid that was met, 128 to a number."""
        self._linked: dict[int, Inode] = {}
        """Those of several names."""
        self._owners: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        """Most inodes have their modes and owners in common, and so the numbers in memory too."""
        self._missing: dict[int, int] = {}
        """How many of their names have not been met."""

    @property
    def where(self) -> str:
        """What is being looked at."""
        return " ".join(str(part) for part in self._place)

    def read(self, digest: str | None) -> Tree:
        self._image = Image(self._file)
        self._super = sup = read_super(self._image)
        blobs = [*sup.blobs, Blob(digest, sup.blocks)] if digest else sup.blobs
        self._addresses = Addresses(sup, len(sup.blobs) if digest else None)
        self._xattrs = XattrReader(self._image, sup)
        root = self._root()
        waiting = [root]
        while waiting:
            waiting += self._fill(waiting.pop())
        self._check_counts()
        return Tree(root.directory, blobs, [self._file])

    def _root(self) -> _Pending:
        nid = self._super.root
        self._place = "the root, inode", nid
        header = self._header(nid)
        inode = self._inode(header)
        if not isinstance(inode, Directory):
            raise Bad("no directory")
        inode.nid = nid
        return _Pending(inode, header, nid, 0)

    def _check_counts(self) -> None:
        self._place = ("its counts",)
        if self._count != self._super.inodes:
            raise Bad(f"{self._count} inodes, of which it says {self._super.inodes}")
        if any(self._missing.values()):
            raise Bad("an inode that has not as many names as it says")

    def _fill(self, pending: _Pending) -> list[_Pending]:
        """Reads the entries; those directories in it that wait for the same."""
        here, header, parent, depth = pending
        if depth > self._limits.depth:
            raise Bad(f"directories more than {self._limits.depth} deep")
        self._place = "the directory, inode", here.nid
        dots = {b".": here.nid, b"..": parent}
        below: list[_Pending] = []
        last = b""
        for block in blocks_of(self._image, self._addresses, header):
            for name, nid, kind in entries_of(block):
                self._place = "inode", nid, name, "in the directory", here.nid
                if name <= last or len(name) > MAX_NAME or b"/" in name or b"\0" in name:
                    raise Bad("a name that is out of order, or that no file can have")
                last = name
                if name in dots:
                    self._check_dot(dots.pop(name), nid, kind)
                else:
                    here.children[name] = self._child(nid, kind, here, below, depth)
        if dots or header.nlink != 2 + len(below):
            raise Bad(f"a directory without '.' or '..', or with {header.nlink} links")
        return below

    def _check_dot(self, expected: int, nid: int, kind: int) -> None:
        if nid != expected or kind != FILE_TYPES[stat.S_IFDIR >> 12]:
            raise Bad(f"it should be the directory {expected}")

    def _child(self, nid: int, kind: int, here: Directory, below: list[_Pending], depth: int) -> Inode:
        inode = self._linked.get(nid)
        if inode is not None:
            self._missing[nid] -= 1
        else:
            header = self._header(nid)
            inode = self._inode(header)
            inode.nid = nid
            if isinstance(inode, Directory):
                below.append(_Pending(inode, header, here.nid, depth + 1))
            elif header.nlink > 1:
                self._linked[nid] = inode
                self._missing[nid] = header.nlink - 1
        if kind != FILE_TYPES[inode.mode >> 12]:
            raise Bad(f"a type {kind} in the directory, and a mode {inode.mode:o}")
        return inode

    def _header(self, nid: int) -> Header:
        index, bit = nid >> 7, 1 << (nid & 127)
        seen = self._seen.get(index, 0)
        if seen & bit:
            raise Bad("it is met a second time")
        self._seen[index] = seen | bit
        self._count += 1
        if self._count > self._limits.inodes:
            raise Bad(f"more than {self._limits.inodes} inodes")
        return parse_header(self._image, self._super, nid)

    def _inode(self, header: Header) -> Inode:
        owner = (header.mode, header.uid, header.gid)
        if len(self._owners) < _OWNERS:
            owner = self._owners.setdefault(owner, owner)
        common = (*owner, header.mtime_ns, self._xattrs.of(header))
        kind = stat.S_IFMT(header.mode)
        if kind == stat.S_IFREG:
            tail = inline_size(header)
            extents = extents_of(self._image, self._addresses, header, tail)
            inode: Inode = File(*common, size=header.size, extents=extents, tail=self._tail(header, tail))
        elif kind == stat.S_IFDIR:
            inode = Directory(*common)
        elif kind == stat.S_IFLNK:
            inode = Symlink(*common, target=self._target(header))
        elif FILE_TYPES[kind >> 12]:
            inode = Special(*common, rdev=device_of(header))
        else:
            raise Bad(f"a mode {header.mode:o}")
        inode.nlink = header.nlink
        return inode

    def _tail(self, header: Header, size: int) -> Tail:
        if size <= _DIRECT:
            return self._image.take(header.body_at, size) if size else b""
        self._image.spend(size)
        if header.body_at + size > self._image.size:
            raise Bad("its end lies beyond the image's")
        return Span(0, header.body_at, size)

    def _target(self, header: Header) -> bytes:
        if not 0 < header.size <= MAX_TARGET:
            raise Bad(f"a symbolic link to {header.size} bytes")
        target = b"".join(blocks_of(self._image, self._addresses, header))
        if b"\0" in target:
            raise Bad("a symbolic link with a NUL")
        return target
