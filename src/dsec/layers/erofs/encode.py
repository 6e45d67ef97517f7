"""Parts of an inode, in bytes: its xattrs, its directory entries, its index of chunks."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Final

from dsec.layers.erofs.format import (
    BLOCK,
    CHUNK,
    DIRENT,
    FILE_TYPES,
    MAX_CHUNK_BITS,
    MAX_CHUNKS,
    MAX_NAME,
    MAX_XATTRS,
    NO_BLOCK,
    XATTR,
    XATTR_HEADER,
    XATTR_PREFIXES,
    XATTR_WHOLE,
)
from dsec.layers.erofs.tree import HOLE, Directory, Extent, Inode, Xattrs

_DIRENT: Final = DIRENT.size
_HOLE: Final = CHUNK.pack(0, 0, NO_BLOCK)
_DIRECTORY: Final = FILE_TYPES[stat.S_IFDIR >> 12]


class CannotWrite(Exception):
    """Why this inode has no place in an image."""


def xattrs_size(xattrs: Xattrs | None) -> int:
    """Of `encode_xattrs`, which it must agree with."""
    if not xattrs:
        return 0
    size = XATTR_HEADER.size
    for name, value in xattrs.items():
        if len(value) > 0xFFFF:
            raise CannotWrite(f"an xattr of {len(value)} bytes, more than 65535")
        size += (XATTR.size + len(_prefixed(name)[1]) + len(value) + 3) & -4
    if (size - XATTR_HEADER.size) // 4 + 1 > MAX_XATTRS:
        raise CannotWrite(f"xattrs of {size} bytes, of which an inode holds {MAX_XATTRS * 4}")
    return size


def encode_xattrs(xattrs: Xattrs) -> bytes:
    parts = [XATTR_HEADER.pack(0, 0)]
    for name, value in sorted(xattrs.items()):
        index, rest = _prefixed(name)
        entry = XATTR.pack(len(rest), index, len(value)) + rest + value
        parts.append(entry + bytes(-len(entry) % 4))
    return b"".join(parts)


def xattr_count(size: int) -> int:
    """What the inode says of xattrs of that size, the header included."""
    return (size - XATTR_HEADER.size) // 4 + 1 if size else 0


def _prefixed(name: bytes) -> tuple[int, bytes]:
    for index, prefix in XATTR_PREFIXES.items():
        if name == prefix if index in XATTR_WHOLE else name.startswith(prefix) and name != prefix:
            rest = name[len(prefix) :]
            if len(rest) > MAX_NAME or b"\0" in rest:
                break
            return index, rest
    raise CannotWrite(f"an xattr {name[:300]!r}, which EROFS does not hold")


def sorted_names(directory: Directory) -> list[bytes]:
    """In the order that they have on disk, `.` and `..` among them."""
    return sorted([*directory.children, b".", b".."])


def directory_size(names: list[bytes]) -> int:
    """Of its blocks: full ones count as BLOCK, the last as far as it goes."""
    whole = sum(map(len, names)) + _DIRENT * len(names)
    if whole <= BLOCK:
        return whole
    *full, (first, end) = _split(names)
    return len(full) * BLOCK + sum(map(len, names[first:end])) + _DIRENT * (end - first)


def _split(names: list[bytes]) -> Iterator[tuple[int, int]]:
    """Which names go into each block, from and to."""
    first = used = 0
    for at, name in enumerate(names):
        need = _DIRENT + len(name)
        if used + need > BLOCK:
            yield first, at
            first, used = at, 0
        used += need
    yield first, len(names)


def encode_directory(directory: Directory, parent_nid: int, names: list[bytes]) -> bytes:
    """As long as `directory_size` says."""
    children = directory.children
    entries = [
        (c.nid, FILE_TYPES[c.mode >> 12]) if (c := children.get(n)) else _dots(n, directory.nid, parent_nid)
        for n in names
    ]
    blocks = [_encode_block(names[a:b], entries[a:b]) for a, b in _split(names)]
    return b"".join([*(block.ljust(BLOCK, b"\0") for block in blocks[:-1]), blocks[-1]])


def _dots(name: bytes, own: int, parent: int) -> tuple[int, int]:
    return (own if name == b"." else parent), _DIRECTORY


def _encode_block(names: list[bytes], entries: list[tuple[int, int]]) -> bytes:
    at = _DIRENT * len(names)
    parts = []
    for name, (nid, kind) in zip(names, entries, strict=True):
        parts.append(DIRENT.pack(nid, at, kind))
        at += len(name)
    return b"".join(parts + names)


def check_name(name: bytes) -> None:
    if not 0 < len(name) <= MAX_NAME or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise CannotWrite(f"a name {name[:300]!r}, which no file can have")


def chunk_bits(extents: tuple[Extent, ...]) -> int:
    """The largest chunk, in bits above a block's, of which every extent but the last has a whole number.

    The first chunk of an extent begins where the extent does, so only their places in the file count.
    """
    at = places = 0
    for extent in extents:
        places |= at
        at += extent.blocks
    bits = (places & -places).bit_length() - 1 if places else max(at - 1, 0).bit_length()
    return min(bits, MAX_CHUNK_BITS)


def chunk_count(extents: tuple[Extent, ...], bits: int) -> int:
    blocks = sum(extent.blocks for extent in extents)
    count = (blocks + (1 << bits) - 1) >> bits
    if count > MAX_CHUNKS:
        raise CannotWrite(f"a file in {count} chunks, of which {MAX_CHUNKS} are held; make its holes larger")
    return count


def encode_chunks(extents: tuple[Extent, ...], bits: int, slots: dict[int, int]) -> bytes:
    """The index; `slots` has the device slot of each blob."""
    parts = []
    for blob, start, count in extents:
        chunks = (count + (1 << bits) - 1) >> bits
        if blob == HOLE:
            parts.append(_HOLE * chunks)
        else:
            device = slots[blob] + 1
            parts += [CHUNK.pack(0, device, start + (i << bits)) for i in range(chunks)]
    return b"".join(parts)


def merge_extents(extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
    """The same, as few as they can be."""
    merged: list[Extent] = []
    for extent in extents:
        if merged and _follows(merged[-1], extent):
            merged[-1] = merged[-1]._replace(blocks=merged[-1].blocks + extent.blocks)
        elif extent.blocks:
            merged.append(extent)
    return tuple(merged)


def _follows(last: Extent, extent: Extent) -> bool:
    return last.blob == extent.blob and (last.blob == HOLE or last.start + last.blocks == extent.start)


def check_inode(inode: Inode) -> None:
    """Raises CannotWrite for numbers that have no room on disk."""
    if not (0 <= inode.uid < 1 << 32 and 0 <= inode.gid < 1 << 32):
        raise CannotWrite(f"an owner {inode.uid}:{inode.gid}")
    if not -(1 << 63) <= inode.mtime_ns // 10**9 < 1 << 63:
        raise CannotWrite(f"a time of {inode.mtime_ns} ns")
