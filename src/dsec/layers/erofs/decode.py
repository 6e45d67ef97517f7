"""Parts of an inode from bytes that are not trusted. Everything here raises `Bad` for what is not sound."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from dsec.layers.erofs.format import (
    BLOCK,
    BLOCK_BITS,
    BLOCK_MAP,
    CHUNK,
    CHUNK_BITS,
    CHUNK_INDEXES,
    CHUNKED,
    COMPACT,
    DIRENT,
    EXTENDED,
    FLAT_INLINE,
    FLAT_PLAIN,
    FORMAT,
    FORMAT_EXTENDED,
    FORMAT_MASK,
    LAYOUT_SHIFT,
    MAX_CHUNKS,
    MAX_SIZE,
    MAX_TAIL,
    NO_BLOCK,
    SLOT_BITS,
    XATTR,
    XATTR_HEADER,
    XATTR_PREFIXES,
    XATTR_WHOLE,
    round_up,
)
from dsec.layers.erofs.image import Bad, Image, Super
from dsec.layers.erofs.tree import HOLE, Extent, Xattrs

_SECOND: Final = 1_000_000_000
_CACHED: Final = 4096


class Header(NamedTuple):
    """An inode's own part."""

    layout: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    nlink: int
    size: int
    u: int
    xattrs_at: int
    xattrs_size: int
    body_at: int
    """What lies behind the xattrs."""


def parse_header(image: Image, super_: Super, nid: int) -> Header:
    at = super_.start + (nid << SLOT_BITS)
    (form,) = FORMAT.unpack(image.read(at, FORMAT.size))
    layout = form >> LAYOUT_SHIFT
    if form & ~FORMAT_MASK or layout not in (FLAT_PLAIN, FLAT_INLINE, CHUNKED):
        raise Bad(f"a format {form:#x} that is not read here, such as compression")
    if form & FORMAT_EXTENDED:
        own = EXTENDED.size
        _, count, mode, _, size, u, _, uid, gid, time, ns, nlink = EXTENDED.unpack(image.take(at, own))
    else:
        own = COMPACT.size
        _, count, mode, nlink, size, _, u, _, uid, gid, _ = COMPACT.unpack(image.take(at, own))
        time, ns = super_.seconds, super_.ns
    if size > MAX_SIZE or ns >= _SECOND or not nlink:
        raise Bad(f"a size of {size} bytes, {ns} nanoseconds, {nlink} links")
    xattrs = XATTR_HEADER.size + 4 * (count - 1) if count else 0
    at += own
    return Header(layout, mode, uid, gid, time * _SECOND + ns, nlink, size, u, at, xattrs, at + xattrs)


class XattrReader:
    """Inodes with the same xattrs get the same dictionary."""

    def __init__(self, image: Image, super_: Super) -> None:
        self._image = image
        self._start = super_.shared
        self._shared: dict[int, tuple[bytes, bytes]] = {}
        self._cache: dict[bytes, Xattrs] = {}

    def of(self, header: Header) -> Xattrs | None:
        if not header.xattrs_size:
            return None
        data = self._image.take(header.xattrs_at, header.xattrs_size)
        if (cached := self._cache.get(data)) is None:
            cached = self._parse(data)
            if len(self._cache) < _CACHED:
                self._cache[data] = cached
        return cached or None

    def _parse(self, data: bytes) -> Xattrs:
        _, shared = XATTR_HEADER.unpack_from(data)
        at = XATTR_HEADER.size + 4 * shared
        if at > len(data):
            raise Bad("xattrs that end early")
        found = [self._at(int.from_bytes(data[i : i + 4], "little")) for i in range(at - 4 * shared, at, 4)]
        while at < len(data):
            entry, at = _entry(data, at)
            found.append(entry)
        xattrs = dict(found)
        if len(xattrs) != len(found):
            raise Bad("an xattr that it has twice")
        return xattrs

    def _at(self, number: int) -> tuple[bytes, bytes]:
        """A shared one."""
        if (known := self._shared.get(number)) is None:
            at = self._start + number * 4
            size = sum(XATTR.unpack(self._image.read(at, XATTR.size))[::2]) + XATTR.size
            known = self._shared[number] = _entry(self._image.take(at, round_up(size, 4)), 0)[0]
        return known


def _entry(data: bytes, at: int) -> tuple[tuple[bytes, bytes], int]:
    """An xattr, and where the next one begins."""
    if at + XATTR.size > len(data):
        raise Bad("xattrs that end early")
    name_size, prefix, size = XATTR.unpack_from(data, at)
    at += XATTR.size
    end = at + name_size + size
    name = data[at : at + name_size]
    if end > len(data) or prefix not in XATTR_PREFIXES or b"\0" in name:
        raise Bad(f"an xattr {name!r}, prefix {prefix}, of {size} bytes")
    if (prefix in XATTR_WHOLE) != (not name):
        raise Bad(f"an xattr {name!r} where prefix {prefix} has none")
    return (XATTR_PREFIXES[prefix] + name, data[at + name_size : end]), round_up(end, 4)


