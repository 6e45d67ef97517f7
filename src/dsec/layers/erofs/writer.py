"""Writes a tree as an EROFS image, in one pass over the output and with little memory beside the tree's.

First every inode gets its place (`place`), so that every number is known; then all is written in that order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO, Final, NamedTuple

from dsec.core.errors import InvalidArgument
from dsec.layers.erofs.encode import (
    encode_chunks,
    encode_directory,
    encode_xattrs,
    merge_extents,
    sorted_names,
    xattr_count,
)
from dsec.layers.erofs.format import (
    BLOCK,
    BLOCK_BITS,
    CHECKSUM,
    CHECKSUM_OFFSET,
    CHUNK,
    CHUNK_INDEXES,
    CHUNKED,
    COMPAT_CHECKSUM,
    COMPAT_MTIME,
    DEVICE,
    EXTENDED,
    FLAT_INLINE,
    FLAT_PLAIN,
    FORMAT_EXTENDED,
    INCOMPAT_CHUNKED,
    INCOMPAT_DEVICES,
    LAYOUT_SHIFT,
    MAGIC,
    SLOT_BITS,
    SUPER,
    SUPER_OFFSET,
    checksum,
)
from dsec.layers.erofs.place import DEVICES, INODE, Layout, inline_part
from dsec.layers.erofs.tree import Blob, Directory, File, Inode, Special, Symlink, Tree

_FLUSH: Final = 1 << 20
_PLAIN: Final = FORMAT_EXTENDED | FLAT_PLAIN << LAYOUT_SHIFT
_INLINE: Final = FORMAT_EXTENDED | FLAT_INLINE << LAYOUT_SHIFT
_CHUNKED: Final = FORMAT_EXTENDED | CHUNKED << LAYOUT_SHIFT
_ZEROS: Final = bytes(BLOCK)

_Body = tuple[int, int, int, bytes]
"""Format, size, the number that the layout gives a meaning, what lies behind the xattrs."""


class Stats(NamedTuple):
    inodes: int
    blocks: int
    """Of the image."""
    blobs: list[Blob]
    """To be given as devices, in this order: those of the tree that a file lies in."""


def write(tree: Tree, out: BinaryIO, *, uuid: bytes) -> Stats:
    """Writes `tree` to `out`, from where that stands on. Sets `nid` and `nlink` of every inode.

    uuid: 16 bytes. Raises InvalidArgument, with the path, for what EROFS does not hold; LayerCorrupt for a
    spool that was cut short; OSError.
    """
    if len(uuid) != 16:
        raise InvalidArgument("writing an EROFS image: its uuid must have 16 bytes")
    return _Writer(Layout(tree), out).write(uuid)


class _Output:
    """Takes pieces in the order of their offsets, with gaps."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._parts: list[bytes] = []
        self._at = self._waiting = 0
        self._sealed = False

    def put(self, offset: int, piece: bytes) -> None:
        gap = offset - self._at
        if gap:
            self._parts.append(_ZEROS[:gap] if gap <= BLOCK else bytes(gap))
        self._parts.append(piece)
        self._at = offset + len(piece)
        self._waiting += gap + len(piece)
        if self._waiting >= _FLUSH:
            self.flush()

    def flush(self) -> None:
        """What is flushed first holds the first block, which gets its checksum."""
        data = bytearray().join(self._parts)
        if not self._sealed:
            CHECKSUM.pack_into(data, SUPER_OFFSET + CHECKSUM_OFFSET, checksum(data))
            self._sealed = True
        self._out.write(data)
        self._parts.clear()
        self._waiting = 0


