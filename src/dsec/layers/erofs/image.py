"""An image as bytes that are not trusted: its superblock, and reading within bounds."""

from __future__ import annotations

import io
import re
from typing import BinaryIO, Final, NamedTuple

from dsec.layers.erofs.format import (
    BLOCK,
    BLOCK_BITS,
    COMPAT_CHECKSUM,
    DEVICE,
    INCOMPAT_CHUNKED,
    INCOMPAT_DEVICES,
    INCOMPAT_ZERO_PADDING,
    MAGIC,
    MAX_BLOBS,
    SUPER,
    SUPER_OFFSET,
    checksum,
)
from dsec.layers.erofs.tree import Blob

_WINDOW: Final = 1 << 16
_WINDOWS: Final = 128
_FEATURES: Final = INCOMPAT_ZERO_PADDING | INCOMPAT_CHUNKED | INCOMPAT_DEVICES
_DIGEST: Final = re.compile(rb"[0-9a-f]{64}")


class Bad(Exception):
    """What is wrong with an image."""


class Image:
    """Reads of it, through a cache of 8 MiB, and a budget.

    Nothing in an image that is sound lies under two inodes, so all that is read of it is not more than the
    image is. A hostile one that has the same bytes mean many things ends there.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, io.SEEK_END)
        self._windows: dict[int, bytes] = {}
        self._budget = self.size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly that. Raises Bad."""
        index, skip = divmod(offset, _WINDOW)
        if skip + length <= _WINDOW:
            window = self._windows.get(index)
            data = (window or self._load(index))[skip : skip + length]
        else:
            data = self._direct(offset, length)
        if len(data) != length:
            raise Bad(f"{length} bytes at {offset} are beyond its end")
        return data

    def take(self, offset: int, length: int) -> bytes:
        """`read`, at the cost of the budget."""
        self.spend(length)
        return self.read(offset, length)

    def spend(self, length: int) -> None:
        self._budget -= length
        if self._budget < 0:
            raise Bad("parts of it lie over each other")

    def _load(self, index: int) -> bytes:
        if len(self._windows) >= _WINDOWS:
            del self._windows[next(iter(self._windows))]
        window = self._windows[index] = self._direct(index * _WINDOW, _WINDOW)
        return window

    def _direct(self, offset: int, length: int) -> bytes:
        if offset > self.size:
            return b""
        self._file.seek(offset)
        return self._file.read(min(length, self.size - offset))


class Super(NamedTuple):
    root: int
    inodes: int
    seconds: int
    """Time of the compact inodes."""
    ns: int
    blocks: int
    start: int
    """Offset of the inodes."""
    shared: int
    """Offset of shared xattrs."""
    blobs: list[Blob]
    starts: list[int]
    """Where each begins in the unified address space; 0 for one that is not there."""


def read_super(image: Image) -> Super:
    """Checks the first block. Raises Bad."""
    first = image.read(0, BLOCK)
    magic, crc, compat, bits, extra, root, inodes, seconds, ns, blocks, meta, shared, *rest = (
        SUPER.unpack_from(first, SUPER_OFFSET)
    )
    _, _, incompat, _, devices, slot, directory_bits, prefixes, _, _, _ = rest
    if magic != MAGIC:
        raise Bad("it is no EROFS image")
    if compat & COMPAT_CHECKSUM and crc != checksum(first):
        raise Bad("the checksum of its first block is wrong")
    if bits != BLOCK_BITS or directory_bits:
        raise Bad(f"blocks of {1 << min(bits, 63)} bytes; only {BLOCK} are read here")
    if incompat & ~_FEATURES or extra or prefixes:
        raise Bad(f"features {incompat:#x} that are not read here, such as compression")
    if ns >= 10**9 or blocks << BLOCK_BITS > image.size:
        raise Bad(f"{blocks} blocks, which it does not have")
    blobs, starts = _devices(image, slot * DEVICE.size, devices)
    return Super(root, inodes, seconds, ns, blocks, meta << BLOCK_BITS, shared << BLOCK_BITS, blobs, starts)


def _devices(image: Image, offset: int, count: int) -> tuple[list[Blob], list[int]]:
    blobs, starts = [], []
    if count > MAX_BLOBS:
        raise Bad(f"{count} blobs, more than {MAX_BLOBS}")
    for tag, blocks, start in DEVICE.iter_unpack(image.read(offset, count * DEVICE.size)):
        if not _DIGEST.fullmatch(tag) and any(tag):
            raise Bad(f"a blob without a digest: {tag[:64]!r}")
        blobs.append(Blob(tag.rstrip(b"\0").decode("ascii"), blocks))
        starts.append(start)
    return blobs, starts
