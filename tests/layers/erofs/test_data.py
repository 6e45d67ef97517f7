"""Blobs: what is in them, and what is not."""

from __future__ import annotations

import hashlib
import io
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layers.erofs.layers import Maker, content

from dsec.core.errors import InvalidArgument
from dsec.layers.erofs.data import HOLE_SIZE, MAX_INLINE, BlobWriter, Run
from dsec.layers.erofs.format import BLOCK, MAX_SIZE
from dsec.layers.erofs.tree import HOLE, Extent


def stored(maker: Maker, data: bytes, runs: list[Run] | None = None) -> bytes:
    """What can be read of the file afterwards."""
    file = maker.file(b"f", data, runs=runs)
    tree = maker.done()
    return content(tree, file, {blob.digest: maker.blob.getvalue() for blob in tree.blobs})


def some(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize(
    "size", [0, 1, 64, 65, MAX_INLINE, MAX_INLINE + 1, 4096, 4097, 8191, 65536, 65537, 1 << 20, (2 << 20) + 5]
)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_file_is_what_it_was(size: int, zeros: bool) -> None:
    data = bytes(size) if zeros else some(size)
    assert stored(Maker(), data) == data


def test_small_files_and_ends_are_no_part_of_the_blob() -> None:
    maker = Maker()
    assert maker.file(b"s", some(MAX_INLINE)).extents == ()
    assert maker.file(b"t", some(BLOCK + MAX_INLINE)).extents == (Extent(0, 0, 1),)
    assert maker.file(b"p", some(BLOCK + MAX_INLINE + 1, 1)).extents == (Extent(0, 1, 2),)
    assert maker.done().blobs[0].blocks == 3


@pytest.mark.parametrize("size", [3 * BLOCK, (3 << 20) + 100])
def test_equal_files_are_stored_once(size: int) -> None:
    maker = Maker()
    first = maker.file(b"a", some(size))
    other = maker.file(b"b", some(size, 1))
    again = maker.file(b"c", some(size))
    assert first.extents == again.extents != other.extents
    assert maker.done().blobs[0].blocks == 2 * (size // BLOCK)
    assert maker.blob.getvalue() == some(size)[: size & -BLOCK] + some(size, 1)[: size & -BLOCK]


def test_files_with_the_same_blocks_and_another_end_share_them() -> None:
    maker = Maker()
    first, second = maker.file(b"a", some(BLOCK) + b"1"), maker.file(b"b", some(BLOCK) + b"2")
    assert first.extents == second.extents and first.tail != second.tail


def test_zeros_become_a_hole() -> None:
    maker = Maker()
    data = some(HOLE_SIZE) + bytes(3 * HOLE_SIZE) + some(HOLE_SIZE, 1) + b"end"
    file = maker.file(b"f", data)
    assert [(e.blob, e.blocks) for e in file.extents] == [(0, 16), (HOLE, 48), (0, 17)]
    assert file.tail == b"" and maker.done().blobs[0].blocks == 33


def test_a_vast_sparse_file_costs_little(tmp_path: object) -> None:
    """16 TiB with a byte here and there: neither time nor index in proportion."""
    maker = Maker()
    runs = [(at, 1) for at in range(0, MAX_SIZE, MAX_SIZE // 2)]
    extents, _ = maker.writer.add(io.BytesIO(b"xx"), MAX_SIZE, runs)
    assert sum(e.blocks for e in extents) == MAX_SIZE // BLOCK and len(extents) == 4
    assert maker.done().blobs[0].blocks * BLOCK == 1 << 28


def test_zeros_in_a_unit_that_is_no_hole_are_kept() -> None:
    """Holes of a file of 8 GiB are of 128 KiB at least."""
    maker = Maker()
    data = bytes(HOLE_SIZE) + some(100) + bytes(HOLE_SIZE - 100) + bytes(2 * HOLE_SIZE) + some(100, 1)
    extents, _ = maker.writer.add(io.BytesIO(data), 8 << 30, [(0, len(data))])
    assert [(e.blob, e.blocks) for e in extents] == [(0, 32), (HOLE, 32), (0, 32), (HOLE, (8 << 18) - 96)]
    assert maker.blob.getvalue()[: 2 * HOLE_SIZE] == data[: 2 * HOLE_SIZE]
    assert maker.blob.getvalue()[2 * HOLE_SIZE :].rstrip(b"\0") == some(100, 1)


@st.composite
def sparse(draw: st.DrawFn) -> tuple[bytes, list[Run]]:
    size = draw(st.sampled_from([0, 5, 5000, 65536, 200_000, 300_001]))
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=8)))
    runs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    data = bytearray(size)
    for at, length in runs:
        data[at : at + length] = some(length, at) if draw(st.booleans()) else bytes(length)
    return bytes(data), runs


@settings(max_examples=150, deadline=None)
@given(sparse())
def test_sparse_files_are_what_they_were(case: tuple[bytes, list[Run]]) -> None:
    data, runs = case
    assert stored(Maker(), data, runs) == data
    assert stored(Maker(), data) == data


class Trickle:
    """Gives less than it is asked for."""

    def __init__(self, data: bytes) -> None:
        self._rest = io.BytesIO(data)

    def read(self, size: int, /) -> bytes:
        return self._rest.read(min(size, 1000))


def test_a_stream_that_gives_little_at_a_time() -> None:
    out, spool = io.BytesIO(), io.BytesIO()
    writer = BlobWriter(out, spool)
    writer.add(Trickle(some(199_000)), 199_000)
    assert out.getvalue() + spool.getvalue() == some(199_000)
    assert writer.finish().digest == hashlib.sha256(out.getvalue()).hexdigest()


@pytest.mark.parametrize("size", [10, 10_000, 10_000_000])
def test_a_stream_that_ends_early_is_refused(size: int) -> None:
    with pytest.raises(InvalidArgument, match="early"):
        Maker().writer.add(io.BytesIO(bytes(size - 1)), size)


@pytest.mark.parametrize(
    ("size", "runs"),
    [(-1, []), (MAX_SIZE + 1, []), (10, [(5, 6)]), (10, [(5, 2), (6, 1)]), (10, [(-1, 2)]), (10, [(3, -1)])],
)
def test_sizes_that_make_no_sense_are_refused(size: int, runs: list[Run]) -> None:
    with pytest.raises(InvalidArgument, match="a layer"):
        Maker().writer.add(io.BytesIO(bytes(100)), size, runs)


class Endless:
    """A file of one byte repeated, that takes no memory; and what is written to it."""

    def __init__(self) -> None:
        self.size = 0
        self._data = b"x" * (1 << 20)

    def read(self, size: int, /) -> bytes:
        return self._data[:size]


def test_memory_does_not_grow_with_the_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("blob") / "blob"
    with path.open("w+b") as out:
        writer = BlobWriter(out, io.BytesIO())
        tracemalloc.start()
        writer.add(Endless(), 64 << 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20
        assert writer.add(Endless(), 64 << 20).extents == (Extent(0, 0, 64 << 8),)
        writer.finish()
        assert path.stat().st_size == 64 << 20


def test_holes_that_would_cost_more_than_they_save_are_refused(tmp_path: Path) -> None:
    """A byte in every unit of a file of 16 TiB: its map is small, what would be stored is not."""
    size = 1 << 44
    step = size // 60_000
    runs = [(at * step, 1) for at in range(60_000)]
    with open(tmp_path / "data", "w+b") as out, open(tmp_path / "spool", "w+b") as spool:
        blob = BlobWriter(out, spool)
        with pytest.raises(InvalidArgument, match="would be stored"):
            blob.add(io.BytesIO(b"x" * 60_000), size, runs)
        assert blob.add(io.BytesIO(b"x" * 100), 1 << 36, [(n << 29, 1) for n in range(100)]).extents