class Addresses:
    """The unified address space: blocks of the image, then those of each blob."""

    def __init__(self, super_: Super, own: int | None) -> None:
        """own: the place of the image itself among the blobs, if files may lie in it."""
        self._super = super_
        self._own = own
        parts = [(start, slot) for slot, start in enumerate(super_.starts) if start]
        self._starts = [start for start, _ in parts]
        self._slots = [slot for _, slot in parts]
        end = super_.blocks
        for start, slot in parts:
            if start < end:
                raise Bad("blobs that lie over each other")
            end = start + super_.blobs[slot].blocks

    def extent(self, start: int, blocks: int) -> Extent:
        """That run of a file."""
        if (index := bisect_right(self._starts, start)) > 0:
            slot = self._slots[index - 1]
            return self.in_blob(slot, start - self._starts[index - 1], blocks)
        if self._own is None or start + blocks > self._super.blocks:
            raise Bad(f"{blocks} blocks from {start} on, which no blob has")
        return Extent(self._own, start, blocks)

    def in_blob(self, slot: int, start: int, blocks: int) -> Extent:
        if slot >= len(self._super.blobs) or start + blocks > self._super.blobs[slot].blocks:
            raise Bad(f"{blocks} blocks from {start} on of blob {slot}, which it does not have")
        return Extent(slot, start, blocks)

    def own(self, start: int, blocks: int) -> int:
        """The offset of blocks of the image."""
        if start + blocks > self._super.blocks:
            raise Bad(f"{blocks} blocks from {start} on, which it does not have")
        return start << BLOCK_BITS


def inline_size(header: Header) -> int:
    """How much of the body lies behind the inode."""
    if header.layout != FLAT_INLINE or not header.size:
        return 0
    tail = header.size % BLOCK
    if not 0 < tail <= MAX_TAIL or header.body_at % BLOCK + tail > BLOCK:
        raise Bad(f"{tail} bytes of its end that do not lie in one block behind it")
    return tail


def extents_of(image: Image, addresses: Addresses, header: Header, tail: int) -> tuple[Extent, ...]:
    """Where the body of a regular file lies, but for the `tail` bytes of its end."""
    blocks = (header.size - tail + BLOCK - 1) >> BLOCK_BITS
    if not blocks:
        return ()
    if header.layout == CHUNKED:
        return _chunks(image, addresses, header, blocks)
    return (addresses.extent(header.u, blocks),)


def _chunks(image: Image, addresses: Addresses, header: Header, blocks: int) -> tuple[Extent, ...]:
    if header.u & ~(CHUNK_INDEXES | CHUNK_BITS):
        raise Bad(f"chunks of a form {header.u:#x}")
    chunk = 1 << (header.u & CHUNK_BITS)
    count = (blocks + chunk - 1) // chunk
    if count > MAX_CHUNKS:
        raise Bad(f"{count} chunks")
    extents: list[Extent] = []
    for device_, start in _index(image, header, count):
        size = min(chunk, blocks)
        blocks -= size
        extent = _chunk(addresses, device_, start, size)
        last = extents[-1] if extents else None
        if last and last.blob == extent.blob and extent.start in (last.start + last.blocks, HOLE):
            extent = Extent(last.blob, last.start, last.blocks + size)
            extents.pop()
        extents.append(extent)
    return tuple(extent if extent.blob != HOLE else extent._replace(start=0) for extent in extents)


def _index(image: Image, header: Header, count: int) -> Iterator[tuple[int, int]]:
    """Device and block of each chunk."""
    form = CHUNK if header.u & CHUNK_INDEXES else BLOCK_MAP
    data = image.take(round_up(header.body_at, form.size), count * form.size)
    for entry in form.iter_unpack(data):
        yield (entry[1], entry[2]) if form is CHUNK else (0, entry[0])


def _chunk(addresses: Addresses, device_: int, start: int, blocks: int) -> Extent:
    if start == NO_BLOCK:
        return Extent(HOLE, HOLE, blocks)
    if device_:
        return addresses.in_blob(device_ - 1, start, blocks)
    return addresses.extent(start, blocks)


def blocks_of(image: Image, addresses: Addresses, header: Header) -> Iterator[bytes]:
    """The content of a directory or a link, block by block."""
    if header.layout == CHUNKED:
        raise Bad("chunks, which only files have")
    tail = inline_size(header)
    whole = header.size - tail
    at = addresses.own(header.u, (whole + BLOCK - 1) >> BLOCK_BITS) if whole else 0
    for done in range(0, whole, BLOCK):
        yield image.take(at + done, min(BLOCK, whole - done))
    if tail:
        yield image.take(header.body_at, tail)


def entries_of(block: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, nid and type of each."""
    if len(block) < DIRENT.size:
        raise Bad("a block of a directory that ends early")
    first = DIRENT.unpack_from(block)[1]
    if first % DIRENT.size or not 0 < first <= len(block):
        raise Bad(f"a block of a directory whose names begin at {first}")
    dirents = [*DIRENT.iter_unpack(block[:first])]
    ends = [at for _, at, _ in dirents[1:]] + [len(block.rstrip(b"\0"))]
    for (nid, at, kind), end in zip(dirents, ends, strict=True):
        name = block[at:end]
        if not name or at < first:
            raise Bad("a name in a directory that is empty, or among its entries")
        yield name, nid, kind


def device_of(header: Header) -> int:
    """Of a device file; a FIFO or socket has none."""
    if not (stat.S_ISCHR(header.mode) or stat.S_ISBLK(header.mode)):
        return 0
    major, minor = (header.u & 0xFFF00) >> 8, header.u & 0xFF | header.u >> 12 & 0xFFF00
    return os.makedev(major, minor)
