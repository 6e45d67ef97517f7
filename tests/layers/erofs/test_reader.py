"""Images that are damaged or hostile give LayerCorrupt, and nothing else."""

from __future__ import annotations

import hashlib
import io
import os
import random
import struct
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.layers.erofs.layers import Maker, Random, Saved, save, snapshot_directory, snapshot_tree, written

from dsec.core.errors import LayerCorrupt
from dsec.layers.erofs.format import BLOCK, CHECKSUM, CHECKSUM_OFFSET, EXTENDED, SUPER_OFFSET, checksum
from dsec.layers.erofs.reader import Limits, read
from dsec.layers.erofs.tree import Tree

U16, U32, U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")


def sample() -> Tree:
    maker = Maker()
    maker.file(b"a", b"a" * 100, xattrs={b"user.x": b"y"})
    maker.file(b"b", b"b" * 9000)
    maker.file(b"d/c", bytes(1 << 17) + b"c" * 100_000)
    maker.symlink(b"l", b"t" * 4090, xattrs={b"trusted.a": b"1", b"trusted.b": b"1"})
    maker.tree.link(b"a", b"a2")
    for number in range(400):
        maker.tree.put(b"big/entry%d" % number, maker.tree.root.children[b"b"])
    return maker.done()


class Patient:
    """An image to be damaged here and there; its checksum is mended afterwards."""

    def __init__(self) -> None:
        self.tree = sample()
        self.data = bytearray(written(self.tree))

    def at(self, path: bytes) -> int:
        inode = self.tree.lookup(path)
        assert inode is not None
        return inode.nid * 32

    def put(self, offset: int, form: struct.Struct, value: int) -> None:
        form.pack_into(self.data, offset, value)

    def read(self) -> Tree:
        block = self.data[:BLOCK]
        CHECKSUM.pack_into(self.data, SUPER_OFFSET + CHECKSUM_OFFSET, checksum(block))
        return read(io.BytesIO(self.data))


INODE = {"format": 0, "count": 2, "mode": 4, "size": 8, "u": 16, "ns": 40, "nlink": 44}


def inode(path: bytes, field: str, value: int, form: struct.Struct = U16) -> Callable[[Patient], None]:
    return lambda p: p.put(p.at(path) + INODE[field], form, value)


def xattr(path: bytes, entry: int, offset: int, value: int) -> Callable[[Patient], None]:
    """A byte of the entry that begins at `entry` behind the header."""
    return lambda p: p.put(p.at(path) + EXTENDED.size + 12 + entry + offset, struct.Struct("<B"), value)


def super_(offset: int, value: int, form: struct.Struct = U32) -> Callable[[Patient], None]:
    return lambda p: p.put(SUPER_OFFSET + offset, form, value)


def name(old: bytes, new: bytes) -> Callable[[Patient], None]:
    """The name of an entry of the root, of which each appears once."""

    def damage(p: Patient) -> None:
        at = p.data.index(b"...aa2bbigdl", p.at(b"")) + 3
        assert p.data[at + old[0] : at + old[0] + len(new)]
        p.data[at + old[0] : at + old[0] + len(new)] = new

    return damage


def dirent(number: int, field: int, value: int, form: struct.Struct) -> Callable[[Patient], None]:
    return lambda p: p.put(p.at(b"") + EXTENDED.size + number * 12 + field, form, value)


