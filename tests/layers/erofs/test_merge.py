"""Merged layers are what an overlay of them shows."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tests.layers.erofs.layers import (
    UUID,
    Maker,
    Random,
    Snapshot,
    overlay,
    save,
    snapshot_directory,
    snapshot_tree,
)

from dsec.core.errors import InvalidArgument
from dsec.layers.erofs.merge import drop_whiteouts, merge
from dsec.layers.erofs.reader import read
from dsec.layers.erofs.tree import OPAQUE, Blob, Directory, File, Span, Tree, is_whiteout


def merged(*makers: Maker, keep: bool = False) -> Tree:
    tree = Tree()
    for maker in makers:
        tree = merge(tree, maker.done(), keep_whiteouts=keep)
    return tree


def names(tree: Tree) -> set[bytes]:
    return set(snapshot_tree(tree, {})) - {b""}


def layer(**entries: str) -> Maker:
    """Of empty files, but for `dir`, `opaque` and `hide`; `_` in a name stands for a slash."""
    maker = Maker()
    for name, kind in entries.items():
        path = name.replace("_", "/").encode()
        if kind in ("dir", "opaque"):
            maker.directory(path, opaque=kind == "opaque")
        elif kind == "hide":
            maker.whiteout(path)
        else:
            maker.file(path, kind.encode())
    return maker


def test_a_whiteout_hides_and_is_gone() -> None:
    assert names(merged(layer(a="1", b="1"), layer(a="hide", c="hide"))) == {b"/b"}


def test_a_whiteout_that_is_kept_hides_in_what_lies_below() -> None:
    tree = merged(layer(a="1"), layer(a="hide", b="hide"), keep=True)
    assert all(is_whiteout(child) for child in tree.root.children.values())
    assert names(merge(layer(a="1", b="2", c="3").done(), tree, keep_whiteouts=False)) == {b"/c"}


def test_an_opaque_directory_hides_all_that_was_in_it() -> None:
    tree = merged(layer(d_a="1", e="1"), layer(d="opaque", d_b="2"))
    assert names(tree) == {b"/d", b"/d/b", b"/e"} and OPAQUE not in (tree.root.children[b"d"].xattrs or {})


@pytest.mark.parametrize("between", ["hide", "a file"])
def test_a_directory_over_what_is_none_stays_opaque(between: str) -> None:
    """The layers in between were merged before the lowest was known."""
    tree = merged(layer(d=between), layer(d_new="2"), keep=True)
    assert names(merge(layer(d_old="1").done(), tree, keep_whiteouts=False)) == {b"/d", b"/d/new"}


def test_an_opaque_directory_stays_so_under_a_plain_one() -> None:
    tree = merged(layer(d="opaque", d_a="1"), layer(d_b="2"), keep=True)
    assert names(merge(layer(d_old="1").done(), tree, keep_whiteouts=False)) == {b"/d", b"/d/a", b"/d/b"}


def test_whiteouts_in_a_directory_of_the_upper_alone_are_dropped() -> None:
    assert names(merged(layer(a="1"), layer(d_e_x="hide", d_f="2"))) == {b"/a", b"/d", b"/d/e", b"/d/f"}


def test_blobs_are_listed_once() -> None:
    lower = Tree(blobs=[Blob("1" * 64, 5), Blob("2" * 64, 5)])
    upper = Tree(blobs=[Blob("2" * 64, 5), Blob("3" * 64, 5)])
    maker = Maker()
    made = [maker.file(b"x%d" % i, bytes(range(256)) * 16) for i in range(2)]
    for blob, file in enumerate(made):
        file.extents = (file.extents[0]._replace(blob=blob),)
        upper.put(b"f%d" % blob, file)
    upper.link(b"f0", b"again")
    tree = merge(lower, upper, keep_whiteouts=True)
    assert [b.digest[0] for b in tree.blobs] == ["1", "2", "3"]
    assert [f.extents[0].blob for f in made] == [1, 2]


def test_ends_of_files_are_found_in_the_right_spool() -> None:
    lower, upper = Maker(), Maker()
    lower.file(b"l", b"l" * 100)
    upper.file(b"u", b"u" * 100)
    upper.tree.link(b"u", b"u2")
    tree = merged(lower, upper)
    tails = [f.tail for f in tree.root.children.values() if isinstance(f, File)]
    assert all(isinstance(tail, Span) for tail in tails)
    assert [tree.read_tail(tail)[:1] for tail in tails] == [b"l", b"u", b"u"]


@pytest.mark.parametrize("name", [b"trusted.overlay.redirect", b"trusted.overlay.metacopy"])
def test_what_refers_to_other_places_below_is_refused(name: bytes) -> None:
    upper = Maker()
    upper.directory(b"d", xattrs={name: b"/elsewhere"})
    with pytest.raises(InvalidArgument, match="redirect_dir=off"):
        merged(Maker(), upper)


def test_dropping_whiteouts_changes_no_shared_xattrs() -> None:
    shared = {OPAQUE: b"y", b"user.a": b"1"}
    tree = Tree()
    tree.make_directories(b"d").xattrs = shared
    file = Maker().file(b"f", b"")
    file.xattrs = shared
    tree.put(b"f", file)
    drop_whiteouts(tree)
    assert tree.root.children[b"d"].xattrs == {b"user.a": b"1"} and shared[OPAQUE] == b"y"


def seen(snapshot: Snapshot) -> Snapshot:
    """Without an overlay's own xattrs, and without the link counts of directories, which it does not tell."""
    kept = {}
    for path, (entry, first) in snapshot.items():
        xattrs = tuple((k, v) for k, v in entry.xattrs if not k.startswith(b"trusted.overlay."))
        nlink = 0 if stat.S_ISDIR(entry.mode) else entry.nlink
        kept[path] = (entry._replace(xattrs=xattrs, nlink=nlink), first)
    return kept


