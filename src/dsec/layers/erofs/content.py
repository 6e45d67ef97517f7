"""What a file of a tree holds, read from its blobs and its tail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from dsec.core.errors import LayerCorrupt
from dsec.layers.erofs.data import Run
from dsec.layers.erofs.format import BLOCK_BITS
from dsec.layers.erofs.tree import HOLE, Extent, File, Tree

OpenBlob = Callable[[int], BinaryIO]
"""An open file for a place in `Tree.blobs`. It stays the caller's; its position is changed."""
_CHUNK: Final = 1 << 20
_ZEROS: Final = bytes(_CHUNK)


def read_file(tree: Tree, inode: File, open_blob: OpenBlob) -> Iterator[bytes]:
    """Its bytes, holes as zeros, in pieces of at most 1 MiB. Raises LayerCorrupt for a blob cut short."""
    return read_runs(tree, inode, open_blob, holes=True)


def read_runs(tree: Tree, inode: File, open_blob: OpenBlob, *, holes: bool = False) -> Iterator[bytes]:
    """The bytes of `data_runs` one after the other. holes: with zeros for what lies between."""
    left = inode.size
    for extent in inode.extents:
        length = min(extent.blocks << BLOCK_BITS, left)
        left -= length
        if extent.blob != HOLE:
            yield from _from_blob(open_blob(extent.blob), extent, length)
        elif holes:
            yield from _zeros(length)
    if left:
        tail = tree.read_tail(inode.tail)[:left]
        if len(tail) < left:
            raise LayerCorrupt(f"reading a file of a layer: {left - len(tail)} of its bytes lie nowhere")
        yield tail


def data_runs(inode: File) -> list[Run]:
    """Where data lies in the file: (offset, length) in order."""
    runs: list[Run] = []
    at = 0
    for extent in inode.extents:
        length = min(extent.blocks << BLOCK_BITS, inode.size - at)
        if extent.blob != HOLE and length:
            _append(runs, at, length)
        at += length
    if at < inode.size:
        _append(runs, at, inode.size - at)
    return runs


def _append(runs: list[Run], at: int, length: int) -> None:
    if runs and sum(runs[-1]) == at:
        at, length = runs[-1][0], runs.pop()[1] + length
    runs.append((at, length))


def _from_blob(blob: BinaryIO, extent: Extent, length: int) -> Iterator[bytes]:
    blob.seek(extent.start << BLOCK_BITS)
    while length:
        data = blob.read(min(length, _CHUNK))
        if not data:
            raise LayerCorrupt(
                f"reading a file of a layer: its blob {extent.blob} is {length} bytes too short; "
                "fetch or build the layer again"
            )
        length -= len(data)
        yield data


def _zeros(length: int) -> Iterator[bytes]:
    while length:
        piece = _ZEROS[:length]
        length -= len(piece)
        yield piece