def same_as(number: int, path: bytes) -> Callable[[Patient], None]:
    return lambda p: p.put(p.at(b"") + EXTENDED.size + number * 12, U64, p.at(path) // 32)


DAMAGE: list[tuple[str, Callable[[Patient], None]]] = [
    ("no EROFS", super_(0, 1)),
    ("blocks of 2048", super_(12, 11, struct.Struct("<B"))),
    ("features 0xc that are not|extra", super_(13, 1, struct.Struct("<B"))),
    ("features", super_(80, 0x2)),
    ("blocks, which it does not have", super_(36, 1 << 30)),
    ("blocks, which it does not have", super_(32, 10**9)),
    ("inodes, of which it says", super_(16, 5, U64)),
    ("beyond its end", super_(40, 1 << 30)),
    ("60000 blobs", super_(86, 60000, U16)),
    ("beyond its end", super_(88, 60000, U16)),
    ("a blob without a digest", super_(128, 5, struct.Struct("<B"))),
    ("blobs that lie over", super_(128 + 68, 1)),
    ("a format", inode(b"a", "format", 3)),
    ("a format", inode(b"a", "format", 0x25)),
    ("an xattr", inode(b"a", "count", 2)),
    ("where prefix 2 has none", xattr(b"a", 0, 1, 2)),
    ("where prefix 1 has none", xattr(b"a", 0, 0, 0)),
    ("prefix 9", xattr(b"a", 0, 1, 9)),
    ("that it has twice", xattr(b"l", 8, 4, ord("a"))),
    ("over each other", inode(b"a", "count", 60000)),
    ("a mode", inode(b"a", "mode", 0o44)),
    ("a type 1 in the directory", inode(b"a", "mode", 0o40644)),
    ("a size of", inode(b"a", "size", 1 << 62, U64)),
    ("a size of", inode(b"a", "ns", 10**9, U32)),
    ("0 links", inode(b"a", "nlink", 0, U32)),
    ("as many names", inode(b"a", "nlink", 3, U32)),
    ("as many names", inode(b"b", "nlink", 400, U32)),
    ("a second time", inode(b"a", "nlink", 1, U32)),
    ("which no blob has", inode(b"b", "u", 0, U32)),
    ("of blob 0, which it does not have", inode(b"b", "u", 1 << 20, U32)),
    ("do not lie in one block", inode(b"b", "size", 9000 + 3000, U64)),
    ("chunks of a form", inode(b"d/c", "u", 0x60, U32)),
    ("chunks", inode(b"d/c", "size", 1 << 43, U64)),
    ("chunks, which only files", inode(b"big", "format", 9)),
    ("a symbolic link to", inode(b"l", "size", 5000, U64)),
    ("a symbolic link to 0", inode(b"l", "size", 0, U64)),
    ("a symbolic link with a NUL", inode(b"l", "size", 4095, U64)),
    ("which it does not have", inode(b"l", "u", 1 << 31, U32)),
    ("ends early|second time", inode(b"d", "size", 5, U64)),
    ("without '.' or '..'", inode(b"d", "nlink", 3, U32)),
    ("out of order", name(b"\x00", b"z")),
    ("no file can have", name(b"\x03", b"/")),
    ("it should be the directory", dirent(0, 0, 99, U64)),
    ("it should be the directory", dirent(1, 10, 1, struct.Struct("<B"))),
    ("whose names begin at", dirent(0, 8, 13, U16)),
    ("whose names begin at", dirent(0, 8, 0, U16)),
    ("whose names begin at", dirent(0, 8, 0xFFF0, U16)),
    ("empty, or among", dirent(3, 8, 0, U16)),
    ("a type 2 in the directory", dirent(2, 10, 2, struct.Struct("<B"))),
    ("a second time", same_as(6, b"")),
    ("a second time", same_as(6, b"big")),
    ("beyond its end", dirent(2, 0, 1 << 60, U64)),
]


@pytest.mark.parametrize(("why", "damage"), DAMAGE, ids=[f"{n}-{why}" for n, (why, _) in enumerate(DAMAGE)])
def test_damage_is_named(why: str, damage: Callable[[Patient], None]) -> None:
    patient = Patient()
    patient.read()
    damage(patient)
    with pytest.raises(LayerCorrupt, match=why):
        patient.read()


def test_the_first_block_has_a_checksum() -> None:
    patient = Patient()
    patient.data[2000] ^= 1
    with pytest.raises(LayerCorrupt, match="checksum"):
        read(io.BytesIO(patient.data))


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1100, 4095, 4096, 8192, -4096, -1])
def test_cut_short(size: int) -> None:
    data = Patient().data
    with pytest.raises(LayerCorrupt):
        read(io.BytesIO(data[:size]))


def test_limits() -> None:
    image = written(sample())
    with pytest.raises(LayerCorrupt, match="more than 5 inodes"):
        read(io.BytesIO(image), limits=Limits(inodes=5))
    with pytest.raises(LayerCorrupt, match="deep"):
        read(io.BytesIO(image), limits=Limits(depth=0))


def test_an_image_that_means_the_same_bytes_many_times_ends() -> None:
    """A thousand directories, each of which says that all of the image is its entries."""
    tree = Tree()
    for number in range(1000):
        tree.make_directories(b"d%d" % number)
    for number in range(100_000):
        tree.put(b"d0/%06d" % number, tree.lookup(b"d0/000000") or Maker().file(b"f"))
    data = bytearray(written(tree))
    first = tree.make_directories(b"d0").nid * 32
    for number in range(1, 1000):
        at = tree.make_directories(b"d%d" % number).nid * 32
        data[at + 8 : at + 20] = data[first + 8 : first + 20]
        data[at : at + 2] = data[first : first + 2]
    started = time.process_time()
    with pytest.raises(LayerCorrupt):
        read(io.BytesIO(data))
    assert time.process_time() - started < 2


def attempt(data: bytes | bytearray) -> bool:
    """Whether it was taken for an image; whatever else is raised fails the test."""
    try:
        tree = read(io.BytesIO(data))
        for child in tree.inodes():
            tree.read_tail(getattr(child, "tail", b""))
    except LayerCorrupt:
        return False
    return True