class _Writer:
    def __init__(self, layout: Layout, out: BinaryIO) -> None:
        self._layout = layout
        self._tree = tree = layout.tree
        self._blobs = [tree.blobs[index] for index in layout.used]
        self._slots = {blob: slot for slot, blob in enumerate(layout.used)}
        self._starts = _starts(layout.blocks, self._blobs)
        self._out = _Output(out)
        self._bodies: dict[type[Inode], Callable[..., _Body]] = {
            File: self._file,
            Directory: self._with_blocks,
            Symlink: self._with_blocks,
            Special: _special,
        }

    def write(self, uuid: bytes) -> Stats:
        self._head(uuid)
        for number, inode in enumerate(self._layout.inodes, 1):
            self._inode(number, inode)
        at = self._layout.inode_blocks << BLOCK_BITS
        for inode in self._layout.with_blocks:
            at = self._blocks(at, inode)
        self._out.put(self._layout.blocks << BLOCK_BITS, b"")
        self._out.flush()
        return Stats(len(self._layout.inodes), self._layout.blocks, self._blobs)

    def _head(self, uuid: bytes) -> None:
        layout, devices = self._layout, len(self._blobs)
        incompat = INCOMPAT_CHUNKED * bool(layout.chunks) | INCOMPAT_DEVICES * bool(devices)
        slot = DEVICES // DEVICE.size if devices else 0
        compat = COMPAT_CHECKSUM | COMPAT_MTIME
        numbers = (compat, BLOCK_BITS, 0, self._tree.root.nid, len(layout.inodes), 0, 0, layout.blocks, 0, 0)
        more = (uuid, b"", incompat, 0, devices, slot, 0, 0, 0, 0, 0)
        self._out.put(SUPER_OFFSET, SUPER.pack(MAGIC, 0, *numbers, *more))
        for place, (blob, start) in enumerate(zip(self._blobs, self._starts, strict=True)):
            tag = blob.digest.encode("ascii")
            self._out.put(DEVICES + place * DEVICE.size, DEVICE.pack(tag, blob.blocks, start))

    def _inode(self, number: int, inode: Inode) -> None:
        xattrs = encode_xattrs(inode.xattrs) if inode.xattrs else b""
        form, size, u, inline = self._bodies[type(inode)](inode, INODE + len(xattrs))
        seconds, ns = divmod(inode.mtime_ns, 1_000_000_000)
        count = xattr_count(len(xattrs)) if xattrs else 0
        head = EXTENDED.pack(
            form, count, inode.mode, 0, size, u, number, inode.uid, inode.gid, seconds, ns, inode.nlink
        )
        self._out.put(inode.nid << SLOT_BITS, head + xattrs + inline)

    def _file(self, inode: File, header: int) -> _Body:
        if (bits := self._layout.chunks.get(inode.nid)) is not None:
            index = encode_chunks(merge_extents(inode.extents), bits, self._slots)
            return _CHUNKED, inode.size, CHUNK_INDEXES | bits, bytes(-header % CHUNK.size) + index
        start = 0
        if extent := next((e for e in inode.extents if e.blocks), None):
            start = self._starts[self._slots[extent.blob]] + extent.start
        if inode.tail:
            return _INLINE, inode.size, start, self._tree.read_tail(inode.tail)
        return _PLAIN, inode.size, start, b""

    def _with_blocks(self, inode: Directory | Symlink, header: int) -> _Body:
        data = self._content(inode)
        inline = inline_part(header, len(data))
        start = 0
        if len(data) > inline:
            start = self._layout.inode_blocks + self._layout.beside[inode.nid]
        return (_INLINE if inline else _PLAIN), len(data), start, data[len(data) - inline :]

    def _content(self, inode: Directory | Symlink) -> bytes:
        if isinstance(inode, Directory):
            return encode_directory(inode, self._layout.parents[inode.nid], sorted_names(inode))
        return inode.target

    def _blocks(self, at: int, inode: Directory | Symlink) -> int:
        """What of it does not lie behind the inode; where the next ones' begins."""
        data = self._content(inode)
        header = INODE + (len(encode_xattrs(inode.xattrs)) if inode.xattrs else 0)
        data = data[: len(data) - inline_part(header, len(data))]
        self._out.put(at, data)
        return at + (len(data) + BLOCK - 1) // BLOCK * BLOCK


def _starts(behind: int, blobs: list[Blob]) -> list[int]:
    """Where each begins in the unified address space."""
    starts = []
    for blob in blobs:
        starts.append(behind)
        behind += blob.blocks
    return starts


def _special(inode: Special, _: int) -> _Body:
    """The kernel's own form of a device number."""
    major, minor = os.major(inode.rdev), os.minor(inode.rdev)
    return _PLAIN, 0, minor & 0xFF | major << 8 | (minor & ~0xFF) << 12, b""
