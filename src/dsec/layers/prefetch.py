"""Which parts of a layer's blobs are read before its first result; later cold starts read those ahead.

What was read is what the page cache holds of a blob that it held nothing of before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.images import LayerRef

log = logging.getLogger(__name__)
COLD: Final = 0.01
"""A blob of which more than this is in memory already tells nothing of what is read first."""
MAX_RANGES: Final = 20_000
"""Of one blob. Past it the nearest ones are joined."""
PIECE: Final = 1 << 20
THREADS: Final = 16
"""They wait for the store; four left most of its bandwidth unused at 2 ms of latency."""
PAGE: Final = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)

Range = tuple[int, int]
"""Offset and length in bytes."""


class Hot(msgspec.Struct, frozen=True):
    """What was read of each blob, by the blob's digest, in order."""

    blobs: dict[str, list[Range]]

    @property
    def total(self) -> int:
        return sum(length for ranges in self.blobs.values() for _, length in ranges)


def resident(path: str) -> list[Range]:
    """What the page cache holds of a file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if not size:
            return []
        with mmap.mmap(fd, size, access=mmap.ACCESS_COPY) as mapped:  # writable, which ctypes asks for
            return list(_ranges(_pages(mapped, size)))
    finally:
        os.close(fd)


def _pages(mapped: mmap.mmap, size: int) -> bytes:
    flags = ctypes.create_string_buffer(-(-size // PAGE))
    view = ctypes.c_char.from_buffer(mapped)
    try:
        if _libc.mincore(ctypes.addressof(view), size, flags):
            number = ctypes.get_errno()
            raise OSError(number, f"mincore: {os.strerror(number)}")
    finally:
        del view
    return flags.raw


def _ranges(pages: bytes) -> Iterator[Range]:
    flags = pages.translate(bytes(n & 1 for n in range(256)))
    at = flags.find(1)
    while at >= 0:
        end = flags.find(0, at)
        end = len(flags) if end < 0 else end
        yield at * PAGE, (end - at) * PAGE
        at = flags.find(1, end)


def is_cold(layer: LayerRef) -> bool:
    """Whether next to nothing of its blobs is in memory."""
    for path in layer.blobs:
        if sum(length for _, length in resident(path)) > COLD * os.stat(path).st_size:
            return False
    return True


def record(layer: LayerRef) -> Hot:
    """What has been read of its blobs by now."""
    return Hot({os.path.basename(path): _fewer(resident(path)) for path in layer.blobs})


def _fewer(ranges: list[Range]) -> list[Range]:
    gap = PAGE
    while len(ranges) > MAX_RANGES:
        joined: list[Range] = []
        for offset, length in ranges:
            if joined and offset - sum(joined[-1]) <= gap:
                joined[-1] = (joined[-1][0], offset + length - joined[-1][0])
            else:
                joined.append((offset, length))
        ranges, gap = joined, gap * 4
    return ranges


def save(path: Path, hot: Hot) -> None:
    """The first record stands: later ones saw a warm cache. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(hot))
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)


def load(path: Path) -> Hot | None:
    """None when there is none, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Hot)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as e:
        log.warning("%s: %s: the layer is read on demand alone", path, e)
        return None


def read_ahead(layer: LayerRef, hot: Hot, threads: int = THREADS) -> int:
    """Reads those ranges into memory, several pieces at a time; bytes read. A blob that fails is left."""
    pieces = [
        piece for path in layer.blobs for piece in _pieces(path, hot.blobs.get(os.path.basename(path), []))
    ]
    with ThreadPoolExecutor(threads, thread_name_prefix="prefetch") as pool:
        return sum(pool.map(_read, pieces))


def _pieces(path: str, ranges: Sequence[Range]) -> Iterator[tuple[str, int, int]]:
    for offset, length in ranges:
        for at in range(offset, offset + length, PIECE):
            yield path, at, min(PIECE, offset + length - at)


def _read(piece: tuple[str, int, int]) -> int:
    path, offset, length = piece
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return len(os.pread(fd, length, offset))
        finally:
            os.close(fd)
    except OSError as e:
        log.warning("reading ahead of %s: %s", path, e)
        return 0
