"""Where in an image each inode lies, and what beside them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from dsec.core.errors import InvalidArgument
from dsec.layers.erofs.encode import (
    CannotWrite,
    check_inode,
    check_name,
    chunk_bits,
    chunk_count,
    directory_size,
    merge_extents,
    sorted_names,
    xattrs_size,
)
from dsec.layers.erofs.format import (
    BLOCK,
    BLOCK_BITS,
    CHUNK,
    DEVICE,
    EXTENDED,
    MAX_BLOBS,
    MAX_BLOCKS,
    MAX_SIZE,
    MAX_TAIL,
    MAX_TARGET,
    SLOT_BITS,
    SUPER_OFFSET,
    SUPER_SIZE,
    round_up,
)
from dsec.layers.erofs.tree import (
    HOLE,
    Directory,
    File,
    Inode,
    Special,
    Symlink,
    Tree,
    tail_size,
)

INODE: Final = EXTENDED.size
DEVICES: Final = SUPER_OFFSET + SUPER_SIZE
_SLOT: Final = 1 << SLOT_BITS
_KINDS: Final[dict[type[Inode], frozenset[int]]] = {
    File: frozenset({stat.S_IFREG}),
    Directory: frozenset({stat.S_IFDIR}),
    Symlink: frozenset({stat.S_IFLNK}),
    Special: frozenset({stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK}),
}


def inline_part(header: int, size: int) -> int:
    """How much of a directory or a link lies behind its inode, whose header and xattrs have that size."""
    last = size % BLOCK
    return last if header + last <= BLOCK else 0


class _Space:
    """Room for inodes: each whole in one block where it can be, in the first of a few that has room."""

    OPEN: Final = 32
    """Blocks with room: with fewer of them, an eighth of the image is lost between large ends of files."""

    def __init__(self, start: int) -> None:
        self.end = round_up(start, BLOCK)
        self._open: list[tuple[int, int]] = []
        """Room in each, and where it begins."""
        self._keep(self.end - start, start)

    def take(self, size: int) -> int:
        """The offset of `size` bytes, BLOCK of them at most, within one block."""
        size = round_up(size, _SLOT)
        for index, (room, at) in enumerate(self._open):
            if room >= size:
                self._open[index] = (room - size, at + size)
                return at
        at = self.end
        self.end += BLOCK
        self._keep(BLOCK - size, at + size)
        return at

    def take_long(self, before: int, inline: int) -> int:
        """The offset of `before` bytes and then `inline` ones, which must not cross a block's end."""
        at = self.end
        room = BLOCK - (at + before) % BLOCK
        if inline > room:
            at += round_up(room, _SLOT)
        end = round_up(at + before + inline, _SLOT)
        self.end = round_up(end, BLOCK)
        self._keep(self.end - end, end)
        return at

    def _keep(self, room: int, at: int) -> None:
        if room < INODE:
            return
        self._open.append((room, at))
        if len(self._open) > self.OPEN:
            self._open.remove(min(self._open))


