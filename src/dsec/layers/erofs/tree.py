"""A file system in memory, small enough for a million inodes: some 300 bytes each."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

from dsec.core.errors import (
    FileNotFound,
    InvalidArgument,
    IsADirectory,
    LayerCorrupt,
    NotADirectory,
    PathInvalid,
)
from dsec.layers.erofs.format import MAX_NAME

HOLE: Final = -1
OPAQUE: Final = b"trusted.overlay.opaque"


class Blob(NamedTuple):
    digest: str
    """SHA-256 in hex."""
    blocks: int


class Extent(NamedTuple):
    """A run of whole blocks of a file."""

    blob: int
    """Its place in `Tree.blobs`, or HOLE."""
    start: int
    blocks: int


class Span(NamedTuple):
    """Bytes that lie in a file beside the tree."""

    spool: int
    """Its place in `Tree.spools`."""
    offset: int
    length: int


Tail = bytes | Span
Xattrs = dict[bytes, bytes]
"""By full name. Never changed in place: inodes may share one."""


def tail_size(tail: Tail) -> int:
    return tail.length if type(tail) is Span else len(tail)


class Inode:
    """What all have. Several names of one object are hard links."""

    __slots__ = ("gid", "mode", "mtime_ns", "nid", "nlink", "uid", "xattrs")

    def __init__(
        self, mode: int, uid: int = 0, gid: int = 0, mtime_ns: int = 0, xattrs: Xattrs | None = None
    ) -> None:
        self.mode = mode
        """With the type's bits."""
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns
        self.xattrs = xattrs
        self.nid = 0
        """Where it lies in the image that was read or written last."""
        self.nlink = 0
        """Set by `Tree.count_links`."""


class File(Inode):
    """A regular file: `extents` in order, then `tail`.

    Either `tail` holds the last size % 4096 bytes, and one extent at most, no hole, lies before it; or the
    extents reach to the end, the last block padded with zeros.
    """

    __slots__ = ("extents", "size", "tail")

    def __init__(
        self,
        mode: int,
        uid: int = 0,
        gid: int = 0,
        mtime_ns: int = 0,
        xattrs: Xattrs | None = None,
        *,
        size: int = 0,
        extents: tuple[Extent, ...] = (),
        tail: Tail = b"",
    ) -> None:
        super().__init__(mode, uid, gid, mtime_ns, xattrs)
        self.size = size
        self.extents = extents
        self.tail = tail


class Directory(Inode):
    __slots__ = ("children",)

    def __init__(
        self, mode: int, uid: int = 0, gid: int = 0, mtime_ns: int = 0, xattrs: Xattrs | None = None
    ) -> None:
        super().__init__(mode, uid, gid, mtime_ns, xattrs)
        self.children: dict[bytes, Inode] = {}


class Symlink(Inode):
    __slots__ = ("target",)

    def __init__(
        self,
        mode: int,
        uid: int = 0,
        gid: int = 0,
        mtime_ns: int = 0,
        xattrs: Xattrs | None = None,
        *,
        target: bytes,
    ) -> None:
        super().__init__(mode, uid, gid, mtime_ns, xattrs)
        self.target = target


class Special(Inode):
    """A device, FIFO or socket."""

    __slots__ = ("rdev",)

    def __init__(
        self,
        mode: int,
        uid: int = 0,
        gid: int = 0,
        mtime_ns: int = 0,
        xattrs: Xattrs | None = None,
        *,
        rdev: int = 0,
    ) -> None:
        super().__init__(mode, uid, gid, mtime_ns, xattrs)
        self.rdev = rdev
        """As os.makedev gives it; zero for a FIFO or socket."""


def is_whiteout(inode: Inode) -> bool:
    """Whether it hides what has its name in the layers below: a character device 0:0."""
    return type(inode) is Special and inode.rdev == 0 and stat.S_ISCHR(inode.mode)


def is_opaque(inode: Inode) -> bool:
    """Whether what a directory of its name holds in the layers below is hidden."""
    return inode.xattrs is not None and inode.xattrs.get(OPAQUE) == b"y"


def split(path: bytes) -> list[bytes]:
    """Names of `path`, which starts at the root. Raises PathInvalid."""
    names = [name for name in path.split(b"/") if name]
    for name in names:
        if name in (b".", b"..") or b"\0" in name or len(name) > MAX_NAME:
            raise PathInvalid(f"a path in a layer: {path[:300]!r}: the name {name[:300]!r} cannot be there")
    return names