def without_links(snapshot: Snapshot) -> Snapshot:
    """A name that was hidden is still counted by the kernel, and no longer by us."""
    return {path: (entry._replace(nlink=0), first) for path, (entry, first) in snapshot.items()}


@pytest.mark.kernel
@pytest.mark.parametrize("seed", range(60))
def test_the_same_as_an_overlay(tmp_path: Path, seed: int) -> None:
    makers = [Random(seed * 10 + i, overlay=True).layer(40) for i in range(2 + seed % 3)]
    with overlay(tmp_path, makers) as root:
        expected = without_links(seen(snapshot_directory(root)))
    blobs = {maker.writer.finish().digest: maker.blob.getvalue() for maker in makers}
    tree = _in_some_order(makers, seed)
    assert without_links(seen(snapshot_tree(tree, blobs))) == expected
    for digest, data in blobs.items():
        (tmp_path / digest).write_bytes(data)
    saved = save(tree, tmp_path, tmp_path / "meta")
    with saved.mounted(tmp_path / "merged") as root:
        assert without_links(seen(snapshot_directory(root))) == expected


def _in_some_order(makers: list[Maker], seed: int) -> Tree:
    """From below, or from above, which must come to the same."""
    trees = [maker.tree for maker in makers]
    if seed % 2:
        tree = trees[0]
        for upper in trees[1:]:
            tree = merge(tree, upper, keep_whiteouts=True)
    else:
        tree = trees[-1]
        for lower in reversed(trees[:-1]):
            tree = merge(lower, tree, keep_whiteouts=True)
    drop_whiteouts(tree)
    return tree


@pytest.mark.kernel
def test_metas_alone_are_merged(tmp_path: Path) -> None:
    """Read from disk, merged, written: the blobs are never opened."""
    makers = [Random(seed, overlay=True).layer(40) for seed in (1, 2)]
    saved = [maker.save(tmp_path / str(index)) for index, maker in enumerate(makers)]
    with saved[0].meta.open("rb") as lower, saved[1].meta.open("rb") as upper:
        tree = merge(read(lower), read(upper), keep_whiteouts=False)
        collapsed = save(tree, tmp_path, tmp_path / "meta")
    direct = merge(makers[0].tree, makers[1].tree, keep_whiteouts=False)
    assert (tmp_path / "meta").read_bytes() == save(direct, tmp_path, tmp_path / "meta2").meta.read_bytes()
    assert collapsed.stats.inodes > 10 and UUID in (tmp_path / "meta").read_bytes()[:4096]
    assert isinstance(tree.root, Directory)