def mended(data: bytearray) -> bytearray:
    if len(data) >= BLOCK:
        CHECKSUM.pack_into(data, SUPER_OFFSET + CHECKSUM_OFFSET, checksum(data[:BLOCK]))
    return data


BASES = [written(Random(seed, overlay=True).layer(40).done()) for seed in (3, 4)] + [written(sample())]
SPECIAL = [0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0xFFFFFFFF, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]


def mutate(rng: random.Random, data: bytearray) -> bytearray:
    used = [at for at in range(0, len(data), 32) if any(data[at : at + 32])]
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        at = rng.choice(used) + rng.randrange(32)
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            size = rng.choice([1, 2, 4, 8])
            data[at : at + size] = (rng.choice(SPECIAL) & (1 << 8 * size) - 1).to_bytes(size, "little")
        elif kind == 2:
            data[at] ^= 1 << rng.randrange(8)
        else:
            source = rng.choice(used)
            size = rng.choice([8, 32, 64])
            data[at : at + size] = data[source : source + size]
    return data[: rng.choice([len(data)] * 9 + [rng.randrange(len(data))])]


def test_mutated_images() -> None:
    """Some seconds of it; DSEC_FUZZ_S has it run for longer."""
    deadline = time.monotonic() + float(os.environ.get("DSEC_FUZZ_S", "4"))
    taken = refused = seed = 0
    tracemalloc.start()
    while time.monotonic() < deadline:
        seed += 1
        rng = random.Random(seed)
        if attempt(mended(mutate(rng, bytearray(rng.choice(BASES))))):
            taken += 1
        else:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken and refused and peak < 64 << 20, (taken, refused, peak)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=6000), st.integers(0, 5000))
def test_any_bytes(data: bytes, at: int) -> None:
    attempt(data)
    image = bytearray(BASES[0])
    image[at : at + len(data)] = data
    attempt(mended(image))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Something for mkfs.erofs."""
    top = tmp_path / "source"
    (top / "d" / "e").mkdir(parents=True)
    rng = random.Random(0)
    for size in (0, 1, 500, 4000, 4096, 5000, 100_000, 300_001):
        (top / f"f{size}").write_bytes(rng.randbytes(size))
    (top / "zeros").write_bytes(bytes(200_000))
    os.link(top / "f500", top / "d" / "hard")
    (top / "d" / "link").symlink_to("../f1")
    (top / "d" / "long").symlink_to("x" * 3000)
    for number in range(600):
        (top / "d" / "e" / f"entry {number}").write_bytes(b"%d" % number)
        os.setxattr(top / "d" / "e" / f"entry {number}", "user.same", b"v" * 20)
    os.setxattr(top / "f1", "user.own", b"1")
    os.mkfifo(top / "fifo")
    os.utime(top / "f1", ns=(5, 1_234_567_890_123_456_789))
    os.chown(top / "f1", 70_000, 5)
    return top


@pytest.mark.kernel
@pytest.mark.parametrize("options", [[], ["-T1000"], ["--chunksize=4096"], ["--chunksize=65536"], ["-x-1"]])
def test_images_of_mkfs(tmp_path: Path, source: Path, options: list[str]) -> None:
    """They are blobs of their own, and metadata of ours can refer to them."""
    image = tmp_path / "image"
    subprocess.run(
        ["mkfs.erofs", "--quiet", *options, image, source], check=True, capture_output=True, timeout=60
    )
    data = image.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    image.rename(tmp_path / digest)
    with Saved(tmp_path / digest, [], None).mounted(tmp_path / "mnt") as root:  # type: ignore[arg-type]
        expected = snapshot_directory(root)
    tree = read(io.BytesIO(data), digest=digest)
    assert snapshot_tree(tree, {digest: data}) == expected
    saved = save(tree, tmp_path, tmp_path / "meta")
    assert saved.blobs == [tmp_path / digest]
    with saved.mounted(tmp_path / "mnt") as root:
        assert snapshot_directory(root) == expected


def test_an_image_whose_files_lie_in_itself_needs_its_digest(tmp_path: Path, source: Path) -> None:
    image = tmp_path / "image"
    subprocess.run(["mkfs.erofs", "--quiet", image, source], check=True, capture_output=True, timeout=60)
    with image.open("rb") as file, pytest.raises(LayerCorrupt, match="which no blob has"):
        read(file)
    subprocess.run(
        ["mkfs.erofs", "--quiet", "-zlz4", image, source], check=True, capture_output=True, timeout=60
    )
    with image.open("rb") as file, pytest.raises(LayerCorrupt, match="compression"):
        read(file, digest="a" * 64)
