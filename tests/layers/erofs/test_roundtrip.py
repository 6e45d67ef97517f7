"""What was written is what is read, for any tree; and the same tree gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import os
import random
import stat
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.layers.erofs.layers import Maker, Random, snapshot_tree, written

from dsec.layers.erofs.format import BLOCK, MAX_TAIL
from dsec.layers.erofs.reader import read
from dsec.layers.erofs.tree import HOLE, Blob, Directory, Extent, File, Inode, Special, Symlink, Tree

BLOBS = [Blob(hashlib.sha256(b"%d" % index).hexdigest(), 1 << 20) for index in range(3)]
NAMES = st.binary(min_size=1, max_size=40).map(lambda b: b.replace(b"/", b"_").replace(b"\0", b"_")).filter(
    lambda b: b not in (b".", b"..")
) | st.integers(0, 255).map(lambda n: b"n" * max(n, 1))
XATTR_NAMES = st.sampled_from([b"user.", b"trusted.", b"security."]).flatmap(
    lambda p: st.binary(min_size=1, max_size=30).map(lambda b: p + b.replace(b"\0", b"_"))
) | st.sampled_from([b"system.posix_acl_access", b"system.posix_acl_default"])
VALUES = st.binary(max_size=50) | st.integers(0, 65535).map(bytes)
COMMON = st.fixed_dictionaries(
    {
        "uid": st.integers(0, (1 << 32) - 1),
        "gid": st.integers(0, (1 << 32) - 1),
        "mtime_ns": st.integers(-(1 << 62), 1 << 66),
        "xattrs": st.none() | st.dictionaries(XATTR_NAMES, VALUES, min_size=1, max_size=4),
    }
)
MODES = st.integers(0, 0o7777)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    extents = tuple(draw(st.lists(_extents(), max_size=4)))
    blocks = sum(e.blocks for e in extents)
    flat = not extents or (len(extents) == 1 and extents[0].blob != HOLE)
    if flat and draw(st.booleans()):
        tail = draw(st.binary(min_size=1, max_size=100) | st.integers(1, MAX_TAIL).map(lambda n: b"t" * n))
        return {"extents": extents, "tail": tail, "size": blocks * BLOCK + len(tail)}
    return {"extents": extents, "size": blocks * BLOCK - draw(st.integers(0, BLOCK - 1)) if blocks else 0}


@st.composite
def _extents(draw: st.DrawFn) -> Extent:
    blob = draw(st.sampled_from([HOLE, 0, 1, 2]))
    blocks = draw(st.integers(1, 40) | st.sampled_from([64, 128, 1 << 11]))
    return Extent(blob, 0 if blob == HOLE else draw(st.integers(0, (1 << 20) - blocks)), blocks)


FILES = st.builds(lambda m, c, b: File(stat.S_IFREG | m, **c, **b), MODES, COMMON, bodies())
TARGETS = st.binary(min_size=1, max_size=99).map(lambda b: b.replace(b"\0", b"_")) | st.integers(1, 4095).map(
    lambda n: b"t" * n
)
LINKS = st.builds(lambda c, t: Symlink(stat.S_IFLNK | 0o777, **c, target=t), COMMON, TARGETS)
DEVICES = st.builds(
    lambda k, m, c, a, b: Special(k | m, **c, rdev=os.makedev(a, b)),
    st.sampled_from([stat.S_IFCHR, stat.S_IFBLK]),
    MODES,
    COMMON,
    st.integers(0, 4095),
    st.integers(0, (1 << 20) - 1),
)
PIPES = st.builds(lambda k, c: Special(k, **c), st.sampled_from([stat.S_IFIFO, stat.S_IFSOCK]), COMMON)


def _directory(mode: int, common: dict[str, Any], children: dict[bytes, Inode]) -> Directory:
    made = Directory(stat.S_IFDIR | mode, **common)
    made.children.update(children)
    return made


NODES: st.SearchStrategy[Inode] = st.recursive(
    FILES | LINKS | DEVICES | PIPES,
    lambda below: st.builds(_directory, MODES, COMMON, st.dictionaries(NAMES, below, max_size=8)),
    max_leaves=25,
)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree = Tree(blobs=list(BLOBS))
    tree.root = _directory(draw(MODES), draw(COMMON), draw(st.dictionaries(NAMES, NODES, max_size=12)))
    files = [i for i in tree.inodes() if not isinstance(i, Directory)]
    if files:
        for name, place in draw(st.dictionaries(NAMES, st.integers(0, 1 << 30), max_size=3)).items():
            tree.root.children.setdefault(name, files[place % len(files)])
    return tree


def described(tree: Tree) -> dict[bytes, tuple[object, ...]]:
    """By path, with everything but places in the image; extents one block at a time."""
    tree.count_links()
    found: dict[bytes, tuple[object, ...]] = {}
    paths: dict[int, bytes] = {}
    waiting: list[tuple[bytes, Inode]] = [(b"", tree.root)]
    while waiting:
        path, inode = waiting.pop()
        same = paths.setdefault(id(inode), path)
        common = (inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.nlink, inode.xattrs or {}, same)
        found[path] = (*common, _body(tree, inode))
        if isinstance(inode, Directory):
            waiting += sorted((path + b"/" + name, child) for name, child in inode.children.items())
    return found


def _body(tree: Tree, inode: Inode) -> object:
    if isinstance(inode, File):
        return inode.size, _plain(tree, inode.extents), tree.read_tail(inode.tail)
    return getattr(inode, "target", None) or getattr(inode, "rdev", None)


def _plain(tree: Tree, extents: tuple[Extent, ...]) -> list[tuple[object, ...]]:
    """As few as they can be, by the names of blobs."""
    runs: list[list[Any]] = []
    for blob, start, blocks in extents:
        name = "hole" if blob == HOLE else tree.blobs[blob].digest
        if runs and runs[-1][0] == name and (blob == HOLE or runs[-1][1] + runs[-1][2] == start):
            runs[-1][2] += blocks
        else:
            runs.append([name, start, blocks])
    return [tuple(run) for run in runs]


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees())
def test_what_was_written_is_read(tree: Tree) -> None:
    image = written(tree)
    again = read(io.BytesIO(image))
    assert described(again) == described(tree)
    assert written(again) == image


def test_the_order_in_which_a_tree_was_made_does_not_matter() -> None:
    paths = [b"%d/%d" % (a, b) for a in range(30) for b in range(30)]
    images = set()
    for seed in range(3):
        random.Random(seed).shuffle(paths)
        tree = Tree()
        for path in paths:
            xattrs = dict(random.Random(seed).sample([(b"user.%d" % n, path) for n in range(9)], 9))
            tree.put(path, File(stat.S_IFREG, size=len(path), tail=path, xattrs=xattrs))
        tree.root.children = dict(random.Random(seed).sample(sorted(tree.root.children.items()), 30))
        images.add(written(tree))
    assert len(images) == 1


def test_layers_with_content() -> None:
    for seed in range(20):
        maker = Random(seed, overlay=True).layer(100)
        maker.done()
        blobs = {maker.writer.finish().digest: maker.blob.getvalue()}
        again = read(io.BytesIO(written(maker.tree)))
        assert snapshot_tree(again, blobs) == snapshot_tree(maker.tree, blobs)


def test_the_uuid_and_nothing_else_tells_two_images_of_a_tree_apart() -> None:
    maker = Maker()
    maker.file(b"f", b"x" * 5000)
    assert written(maker.done()) == written(maker.tree)
