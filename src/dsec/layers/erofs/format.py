"""EROFS on disk: numbers and structures, little-endian. As in the kernel's fs/erofs/erofs_fs.h."""

from __future__ import annotations

import stat
from struct import Struct
from typing import Final

BLOCK: Final = 4096
BLOCK_BITS: Final = 12
SLOT_BITS: Final = 5
"""An inode's number is its offset from the metadata's start in units of 32 bytes."""
SUPER_OFFSET: Final = 1024
SUPER_SIZE: Final = 128
MAGIC: Final = 0xE0F5E1E2

SUPER: Final = Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
"""magic, checksum, compat, block bits, extra slots, root nid, inodes, build time and its ns, blocks,
metadata's block, shared xattrs' block, uuid, label, incompat, compression, devices, device slots' offset
(in slots), directory block bits, xattr prefixes and their start, packed nid, filter."""
CHECKSUM: Final = Struct("<I")
CHECKSUM_OFFSET: Final = 4

COMPAT_CHECKSUM: Final = 0x1
COMPAT_MTIME: Final = 0x2
INCOMPAT_ZERO_PADDING: Final = 0x1
INCOMPAT_CHUNKED: Final = 0x4
INCOMPAT_DEVICES: Final = 0x8

DEVICE: Final = Struct("<64sII56x")
"""Tag, blocks, first block in the unified address space."""

EXTENDED: Final = Struct("<HHHHQIIIIqII16x")
"""format, xattr count, mode, -, size, u, ino, uid, gid, mtime, its ns, nlink."""
COMPACT: Final = Struct("<HHHHIIIIHHI")
"""format, xattr count, mode, nlink, size, -, u, ino, uid, gid, -."""
FORMAT: Final = Struct("<H")
FORMAT_EXTENDED: Final = 0x1
FORMAT_MASK: Final = 0xF
LAYOUT_SHIFT: Final = 1
FLAT_PLAIN: Final = 0
FLAT_INLINE: Final = 2
CHUNKED: Final = 4

CHUNK: Final = Struct("<HHI")
"""-, device (slot + 1), block in that device."""
BLOCK_MAP: Final = Struct("<I")
CHUNK_INDEXES: Final = 0x20
CHUNK_BITS: Final = 0x1F
NO_BLOCK: Final = 0xFFFFFFFF

DIRENT: Final = Struct("<QHBx")
"""nid, offset of the name in the block, type."""

XATTR_HEADER: Final = Struct("<IB7x")
"""Name filter, number of shared ones."""
XATTR: Final = Struct("<BBH")
"""Length of the name behind the prefix, prefix, length of the value."""
XATTR_PREFIXES: Final = {
    1: b"user.",
    2: b"system.posix_acl_access",
    3: b"system.posix_acl_default",
    4: b"trusted.",
    6: b"security.",
}
XATTR_WHOLE: Final = frozenset({2, 3})
"""Prefixes that are the whole name."""
MAX_XATTRS: Final = 0xFFFF
"""In units of four bytes, of one inode; the header counts as one."""

MAX_NAME: Final = 255
MAX_TARGET: Final = 4095
MAX_TAIL: Final = BLOCK - 32
"""Fits in a block behind any xattrs, which end at some multiple of four bytes."""
MAX_BLOBS: Final = 4096
"""Keeps the root behind the device slots within the 16 bits that its number has."""
MAX_CHUNKS: Final = 1 << 22
"""Of one file: 32 MiB of indexes."""
MAX_CHUNK_BITS: Final = 18
"""Above a block's: chunks of 1 GiB."""
MAX_SIZE: Final = 1 << 44
MAX_BLOCKS: Final = NO_BLOCK

_TYPES: Final = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
FILE_TYPES: Final = tuple(_TYPES.get(kind << 12, 0) for kind in range(16))
"""A dirent's type, by the upper four of the mode's sixteen bits; 0 where there is none."""


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC: Final = _crc_table()


def crc32c(data: bytes | bytearray) -> int:
    """Castagnoli's, begun with all ones and not inverted at the end, as the superblock has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    return crc


def checksum(block: bytes | bytearray) -> int:
    """Of the first block of an image: from the superblock on, the checksum itself taken as zero."""
    rest = bytearray(block[SUPER_OFFSET:BLOCK])
    CHECKSUM.pack_into(rest, CHECKSUM_OFFSET, 0)
    return crc32c(rest)


def round_up(number: int, unit: int) -> int:
    """To a multiple of `unit`, a power of two."""
    return (number + unit - 1) & -unit
