"""Makes a blob: bodies of files in whole blocks, each different run of them once.

What is small, and the ends of files, go to a spool, from which the metadata takes them in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final, NamedTuple, Protocol

from dsec.core.errors import InvalidArgument
from dsec.layers.erofs.format import BLOCK, BLOCK_BITS, MAX_BLOCKS, MAX_SIZE
from dsec.layers.erofs.tree import HOLE, Blob, Extent, Span, Tail

MAX_INLINE: Final = 3072
"""Ends of at most this lie behind their inode. Three quarters of a block: as a block of its own it would
waste a quarter or more, and behind its inode it leaves room in its block for a dozen inodes of others. Longer
ones waste less than that, and in a blob they are found to be equal and never copied by a merge."""
HOLE_SIZE: Final = 64 << 10
"""Zeros of this length and alignment become a hole."""
_MAX_HOLES: Final = 1 << 16
"""Of one file: the larger it is, the larger its holes have to be, so that its index stays small."""
MAX_PADDING: Final = 1 << 30
"""Bytes of zeros that the units of one sparse file may cost, beyond as much as its data: the map of a small
archive could ask for terabytes."""
_DIRECT: Final = 64
"""Ends of at most this are kept as they are: a reference would be larger."""
_MEMORY: Final = 1 << 20
"""Of a run that is not yet known to be new. A longer one is written, and taken back if it is known."""
_ZEROS: Final = bytes(HOLE_SIZE)

Run = tuple[int, int]
"""Offset and length of data in a sparse file."""


class Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Body(NamedTuple):
    """What a `File` takes."""

    extents: tuple[Extent, ...]
    tail: Tail


class BlobWriter:
    """Fills `out`, an empty file open for reading and writing, with bodies of files."""

    def __init__(self, out: BinaryIO, spool: BinaryIO, *, blob: int = 0, spool_index: int = 0) -> None:
        """blob, spool_index: the places that these two will have in the tree."""
        self._out = out
        self._spool = spool
        self._index = blob
        self._spool_index = spool_index
        self._spooled = 0
        self.blocks = 0
        """Written so far."""
        self._sha = hashlib.sha256()
        self._known: dict[bytes, int] = {}
        """Where each run begins, by its SHA-256."""

    def add(self, source: Reader, size: int, runs: Sequence[Run] | None = None) -> Body:
        """Reads `size` bytes, or the bytes of `runs` alone one after the other, in bounded memory.

        runs: of a sparse file; in order, apart, within `size`; between them are zeros. Raises
        InvalidArgument where `source` ends early or the sizes make no sense, and OSError.
        """
        runs = [(0, size)] if runs is None else runs
        _check(size, runs)
        if size <= MAX_INLINE:
            return Body((), self._tail(_Pieces(source, size, runs).read(0, size)))
        return self._add_large(_Pieces(source, size, runs))

    def _add_large(self, pieces: _Pieces) -> Body:
        extents: list[Extent] = []
        run = _Run(self)
        rest = b""
        for piece in pieces:
            if isinstance(piece, int):
                run = self._end(run, extents)
                _append_hole(extents, piece)
            elif len(piece) % BLOCK:
                cut = len(piece) & -BLOCK
                run.add(piece[:cut])
                rest = piece[cut:]
            else:
                run.add(piece)
        inline = len(rest) <= MAX_INLINE and not extents
        if rest and not inline:
            run.add(rest.ljust(BLOCK, b"\0"))
        self._end(run, extents)
        return Body(tuple(extents), self._tail(rest) if inline else b"")

    def _end(self, run: _Run, extents: list[Extent]) -> _Run:
        if run.size:
            extents.append(Extent(self._index, run.end(), run.size >> BLOCK_BITS))
        return _Run(self)

    def _tail(self, data: bytes) -> Tail:
        if len(data) <= _DIRECT:
            return data
        self._spool.write(data)
        self._spooled += len(data)
        return Span(self._spool_index, self._spooled - len(data), len(data))

    def finish(self) -> Blob:
        """Flushes both files. A blob of no blocks is nothing: leave it out of the tree."""
        self._out.flush()
        self._spool.flush()
        return Blob(self._sha.hexdigest(), self.blocks)


class _Run:
    """Blocks one after the other, in the making."""

    def __init__(self, blob: BlobWriter) -> None:
        self._blob = blob
        self._start = blob.blocks
        self._before = blob._sha
        self._sha = hashlib.sha256()
        self._waiting: list[bytes] = []
        self.size = 0

    def add(self, data: bytes) -> None:
        self._sha.update(data)
        self._waiting.append(data)
        self.size += len(data)
        if self.size > _MEMORY:
            self._write()

    def _write(self) -> None:
        blob = self._blob
        if blob._sha is self._before:
            blob._sha = self._before.copy()
        for data in self._waiting:
            blob._out.write(data)
            blob._sha.update(data)
        self._waiting.clear()

    def end(self) -> int:
        """Its first block in the blob."""
        blob = self._blob
        digest = self._sha.digest()
        known = blob._known.get(digest)
        if known is not None:
            self._take_back()
            return known
        self._write()
        blob._known[digest] = self._start
        blob.blocks += self.size >> BLOCK_BITS
        if blob.blocks >= MAX_BLOCKS:
            raise InvalidArgument("a blob of more than 16 TiB: make a layer of fewer files")
        return self._start

    def _take_back(self) -> None:
        blob = self._blob
        if blob._sha is not self._before:
            blob._out.seek(self._start << BLOCK_BITS)
            blob._out.truncate()
            blob._sha = self._before


class _Pieces:
    """A file as data and lengths of holes, in blocks. Only the last data may have a part of a block."""

    def __init__(self, source: Reader, size: int, runs: Sequence[Run]) -> None:
        self._source = source
        self._size = size
        self._runs = runs
        self._next = 0
        """The run that is being read."""
        least = (size + _MAX_HOLES - 1) // _MAX_HOLES
        self._unit = max(HOLE_SIZE, 1 << (least - 1).bit_length())
        self._check_padding()

    def _check_padding(self) -> None:
        data = units = 0
        last = -1
        for offset, length in self._runs:
            if length:
                data += length
                first, end = offset // self._unit, (offset + length - 1) // self._unit
                units += end - max(first, last + 1) + 1
                last = end
        if units * self._unit > 2 * data + MAX_PADDING:
            raise InvalidArgument(
                f"a sparse file of a layer: {self._size} bytes with {data} of data, so spread that "
                f"{units * self._unit} would be stored: make it smaller"
            )

    def __iter__(self) -> Iterator[bytes | int]:
        for at in range(0, self._size, self._unit):
            end = min(at + self._unit, self._size)
            if self._run_at(at)[0] >= end:
                yield (end - at + BLOCK - 1) >> BLOCK_BITS
            else:
                yield from self._unit_at(at, end)

    def _unit_at(self, at: int, end: int) -> Iterator[bytes | int]:
        """Zeros are held back until data follows in the unit."""
        zeros = 0
        for start in range(at, end, HOLE_SIZE):
            piece = self.read(start, min(start + HOLE_SIZE, end))
            if piece == _ZEROS:
                zeros += 1
                continue
            yield from [_ZEROS] * zeros
            zeros = 0
            yield piece
        if zeros * HOLE_SIZE == self._unit:
            yield self._unit >> BLOCK_BITS
        else:
            yield from [_ZEROS] * zeros

    def _run_at(self, at: int) -> Run:
        """The first that ends behind `at`; beyond the end where there is none."""
        while self._next < len(self._runs):
            run = self._runs[self._next]
            if run[0] + run[1] > at:
                return run
            self._next += 1
        return self._size, 0

    def read(self, at: int, end: int) -> bytes:
        """From `at` to `end`, which must follow on what was read before."""
        parts = []
        while at < end:
            offset, length = self._run_at(at)
            part = (
                bytes(min(offset, end) - at)
                if offset > at
                else _exactly(self._source, min(offset + length, end) - at)
            )
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _exactly(source: Reader, size: int) -> bytes:
    data = source.read(size)
    while len(data) < size:
        more = source.read(size - len(data))
        if not more:
            raise InvalidArgument(f"a file of a layer ends {size - len(data)} bytes early")
        data += more
    return data


def _check(size: int, runs: Sequence[Run]) -> None:
    if not 0 <= size <= MAX_SIZE:
        raise InvalidArgument(f"a file of a layer: a size of {size} bytes, of which {MAX_SIZE} are held")
    end = 0
    for offset, length in runs:
        if offset < end or length < 0 or offset + length > size:
            raise InvalidArgument(f"a sparse file of a layer: data at {offset}, {length} bytes, out of order")
        end = offset + length


def _append_hole(extents: list[Extent], blocks: int) -> None:
    if extents and extents[-1].blob == HOLE:
        blocks += extents.pop().blocks
    extents.append(Extent(HOLE, 0, blocks))
