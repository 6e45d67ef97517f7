"""Several layers looked at as one, as an overlay would show them, without a mount."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import BinaryIO

from dsec.core.errors import LayerCorrupt, Unsupported
from dsec.layers.erofs.content import read_file
from dsec.layers.erofs.reader import read
from dsec.layers.erofs.tree import Directory, File, Inode, Tree, is_opaque, is_whiteout
from dsec.layers.model import Layer
from dsec.layers.store import LayerStore


class Stack:
    """Layers, bottom to top. Their metadata is read when it is first needed. To be closed."""

    def __init__(self, store: LayerStore, layers: Sequence[Layer]) -> None:
        self._store = store
        self._layers = layers[::-1]
        self._trees: list[Tree] = []
        self._held = contextlib.ExitStack()
        self._blobs: dict[str, BinaryIO] = {}
        self._owner: dict[int, Tree] = {}

    def lookup(self, path: bytes) -> Inode | None:
        """What has that path; no symbolic link is followed. Raises LayerCorrupt, OSError."""
        names = [name for name in path.split(b"/") if name]
        for number in range(len(self._layers)):
            found, hides = _walk(self._tree(number), names)
            if found is not None:
                if is_whiteout(found):
                    return None
                self._owner[id(found)] = self._tree(number)
                return found
            if hides:
                return None
        return None

    def owner(self, inode: Inode) -> Tree:
        """The tree that `lookup` found it in."""
        return self._owner[id(inode)]

    def content(self, file: File) -> Iterator[bytes]:
        """Of a file that `lookup` gave."""
        tree = self._owner[id(file)]
        layer = self._layers[self._trees.index(tree)]
        return read_file(tree, file, lambda number: self._blob(layer, tree.blobs[number].digest))

    def _tree(self, number: int) -> Tree:
        while len(self._trees) <= number:
            layer = self._layers[len(self._trees)]
            self._trees.append(read_layer(self._store, layer, self._held))
        return self._trees[number]

    def _blob(self, layer: Layer, digest: str) -> BinaryIO:
        if digest not in self._blobs:
            self._blobs[digest] = open_blob(self._store, layer, digest, self._held)
        return self._blobs[digest]

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def read_layer(store: LayerStore, layer: Layer, held: contextlib.ExitStack) -> Tree:
    """A layer's tree. A single image of mkfs.erofs is a blob of its own tree.

    Raises Unsupported for one that is compressed, LayerCorrupt.
    """
    file = held.enter_context(store.file(layer.digest).open("rb"))
    if not is_single(layer):
        return read(file)
    try:
        return read(file, digest=layer.digest)
    except LayerCorrupt as e:
        name = layer.name or layer.digest[:12]
        raise Unsupported(f"layer {name} is compressed, which is not read here: build it without") from e


def is_single(layer: Layer) -> bool:
    """Whether mkfs.erofs made it: its files lie in the image itself."""
    return layer.provenance.tool.startswith("mkfs.erofs")


def open_blob(store: LayerStore, layer: Layer, digest: str, held: contextlib.ExitStack) -> BinaryIO:
    """A blob of the layer's tree."""
    path = store.file(digest) if digest == layer.digest and is_single(layer) else store.blob(digest)
    return held.enter_context(path.open("rb"))


def _walk(tree: Tree, names: list[bytes]) -> tuple[Inode | None, bool]:
    """What a tree has of that path, and whether it hides what the trees below have of it."""
    here: Inode = tree.root
    hides = False
    for name in names:
        if not isinstance(here, Directory):
            return None, True
        hides = hides or is_opaque(here)
        child = here.children.get(name)
        if child is None:
            return None, hides
        if is_whiteout(child):
            return child, True
        here = child
    return here, hides