class Tree:
    """A root, the blobs that files lie in, and the open files that `Span`s lie in.

    Paths are bytes from the root, with or without a slash before; no symbolic link is followed. The spools
    are the caller's to close, after the last use of the tree.
    """

    __slots__ = ("blobs", "root", "spools")

    def __init__(
        self,
        root: Directory | None = None,
        blobs: list[Blob] | None = None,
        spools: list[BinaryIO] | None = None,
    ) -> None:
        self.root = root or Directory(stat.S_IFDIR | 0o755)
        self.blobs = blobs if blobs is not None else []
        self.spools = spools if spools is not None else []

    def lookup(self, path: bytes) -> Inode | None:
        """What has that path, if anything. Raises PathInvalid."""
        found: Inode | None = self.root
        for name in split(path):
            if not isinstance(found, Directory):
                return None
            found = found.children.get(name)
        return found

    def make_directories(self, path: bytes) -> Directory:
        """The directory of that path, made with all above it where missing: 0755, of root, of time 0.

        Raises PathInvalid, and NotADirectory where something else has the name.
        """
        here = self.root
        for name in split(path):
            below = here.children.get(name)
            if below is None:
                below = here.children[name] = Directory(stat.S_IFDIR | 0o755)
            if not isinstance(below, Directory):
                raise NotADirectory(f"a path in a layer: {path[:300]!r}: {name!r} is no directory")
            here = below
        return here

    def put(self, path: bytes, inode: Inode) -> None:
        """Gives `inode` that name, in place of what had it. Raises as `make_directories`."""
        parent, name = self._parent(path)
        parent.children[name] = inode

    def link(self, existing: bytes, path: bytes) -> None:
        """A hard link. Raises FileNotFound, IsADirectory, and as `make_directories`."""
        inode = self.lookup(existing)
        if inode is None:
            raise FileNotFound(f"a hard link in a layer: {existing[:300]!r} is not there")
        if isinstance(inode, Directory):
            raise IsADirectory(f"a hard link in a layer: {existing[:300]!r} is a directory")
        self.put(path, inode)

    def remove(self, path: bytes) -> None:
        """Takes that name away, and all below it. Raises FileNotFound, PathInvalid."""
        names = split(path)
        above = self.lookup(b"/".join(names[:-1]))
        if not names or not isinstance(above, Directory) or names[-1] not in above.children:
            raise FileNotFound(f"removing from a layer: {path[:300]!r} is not there")
        del above.children[names[-1]]

    def _parent(self, path: bytes) -> tuple[Directory, bytes]:
        names = split(path)
        if not names:
            raise PathInvalid("a path in a layer: the root itself cannot be replaced")
        return self.make_directories(b"/".join(names[:-1])), names[-1]

    def directories(self) -> Iterator[Directory]:
        """All, each before those in it. Raises InvalidArgument where one has two names."""
        waiting = [self.root]
        seen: set[int] = set()
        while waiting:
            here = waiting.pop()
            if id(here) in seen:
                raise InvalidArgument("a layer: a directory stands under two names; make two of it")
            seen.add(id(here))
            yield here
            waiting += [c for c in here.children.values() if type(c) is Directory]

    def count_links(self) -> None:
        """Sets each inode's `nlink`, a directory's being 2 and one for each directory in it; `nid` to 0."""
        for here in self.directories():
            here.nlink = 2
            for child in here.children.values():
                child.nlink = child.nid = 0
        for here in self.directories():
            for child in here.children.values():
                child.nlink += 1
            here.nlink = 2 + sum(type(child) is Directory for child in here.children.values())

    def inodes(self) -> Iterator[Inode]:
        """Each once, whatever its names. Counts links first."""
        self.count_links()
        seen: set[int] = set()
        yield self.root
        for here in self.directories():
            for child in here.children.values():
                if child.nlink > 1 and type(child) is not Directory:
                    if id(child) in seen:
                        continue
                    seen.add(id(child))
                yield child

    def read_tail(self, tail: Tail) -> bytes:
        """Raises LayerCorrupt where the spool is cut short."""
        if not isinstance(tail, Span):
            return tail
        spool = self.spools[tail.spool]
        spool.seek(tail.offset)
        data = spool.read(tail.length)
        if len(data) != tail.length:
            raise LayerCorrupt(
                f"reading the end of a file: {tail.length} bytes at {tail.offset} are not in the spool, "
                "which was cut short; build the layer again"
            )
        return data
