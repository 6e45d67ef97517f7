"""What the kernel shows of the images that we write."""

from __future__ import annotations

import os
import random
import stat
import struct
import subprocess
from pathlib import Path

import pytest
from tests.layers.erofs.layers import (
    Maker,
    Random,
    Saved,
    overlay,
    save,
    snapshot_directory,
    snapshot_tree,
)

from dsec.layers.erofs.merge import merge
from dsec.layers.erofs.reader import read
from dsec.layers.erofs.tree import Tree
from dsec.linux import syscalls

pytestmark = pytest.mark.kernel
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in [
        (1, 7, 0xFFFFFFFF),
        (2, 4, 1000),
        (4, 5, 0xFFFFFFFF),
        (0x10, 5, 0xFFFFFFFF),
        (0x20, 0, 0xFFFFFFFF),
    ]
)


def blobs_of(*makers: Maker) -> dict[str, bytes]:
    return {maker.writer.finish().digest: maker.blob.getvalue() for maker in makers}


def same(maker: Maker, saved: Saved, where: Path) -> None:
    expected = snapshot_tree(maker.tree, blobs_of(maker))
    with saved.mounted(where):
        assert snapshot_directory(where) == expected


def check(saved: Saved) -> None:
    """With the tools of others, as far as they go: they do not look for flat files in other devices."""
    devices = [f"--device={blob}" for blob in saved.blobs]
    done = subprocess.run(
        ["fsck.erofs", *devices, str(saved.meta)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "<E>" not in done.stderr, done


def everything() -> Maker:
    rng = random.Random(0)
    maker = Maker()
    maker.directory(
        b"", mode=stat.S_IFDIR | 0o1755, uid=70_000, gid=80_000, mtime_ns=1_700_000_000_000_000_001
    )
    maker.file(b"empty")
    maker.file(b"small", b"hello", mtime_ns=123_456_789_012_345_678, uid=4_000_000_000, gid=65_536)
    maker.file(b"tail", rng.randbytes(5 * 4096 + 100))
    maker.file(b"padded", rng.randbytes(5 * 4096 + 4000))
    maker.file(b"whole", rng.randbytes(8192), mode=stat.S_IFREG | 0o6755)
    for size in (1, 63, 64, 65, 3071, 3072, 3073, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1):
        maker.file(b"size/%d" % size, rng.randbytes(size))
    sparse = bytearray(3_000_000)
    sparse[1_000_000:1_000_100] = rng.randbytes(100)
    sparse[-10:] = rng.randbytes(10)
    maker.file(b"sparse", bytes(sparse))
    maker.file(b"sparse map", bytes(sparse), runs=[(1_000_000, 100), (2_999_990, 10)])
    maker.file(b"all holes", bytes(1_000_001), runs=[])
    maker.file(b"hole first", bytes(1 << 17) + rng.randbytes(200_000))
    maker.file(b"hole last", rng.randbytes(1 << 17) + bytes(1 << 17))
    maker.symlink(b"links/long", b"t" * 4095)
    maker.symlink(b"links/short", b"\xff/..", uid=7)
    maker.symlink(b"links/with xattrs", b"y" * 3900, xattrs={b"trusted.x": b"1" * 300})
    maker.special(b"dev/char", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    maker.special(b"dev/block", stat.S_IFBLK | 0o660, os.makedev(4095, (1 << 20) - 1))
    maker.special(b"dev/fifo", stat.S_IFIFO | 0o600, mtime_ns=-1)
    maker.special(b"dev/socket", stat.S_IFSOCK | 0o600)
    maker.special(b"dev/whiteout", stat.S_IFCHR)
    for name in (b"n" * 255, bytes(range(1, 47)), bytes(range(48, 256)), b"\xff", b" ", b"..."):
        maker.file(b"names/" + name, name)
        maker.directory(b"directories/" + name)
    maker.file(b"xattrs/many", b"x" * 3000, xattrs={b"user.%d" % i: b"v" * i for i in range(300)})
    maker.file(b"xattrs/long", b"y" * 3071, xattrs={b"user." + b"n" * 250: rng.randbytes(65_000)})
    maker.file(b"xattrs/odd", b"z" * 3072, xattrs={b"user.a": b"\0\n", b"trusted.overlay.opaque": b"y"})
    maker.file(b"xattrs/sparse", bytes(1 << 20) + b"1", xattrs={b"user.a": b"1", b"security.x": b"2"})
    maker.file(b"xattrs/capability", b"#!", xattrs={b"security.capability": CAPABILITY})
    maker.file(b"xattrs/acl", b"", mode=stat.S_IFREG | 0o750, xattrs={b"system.posix_acl_access": ACL})
    maker.directory(b"xattrs/acls", mode=stat.S_IFDIR | 0o755, xattrs={b"system.posix_acl_default": ACL})
    for path in (b"hard", b"size/hard", b"names/hard"):
        maker.tree.link(b"tail", path)
    maker.tree.link(b"links/short", b"links/again")
    return maker


def test_all_that_a_layer_can_hold(tmp_path: Path) -> None:
    maker = everything()
    saved = maker.save(tmp_path / "layer")
    check(saved)
    same(maker, saved, tmp_path / "mnt")


def test_holes_are_not_stored(tmp_path: Path) -> None:
    maker = Maker()
    maker.file(b"f", bytes(1 << 24) + b"1", runs=[(1 << 24, 1)])
    saved = maker.save(tmp_path / "layer")
    assert saved.blobs[0].stat().st_size == 4096
    same(maker, saved, tmp_path / "mnt")


def test_an_empty_layer(tmp_path: Path) -> None:
    maker = Maker()
    saved = maker.save(tmp_path / "layer")
    assert saved.meta.stat().st_size == 4096 and not saved.blobs
    check(saved)
    same(maker, saved, tmp_path / "mnt")


def test_a_directory_of_a_hundred_thousand(tmp_path: Path) -> None:
    maker = Maker()
    for number in range(100_000):
        maker.tree.root.children[b"entry-%d" % number] = maker.tree.root.children.get(
            b"entry-0"
        ) or maker.file(b"entry-0", b"x")
    saved = maker.save(tmp_path / "layer")
    check(saved)
    with saved.mounted(tmp_path / "mnt") as root:
        assert sorted(os.listdir(root)) == sorted(f"entry-{n}" for n in range(100_000))
        assert (root / "entry-0").stat().st_nlink == 100_000
        for number in (0, 1, 9, 99_999, 50_000):
            assert (root / f"entry-{number}").read_text() == "x"
        assert not (root / "entry-100000").exists()


def test_several_blobs(tmp_path: Path) -> None:
    """A file from each of five, some of them unused, some through an index of chunks."""
    tree = Tree()
    rng = random.Random(2)
    content = {}
    for index in range(5):
        maker = Maker()
        name = b"f%d" % index
        data = rng.randbytes(200_000) + (bytes(200_000) if index % 2 else b"") + b"end" * 1000
        maker.file(name, data)
        maker.file(b"gone%d" % index, rng.randbytes(10_000))
        maker.save(tmp_path / "blobs")
        tree = merge(tree, maker.tree, keep_whiteouts=True)
        content[name.decode()] = data
    tree.remove(b"f3")
    for index in range(5):
        tree.remove(b"gone%d" % index)
    saved = save(tree, tmp_path / "blobs", tmp_path / "meta")
    assert len(saved.blobs) == 4
    with saved.mounted(tmp_path / "mnt") as root:
        assert {p.name: p.read_bytes() for p in root.iterdir()} == {
            k: content[k] for k in sorted(content) if k != "f3"
        }


def test_more_blobs_than_fit_in_the_options_of_mount(tmp_path: Path) -> None:
    """mount(2) takes a page of options. The newer calls take one option at a time."""
    tree = Tree()
    for index in range(300):
        maker = Maker()
        maker.file(b"f%d" % index, b"%04d" % index * 2048)
        maker.save(tmp_path / "blobs")
        tree = merge(tree, maker.tree, keep_whiteouts=True)
    saved = save(tree, tmp_path / "blobs", tmp_path / "meta")
    root = tmp_path / "mnt"
    root.mkdir()
    attach(saved, root)
    try:
        assert all((root / f"f{n}").read_bytes() == b"%04d" % n * 2048 for n in range(300))
    finally:
        syscalls.umount2(root)


def attach(saved: Saved, where: Path) -> None:
    context = syscalls.fsopen("erofs")
    try:
        syscalls.fsconfig_string(context, "source", str(saved.meta))
        for blob in saved.blobs:
            syscalls.fsconfig_string(context, "device", str(blob))
        syscalls.fsconfig_flag(context, "ro")
        syscalls.fsconfig_create(context, "mounting")
        mount = syscalls.fsmount(context, syscalls.MOUNT_ATTR_RDONLY)
    finally:
        os.close(context)
    try:
        syscalls.move_mount(mount, where)
    finally:
        os.close(mount)


@pytest.mark.parametrize("seed", range(40))
def test_random_layers(tmp_path: Path, seed: int) -> None:
    maker = Random(seed, overlay=False).layer(60)
    saved = maker.save(tmp_path / "layer")
    check(saved)
    same(maker, saved, tmp_path / "mnt")


def test_what_was_read_and_written_again_is_the_same(tmp_path: Path) -> None:
    maker = everything()
    saved = maker.save(tmp_path / "layer")
    with saved.meta.open("rb") as file:
        again = save(read(file), tmp_path / "layer", tmp_path / "again")
    assert again.meta.read_bytes() == saved.meta.read_bytes()


def test_in_an_overlay(tmp_path: Path) -> None:
    lower, upper = Maker(), Maker()
    lower.file(b"d/hidden", b"1")
    lower.file(b"d/seen", b"1" * 10_000)
    lower.file(b"o/hidden", b"1")
    upper.whiteout(b"d/hidden")
    upper.directory(b"o", opaque=True)
    upper.file(b"o/new", b"2")
    with overlay(tmp_path, [lower, upper]) as root:
        assert sorted(os.listdir(root / "d")) == ["seen"] and os.listdir(root / "o") == ["new"]
        assert (root / "d" / "seen").read_bytes() == b"1" * 10_000


def test_small_files_as_the_tools_of_others_see_them(tmp_path: Path) -> None:
    """fsck.erofs reads them all, and writes them out again."""
    maker = Maker()
    rng = random.Random(5)
    for number in range(300):
        maker.file(b"%d/%d" % (number % 7, number), rng.randbytes(rng.randrange(3000)), mtime_ns=5 * 10**9)
    maker.symlink(b"link", b"t" * 4000)
    saved = maker.save(tmp_path / "layer")
    out = tmp_path / "out"
    subprocess.run(
        ["fsck.erofs", f"--extract={out}", saved.meta], check=True, capture_output=True, timeout=60
    )
    expected = snapshot_tree(maker.tree, {})
    found = snapshot_directory(out)
    assert {p: e.content for p, (e, _) in found.items()} == {p: e.content for p, (e, _) in expected.items()}
