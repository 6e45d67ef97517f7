"""Mounts of layers that have blobs: shared, counted, capped; metadata on the node, data on the store."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends.container.layers import LayerMounts
from dsec.core.errors import LayerCorrupt, UnknownLayer
from dsec.core.images import LayerRef
from dsec.layers.assemble import Assembly, collapse
from dsec.layers.build import Builder, Wanted
from dsec.layers.erofs.tree import File
from dsec.layers.metadata_cache import MetadataCache
from dsec.layers.model import Layer
from dsec.layers.store import LayerStore
from dsec.linux.probe import erofs_file_mount
from dsec.linux.syscalls import mount, umount2

pytestmark = pytest.mark.kernel
REG = stat.S_IFREG | 0o644


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Path]:
    """A store on another filesystem than the node's."""
    where = tmp_path / "far"
    where.mkdir()
    mount("far", where, "tmpfs", 0, "size=256m")
    try:
        yield where
    finally:
        umount2(where)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    where = tmp_path / "node"
    where.mkdir()
    return where


def layer(store: LayerStore, name: str, files: dict[str, bytes], below: tuple[str, ...] = ()) -> Layer:
    def fill(into: Assembly) -> None:
        for path, content in files.items():
            body = into.blob.add(io.BytesIO(content), len(content))
            inode = File(REG, size=len(content), extents=body.extents, tail=body.tail)
            into.tree.put(path.encode(), inode)

    return Builder(store).fill(Wanted(name=name, kind="base"), "a test", fill, below=below)


def mounts(node: Path, **how: int) -> LayerMounts:
    made = LayerMounts(node / "layers", MetadataCache(node / "cache"), **how)
    made.open()
    return made


def cat(made: LayerMounts, ref: LayerRef, path: str) -> bytes:
    made.use([ref], "sandbox")
    return (made.where / ref.digest / path).read_bytes()


BIG = os.urandom(300_000)


@pytest.mark.parametrize("file_backed", [True, False], ids=["file", "loop"])
def test_blobs_are_read_on_the_store(far: Path, node: Path, file_backed: bool) -> None:
    if file_backed and (reason := erofs_file_mount()):
        pytest.skip(reason)
    with LayerStore(far) as store:
        made = mounts(node)
        made.file_backed = file_backed
        try:
            ref = store.ref(layer(store, "a:1", {"big": BIG, "d/small": b"small\n"}))
            assert len(ref.blobs) == 1
            assert cat(made, ref, "big") == BIG
            assert cat(made, ref, "d/small") == b"small\n"
            local = node / "cache/files" / f"{ref.digest}.erofs"
            assert local.read_bytes() == Path(ref.path).read_bytes()
            assert sum(p.stat().st_size for p in (node / "cache").rglob("*") if p.is_file()) < 50_000
            assert made.file_backed is file_backed
        finally:
            made.close(keep=False)


def test_collapsed_layers_share_blobs(far: Path, node: Path) -> None:
    with LayerStore(far) as store:
        a = layer(store, "a:1", {"x": BIG, "y": b"lower"})
        b = layer(store, "b:1", {"y": BIG[::-1], "z": b"upper"})
        both = Builder(store).collapse([a, b], Wanted(name="c:1", kind="base"), "a and b", base=True)
        assert [blob.digest for blob in both.blobs] == [a.blobs[0].digest, b.blobs[0].digest]
        assert both.parts == [a.digest, b.digest] and both.below == []
        made = mounts(node)
        try:
            ref = store.ref(both)
            assert (cat(made, ref, "x"), cat(made, ref, "y")) == (BIG, BIG[::-1])
            assert cat(made, ref, "z") == b"upper"
        finally:
            made.close(keep=False)
        with store.stage() as (staged, _):
            again = collapse([store.file(a.digest), store.file(b.digest)], staged, base=True)
            assert again.digest == both.digest  # same input, same digest
        with store.stage() as (staged, _):
            other = collapse([store.file(a.digest)], staged, base=True, below=[b.digest])
            assert other.digest != a.digest and other.blobs == a.blobs


def test_copy_of_the_metadata_is_mended(far: Path, node: Path) -> None:
    with LayerStore(far) as store:
        ref = store.ref(layer(store, "a:1", {"big": BIG}))
        cache = MetadataCache(node / "cache")
        local = Path(cache.local(ref))
        local.chmod(0o600)
        os.truncate(local, 1000)  # cut off
        assert Path(cache.local(ref)).read_bytes() == Path(ref.path).read_bytes()
        local.chmod(0o600)
        with local.open("r+b") as f:  # damaged: its size tells nothing, the mount does
            f.write(bytes(4096))
        made = mounts(node)
        try:
            assert cat(made, ref, "big") == BIG
        finally:
            made.close(keep=False)
        local.unlink()
        Path(ref.path).chmod(0o600)
        with open(ref.path, "r+b") as f:
            f.write(b"x")
        with pytest.raises(LayerCorrupt, match="not what its digest says"):
            cache.local(ref)
        assert list((node / "cache/tmp").iterdir()) == []
        Path(ref.path).unlink()
        with pytest.raises(UnknownLayer):
            cache.local(ref)


def test_cache_is_bounded(far: Path, node: Path) -> None:
    with LayerStore(far) as store:
        refs = [store.ref(layer(store, f"l:{i}", {f"f{i}": os.urandom(3000)})) for i in range(6)]
        size = os.stat(refs[0].path).st_size
        cache = MetadataCache(node / "cache", limit=3 * size)
        for at, ref in enumerate(refs):
            os.utime(cache.local(ref), (at, at))
        assert len(list(cache.files.iterdir())) == 3
        cache.local(refs[3])  # used: now the youngest
        cache.local(refs[0])
        left = {p.name[:64] for p in cache.files.iterdir()}
        assert left == {refs[i].digest for i in (0, 3, 5)}


def test_mounts_are_shared_counted_and_capped(far: Path, node: Path) -> None:
    with LayerStore(far) as store:
        refs = [store.ref(layer(store, f"l:{i}", {"f": str(i).encode()})) for i in range(5)]
        made = mounts(node, cap=2)
        try:
            assert made.use(refs[:3], "one") == made.use(refs[:3], "two")
            assert made.mounted == 3  # in use: beyond the cap
            assert set(made.in_use()) == {r.digest for r in refs[:3]}
            made.leave("one")
            made.leave("one")
            assert made.mounted == 3
            made.leave("two")
            assert made.mounted == 2 and made.in_use() == []
            assert {p.name for p in made.where.iterdir()} == {r.digest for r in refs[1:3]}
            made.use(refs[3:], "three")
            assert {p.name for p in made.where.iterdir()} == {r.digest for r in refs[3:]}
        finally:
            made.close(keep=True)
        later = mounts(node)
        try:
            assert later.mounted == 2
            later.note([r.digest for r in refs[3:]], "three")
            assert set(later.in_use()) == {r.digest for r in refs[3:]}
            assert cat(later, refs[4], "f") == b"4"
        finally:
            later.close(keep=False)


def test_blob_that_is_gone_or_cut_short(far: Path, node: Path) -> None:
    with LayerStore(far) as store:
        ref = store.ref(layer(store, "a:1", {"big": BIG}))
        os.truncate(ref.blobs[0], 4096)
        with pytest.raises(LayerCorrupt, match=r"has 4096 bytes"):
            store.resolve("a:1", [])
        made = mounts(node)
        try:
            Path(ref.blobs[0]).unlink()
            with pytest.raises(UnknownLayer):
                made.use([ref], "sandbox")
            assert made.mounted == 0 and list(made.where.iterdir()) == []
        finally:
            made.close(keep=False)
