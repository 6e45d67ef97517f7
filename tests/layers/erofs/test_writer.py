"""What is refused, and how well it is packed."""

from __future__ import annotations

import io
import random
import stat
from collections.abc import Callable

import pytest
from tests.layers.erofs.layers import LNK, REG, UUID, Maker, written

from dsec.core.errors import InvalidArgument, LayerCorrupt
from dsec.layers.erofs.format import BLOCK, MAX_SIZE
from dsec.layers.erofs.reader import read
from dsec.layers.erofs.tree import HOLE, Blob, Directory, Extent, File, Inode, Span, Special, Symlink, Tree
from dsec.layers.erofs.writer import write

BLOB = Blob("a" * 64, 100)


def tree_with(inode: Inode, name: bytes = b"bad") -> Tree:
    tree = Tree(blobs=[BLOB])
    tree.make_directories(b"d").children[name] = inode
    return tree


REFUSED: dict[str, Callable[[], Inode]] = {
    "an owner": lambda: File(REG, uid=1 << 32),
    "an owner -1": lambda: File(REG, uid=-1),
    "a time": lambda: File(REG, mtime_ns=1 << 100),
    "a mode": lambda: File(stat.S_IFDIR | 0o644),
    "a mode 300644": lambda: File(REG | 0o200000),
    "a symbolic link": lambda: Symlink(LNK, target=b"x" * 4096),
    "a symbolic link to 0": lambda: Symlink(LNK, target=b""),
    "with a NUL": lambda: Symlink(LNK, target=b"a\0b"),
    "a device number": lambda: Special(stat.S_IFBLK, rdev=1 << 63),
    "which EROFS does not hold": lambda: File(REG, xattrs={b"system.other": b""}),
    "an xattr b'user.'": lambda: File(REG, xattrs={b"user.": b""}),
    "an xattr b'user.nnn": lambda: File(REG, xattrs={b"user." + b"n" * 256: b""}),
    "an xattr b'system.posix_acl_access2'": lambda: File(REG, xattrs={b"system.posix_acl_access2": b""}),
    "more than 65535": lambda: File(REG, xattrs={b"user.a": bytes(65536)}),
    "xattrs of": lambda: File(REG, xattrs={b"user.%d" % i: bytes(65000) for i in range(5)}),
    "a size of 5": lambda: File(REG, size=5, tail=b"1234"),
    "a size of 8191": lambda: File(REG, size=8191, extents=(Extent(0, 0, 1),)),
    "a tail of 4095": lambda: File(REG, size=4095, tail=bytes(4095)),
    "and a tail of 1 ": lambda: File(REG, size=4097, extents=(Extent(HOLE, 0, 1),), tail=b"1"),
    "a size of 35": lambda: File(REG, size=2 * MAX_SIZE, extents=(Extent(HOLE, 0, 2 * MAX_SIZE // BLOCK),)),
    "100 blocks from 1 on": lambda: File(REG, size=100 * BLOCK, extents=(Extent(0, 1, 100),)),
    "1 blocks from -1 on": lambda: File(REG, size=BLOCK, extents=(Extent(0, -1, 1),)),
    "chunks": lambda: File(
        REG, size=MAX_SIZE, extents=(Extent(0, 5, 1), Extent(HOLE, 0, MAX_SIZE // BLOCK - 1))
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_with_its_path(why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as e:
        written(tree_with(REFUSED[why]()))
    assert "/d/bad" in e.value.message


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0", b"n" * 256])
def test_names_that_no_file_can_have_are_refused(name: bytes) -> None:
    with pytest.raises(InvalidArgument, match="a name"):
        written(tree_with(File(REG), name))
    tree = tree_with(File(REG), b"good")
    tree.root.children[name] = tree.make_directories(b"d").children[b"good"]
    with pytest.raises(InvalidArgument, match="a name"):
        written(tree)


def test_a_directory_has_one_name() -> None:
    tree = Tree()
    tree.root.children[b"self"] = tree.root
    with pytest.raises(InvalidArgument, match="two names"):
        written(tree)


def test_a_blob_that_is_not_listed_is_refused() -> None:
    tree = tree_with(File(REG, size=BLOCK, extents=(Extent(1, 0, 1),)))
    with pytest.raises(InvalidArgument, match="does not list"):
        written(tree)


def test_more_than_the_addresses_is_refused() -> None:
    tree = tree_with(File(REG, size=BLOCK, extents=(Extent(0, 0, 1),)))
    tree.blobs = [Blob("a" * 64, (1 << 32) - 2)]
    with pytest.raises(InvalidArgument, match="16 TiB"):
        written(tree)


def test_a_spool_that_was_cut_short() -> None:
    tree = tree_with(File(REG, size=500, tail=Span(0, 0, 500)))
    tree.spools = [io.BytesIO(bytes(499))]
    with pytest.raises(LayerCorrupt, match="spool"):
        written(tree)


@pytest.mark.parametrize("uuid", [b"", bytes(15), bytes(17)])
def test_a_uuid_has_sixteen_bytes(uuid: bytes) -> None:
    with pytest.raises(InvalidArgument, match="uuid"):
        write(Tree(), io.BytesIO(), uuid=uuid)


def test_two_thousand_deep() -> None:
    tree = Tree()
    tree.put(b"/".join([b"d"] * 2000) + b"/f", File(REG))
    assert read(io.BytesIO(written(tree))).lookup(b"/".join([b"d"] * 2000) + b"/f") is not None


def test_little_is_wasted() -> None:
    """Of what inodes and ends take, less than a twentieth more."""
    rng = random.Random(0)
    maker = Maker()
    sizes = [rng.randrange(3072) for _ in range(5000)]
    for number, size in enumerate(sizes):
        maker.file(b"%d/%d" % (number // 50, number), rng.randbytes(size))
    image = written(maker.done())
    entries = sum(12 + len(str(n)) for n in range(5000)) + 100 * (64 + 30)
    assert len(image) < 1.05 * (sum(sizes) + 5000 * 64 + entries)


def test_nothing_but_the_stats_tells_what_devices_there_are() -> None:
    tree = Tree(blobs=[Blob(c * 64, 10) for c in "abc"])
    tree.put(b"f", File(REG, size=BLOCK, extents=(Extent(2, 0, 1),)))
    tree.put(b"g", File(REG, size=BLOCK, extents=(Extent(0, 0, 1),)))
    stats = write(tree, io.BytesIO(), uuid=UUID)
    assert [b.digest[0] for b in stats.blobs] == ["a", "c"] and stats.inodes == 3
    assert isinstance(tree.root, Directory) and tree.root.nlink == 2


def test_the_root_is_found_behind_as_many_blobs_as_there_can_be() -> None:
    tree = Tree(blobs=[Blob(f"{n:064x}", 1000) for n in range(4096)])
    for number in range(4096):
        tree.put(b"%d" % number, File(REG, size=BLOCK, extents=(Extent(number, 999, 1),)))
    tree.root.xattrs = {b"user.a": bytes(60_000)}
    again = read(io.BytesIO(written(tree)))
    assert again.blobs == tree.blobs and again.root.xattrs == tree.root.xattrs
    last = again.lookup(b"4095")
    assert isinstance(last, File) and last.extents == (Extent(4095, 999, 1),)
    tree.blobs.append(Blob("f" * 64, 1))
    tree.put(b"more", File(REG, size=BLOCK, extents=(Extent(4096, 0, 1),)))
    with pytest.raises(InvalidArgument, match="4097 blobs"):
        written(tree)
