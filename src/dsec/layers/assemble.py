"""A tree and its blob as the two files of a layer, in a staging directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from dsec.layers.erofs.data import BlobWriter
from dsec.layers.erofs.format import BLOCK
from dsec.layers.erofs.merge import drop_whiteouts, merge
from dsec.layers.erofs.reader import read
from dsec.layers.erofs.seal import seal
from dsec.layers.erofs.tree import Blob, Tree
from dsec.layers.erofs.writer import write
from dsec.layers.model import BlobRef
from dsec.layers.store import hash_file

_NO_UUID: Final = bytes(16)


class Assembled(msgspec.Struct, frozen=True):
    """The files of a layer that is not yet published."""

    image: Path
    digest: str
    blobs: list[BlobRef]
    new: dict[str, Path]
    """Blobs that are in no store yet, by digest."""
    inodes: int


class Assembly:
    """A layer in the making: fill `tree` with the help of `blob`, then `finish`. Close it in any case."""

    def __init__(self, staged: Path) -> None:
        self._staged = staged
        self.data: BinaryIO = (staged / "data").open("w+b")
        """What has been put into `blob`; all of it after `end_blob`."""
        self._spool: BinaryIO = (staged / "spool").open("w+b")
        self.tree = Tree(blobs=[Blob("", 0)], spools=[self._spool])
        """Its first blob is the one in the making; others may be added, of layers that are there."""
        self.blob = BlobWriter(self.data, self._spool)

    def end_blob(self) -> None:
        """Nothing is added any more; files can be read. Idempotent."""
        self.tree.blobs[0] = self.blob.finish()

    def finish(self, below: Sequence[str] = ()) -> Assembled:
        """below: digests of the layers that it is to stand on."""
        self.end_blob()
        new = {self.tree.blobs[0].digest: self._staged / "data"}
        return _finish(self.tree, self._staged, new, below)

    def close(self) -> None:
        self.data.close()
        self._spool.close()

    def __enter__(self) -> Assembly:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collapse(images: Sequence[Path], staged: Path, *, base: bool, below: Sequence[str] = ()) -> Assembled:
    """Layers, bottom to top, as one, of metadata alone: it refers to the blobs of all.

    base: nothing lies below, so that whiteouts have nothing to hide, and are left out.
    """
    files = [path.open("rb") for path in images]
    try:
        tree = read(files[0])
        for file in files[1:]:
            tree = merge(tree, read(file), keep_whiteouts=True)
        if base:
            drop_whiteouts(tree)
        return _finish(tree, staged, {}, below)
    finally:
        for file in files:
            file.close()


def _finish(tree: Tree, staged: Path, new: dict[str, Path], below: Sequence[str]) -> Assembled:
    image = staged / "image"
    with image.open("w+b") as out:
        stats = write(tree, out, uuid=_NO_UUID)
    # Distinct for what stands on different layers, and the same for the same: overlayfs tells layers by it.
    identity = hashlib.sha256(hash_file(image).encode())
    for digest in below:
        identity.update(digest.encode())
    seal(image, identity.digest()[:16])
    # What no file lies in (all were replaced by later entries) is not kept.
    used = [BlobRef(blob.digest, blob.blocks * BLOCK) for blob in stats.blobs]
    kept = {blob.digest for blob in used}
    for digest, path in new.items():
        if digest not in kept:
            os.unlink(path)
    return Assembled(image, hash_file(image), used, {d: p for d, p in new.items() if d in kept}, stats.inodes)