class Layout:
    """All that must be known before the first byte is written.

    Raises InvalidArgument, with the path, for what an image does not hold.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.inodes: list[Inode] = []
        self.parents: dict[int, int] = {}
        """Of directories: nid, and that of the one above."""
        self.beside: dict[int, int] = {}
        """Of those with blocks of the image's own: nid, and the first of them, counted behind the inodes."""
        self.with_blocks: list[Directory | Symlink] = []
        self.beside_blocks = 0
        self.chunks: dict[int, int] = {}
        """Of files with an index of chunks: nid, and the chunk's bits above a block's."""
        self.used = self._used_blobs()
        self._placers: dict[type[Inode], Callable[..., int]] = {
            File: self._file,
            Directory: self._directory,
            Symlink: self._symlink,
            Special: self._special,
        }
        self._space = _Space(DEVICES + DEVICE.size * len(self.used))
        self._place_all()
        if self.blocks + sum(tree.blobs[b].blocks for b in self.used) >= MAX_BLOCKS:
            raise InvalidArgument("writing an EROFS image: more than 16 TiB in all; use fewer blobs")

    @property
    def inode_blocks(self) -> int:
        return self._space.end >> BLOCK_BITS

    @property
    def blocks(self) -> int:
        return self.inode_blocks + self.beside_blocks

    def _used_blobs(self) -> list[int]:
        """Their places in the tree's list."""
        files = (inode for inode in self.tree.inodes() if type(inode) is File)
        used = {extent[0] for file in files for extent in file.extents} - {HOLE}
        if len(used) > MAX_BLOBS:
            raise InvalidArgument(f"writing an EROFS image: {len(used)} blobs, of which it holds {MAX_BLOBS}")
        if used and not 0 <= min(used) <= max(used) < len(self.tree.blobs):
            raise InvalidArgument("writing an EROFS image: a file lies in a blob that the tree does not list")
        return sorted(used)

    def _place_all(self) -> None:
        """Those of one directory beside each other, then those below."""
        root = self.tree.root
        root.nid = 0
        self._place(root)
        self.parents[root.nid] = root.nid
        waiting = [root]
        while waiting:
            waiting += reversed(self._place_children(waiting.pop()))
        self.inodes.sort(key=attrgetter("nid"))

    def _place_children(self, here: Directory) -> list[Directory]:
        below = []
        for name in sorted(here.children):
            child = here.children[name]
            if child.nid == 0:
                self._place(child)
                if type(child) is Directory:
                    self.parents[child.nid] = here.nid
                    below.append(child)
        return below

    def _place(self, inode: Inode) -> None:
        try:
            _check_kind(inode)
            at = self._placers[type(inode)](inode, INODE + xattrs_size(inode.xattrs))
        except CannotWrite as e:
            raise InvalidArgument(f"writing an EROFS image: {path_of(self.tree, inode)!r}: {e}") from e
        inode.nid = at >> SLOT_BITS
        self.inodes.append(inode)

    def _file(self, inode: File, header: int) -> int:
        tail = tail_size(inode.tail)
        extents = inode.extents
        if extents or tail or inode.size:
            self._check_file(inode, tail)
            extents = merge_extents(extents)
        if len(extents) < 2 and not (extents and extents[0].blob == HOLE):
            return self._take(header, tail)
        bits = chunk_bits(extents)
        at = self._take(round_up(header, CHUNK.size) + CHUNK.size * chunk_count(extents, bits), 0)
        self.chunks[at >> SLOT_BITS] = bits
        return at

    def _check_file(self, inode: File, tail: int) -> None:
        blocks = sum(extent.blocks for extent in inode.extents)
        if tail:
            fits = blocks * BLOCK + tail == inode.size and tail <= MAX_TAIL
            fits = fits and (not inode.extents or (len(inode.extents) == 1 and inode.extents[0].blob != HOLE))
        else:
            fits = blocks == (inode.size + BLOCK - 1) >> BLOCK_BITS
        if not fits or not 0 <= inode.size <= MAX_SIZE:
            raise CannotWrite(f"a size of {inode.size} bytes, for {blocks} blocks and a tail of {tail} bytes")
        for blob, start, count in inode.extents:
            if count < 0 or (blob != HOLE and not 0 <= start <= self.tree.blobs[blob].blocks - count):
                raise CannotWrite(f"{count} blocks from {start} on, which its blob does not have")

    def _directory(self, inode: Directory, header: int) -> int:
        for name in inode.children:
            check_name(name)
        return self._with_blocks(inode, header, directory_size(sorted_names(inode)))

    def _symlink(self, inode: Symlink, header: int) -> int:
        if not 0 < len(inode.target) <= MAX_TARGET or b"\0" in inode.target:
            raise CannotWrite(f"a symbolic link to {len(inode.target)} bytes, or with a NUL among them")
        return self._with_blocks(inode, header, len(inode.target))

    def _special(self, inode: Special, header: int) -> int:
        if not inode.rdev >= 0 or os.major(inode.rdev) >= 1 << 12 or os.minor(inode.rdev) >= 1 << 20:
            raise CannotWrite(f"a device number {inode.rdev}")
        return self._take(header, 0)

    def _with_blocks(self, inode: Directory | Symlink, header: int, size: int) -> int:
        inline = inline_part(header, size)
        at = self._take(header, inline)
        if size > inline:
            self.beside[at >> SLOT_BITS] = self.beside_blocks
            self.with_blocks.append(inode)
            self.beside_blocks += (size - inline + BLOCK - 1) >> BLOCK_BITS
        return at

    def _take(self, before: int, inline: int) -> int:
        if before + inline <= BLOCK:
            return self._space.take(before + inline)
        return self._space.take_long(before, inline)


def _check_kind(inode: Inode) -> None:
    check_inode(inode)
    if inode.mode >> 16 or stat.S_IFMT(inode.mode) not in _KINDS[type(inode)]:
        raise CannotWrite(f"a mode {inode.mode:o}, which is not of its kind")


def path_of(tree: Tree, wanted: Inode) -> bytes:
    """One of its paths: a slow search, for messages."""
    waiting: list[tuple[bytes, Inode]] = [(b"", tree.root)]
    while waiting:
        path, here = waiting.pop()
        if here is wanted:
            return path or b"/"
        if isinstance(here, Directory):
            waiting += [(path + b"/" + name, child) for name, child in here.children.items()]
    return b"?"
