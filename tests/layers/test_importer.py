"""Images of others as layers: each part once, merged below a threshold, found again by digest."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import InvalidArgument, LayerCorrupt
from dsec.layers.build import Builder, Wanted
from dsec.layers.erofs.reader import read
from dsec.layers.erofs.tree import Directory, File, Tree, is_opaque, is_whiteout
from dsec.layers.exporter import Exporter
from dsec.layers.importer import Importer, name_of
from dsec.layers.model import Layer
from dsec.layers.oci import open_image
from dsec.layers.stack import Stack
from dsec.layers.store import LayerStore

Entry = tuple[str, bytes] | tarfile.TarInfo


def tar_of(*entries: Entry) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            if entry[0].endswith("/"):
                info.type = tarfile.DIRTYPE
            info.size, info.mtime = len(entry[1]), 1_600_000_000
            tar.addfile(info, io.BytesIO(entry[1]))
    return out.getvalue()


def link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.LNKTYPE, target
    return info


def layout(where: Path, *tars: bytes, **config: object) -> Path:
    """An OCI layout of these layers, written by hand."""
    blobs = where / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {
            "mediaType": f"application/vnd.oci.image.{media}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    encode = msgspec.json.encode
    layers = [put(gzip.compress(tar, 1, mtime=0), "layer.v1.tar+gzip") for tar in tars]
    diff_ids = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    manifest = put(
        encode({"schemaVersion": 2, "config": put(encode(settings), "config.v1+json"), "layers": layers}),
        "manifest.v1+json",
    )
    (where / "index.json").write_bytes(encode({"schemaVersion": 2, "manifests": [manifest]}))
    (where / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return where


@pytest.fixture
def load(store: LayerStore) -> Callable[..., Layer]:
    def load(source: Path, name: str = "image:1", **how: object) -> Layer:
        importer = Importer(Builder(store), **how)  # type: ignore[arg-type]
        return importer.load(f"oci:{source}", Wanted(name=name, kind="base"), platform="linux/amd64")

    return load


def tree_of(store: LayerStore, layer: Layer) -> Tree:
    return read(io.BytesIO(store.file(layer.digest).read_bytes()))


BIG = os.urandom(50_000)


def test_layers_become_one(store: LayerStore, tmp_path: Path, load: Callable[..., Layer]) -> None:
    source = layout(
        tmp_path / "image",
        tar_of(("a/", b""), ("a/one", b"1"), ("a/big", BIG), ("gone", b"x"), ("dir/", b""), ("dir/x", b"x")),
        tar_of(("a/one", b"2"), (".wh.gone", b""), ("dir/.wh..wh..opq", b""), ("dir/y", b"y")),
        tar_of(("a/two", BIG[::-1])),
        Env=["PATH=/bin", "A=b=c"],
        WorkingDir="/a",
        User="1000",
        Entrypoint=["/run"],
        Cmd=["x"],
        Labels={"any label": "of theirs"},
        StopSignal="SIGINT",
        Shell=["/bin/bash", "-c"],
    )
    layer = load(source)
    assert layer.name == "image:1" and layer.below == [] and len(layer.parts) == 3 and len(layer.blobs) == 2
    config = layer.config
    assert config.env == {"PATH": "/bin", "A": "b=c"} and (config.workdir, config.user) == ("/a", "1000")
    assert (config.entrypoint, config.cmd, config.stop_signal) == (["/run"], ["x"], "SIGINT")
    assert config.labels == {"any label": "of theirs"} and config.shell == ["/bin/bash", "-c"]
    assert layer.provenance.manifest.startswith("sha256:")
    tree = tree_of(store, layer)
    assert tree.lookup(b"gone") is None and tree.lookup(b"dir/x") is None
    assert isinstance(tree.lookup(b"dir/y"), File)
    directory = tree.lookup(b"dir")
    assert isinstance(directory, Directory) and not is_opaque(directory)  # a base hides nothing
    one = tree.lookup(b"a/one")
    assert isinstance(one, File) and tree.read_tail(one.tail) == b"2"
    with Stack(store, [layer]) as stack:
        for name, content in (("a/big", BIG), ("a/two", BIG[::-1])):
            found = stack.lookup(name.encode())
            assert isinstance(found, File) and b"".join(stack.content(found)) == content


def test_above_the_threshold_layers_stay_apart(
    store: LayerStore, tmp_path: Path, load: Callable[..., Layer]
) -> None:
    tars = [tar_of((f"f{i}", os.urandom(40_000)), (f"g{i}", b"x")) for i in range(4)]
    tars[3] = tar_of((".wh.f0", b""), ("f3", os.urandom(40_000)))
    source = layout(tmp_path / "image", *tars)
    layer = load(source, collapse_below=100_000)
    assert len(layer.below) == 1
    resolved = store.resolve("image:1", [])
    assert [r.digest for r in resolved.layers] == [*layer.below, layer.digest]
    hidden = tree_of(store, layer).lookup(b"f0")
    assert hidden is not None and is_whiteout(hidden)
    with Stack(store, store.expand([layer])) as stack:
        assert stack.lookup(b"f0") is None
        assert isinstance(stack.lookup(b"f1"), File) and isinstance(stack.lookup(b"f3"), File)
    whole = load(source, "whole:1")
    assert whole.below == [] and whole.blobs[0] in store.find(layer.below[0]).blobs


def test_imported_once(store: LayerStore, tmp_path: Path, load: Callable[..., Layer]) -> None:
    base, top = tar_of(("base", BIG)), tar_of(("top", BIG[1:]))
    first = load(layout(tmp_path / "a", base, top))
    before = {p.name: p.stat().st_mtime_ns for d in (store.files, store.blobs) for p in d.iterdir()}
    again = load(tmp_path / "a", "other:1")
    assert again.digest == first.digest and again.name == "other:1"
    after = {p.name: p.stat().st_mtime_ns for d in (store.files, store.blobs) for p in d.iterdir()}
    assert after == before
    assert store.find(f"any/thing@{first.provenance.manifest}").digest == first.digest
    # Another image with the same base brings only its own layer.
    other = load(layout(tmp_path / "b", base, tar_of(("else", BIG[2:]))), "b:1")
    assert other.blobs[0] == first.blobs[0] and other.blobs[1] != first.blobs[1]
    assert len(list(store.blobs.iterdir())) == 3


def test_at_the_same_time(store: LayerStore, tmp_path: Path) -> None:
    source = layout(tmp_path / "a", *(tar_of((f"f{i}", os.urandom(50_000))) for i in range(5)))
    importer = Importer(Builder(store))
    found: list[Layer] = []

    def load(n: int) -> None:
        wanted = Wanted(name=f"n:{n}", kind="base")
        found.append(importer.load(f"oci:{source}", wanted, platform="linux/amd64"))

    threads = [threading.Thread(target=load, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({layer.digest for layer in found}) == 1 and len(found) == 6
    assert len(list(store.blobs.iterdir())) == 5


def test_hard_links_to_layers_below(store: LayerStore, tmp_path: Path, load: Callable[..., Layer]) -> None:
    source = layout(
        tmp_path / "image",
        tar_of(("f", BIG), ("s", b"small"), ("gone", b"x")),
        tar_of(link("g", "f"), link("t", "s")),
    )
    layer = load(source)
    assert len(layer.blobs) == 1  # no byte is stored twice
    with Stack(store, [layer]) as stack:
        for name, content in ((b"g", BIG), (b"t", b"small")):
            found = stack.lookup(name)
            assert isinstance(found, File) and b"".join(stack.content(found)) == content
    bad = layout(tmp_path / "bad", tar_of(("f", BIG)), tar_of((".wh.f", b"")), tar_of(link("g", "f")))
    with pytest.raises(InvalidArgument, match="'g'"):
        load(bad, "bad:1")


def test_what_is_damaged_leaves_nothing(
    store: LayerStore, tmp_path: Path, load: Callable[..., Layer]
) -> None:
    source = layout(tmp_path / "image", tar_of(("f", BIG)), tar_of(("../escape", b"x")))
    with pytest.raises(InvalidArgument, match=r"\.\./escape"):
        load(source)
    assert [layer.name for layer in store.list()] in ([""], [])  # the sound part may stay, without a name
    store.collect(grace_s=-1)
    assert not any(store.files.iterdir()) and not any(store.blobs.iterdir()) and not any(store.tmp.iterdir())
    source = layout(tmp_path / "cut", tar_of(("f", BIG)))
    for blob in (source / "blobs/sha256").iterdir():
        if blob.stat().st_size > 20_000:
            os.truncate(blob, 20_000)
    with pytest.raises((LayerCorrupt, InvalidArgument)):
        load(source)
    assert store.list() == [] and not any(store.tmp.iterdir())


def test_no_layers_at_all(store: LayerStore, tmp_path: Path, load: Callable[..., Layer]) -> None:
    layer = load(layout(tmp_path / "scratch"))
    assert layer.blobs == [] and tree_of(store, layer).root.children == {}


def test_out_again(store: LayerStore, tmp_path: Path, load: Callable[..., Layer]) -> None:
    """What is exported and imported again is the same layer."""
    source = layout(
        tmp_path / "image", tar_of(("a/", b""), ("a/big", BIG), ("a/s", b"1")), Env=["A=1"], Cmd=["/c"]
    )
    layer = load(source)
    for form in ("oci", "docker"):
        file = tmp_path / f"{form}.tar"
        Exporter(store).to_archive(["image:1"], file, form, name="image:1")  # type: ignore[arg-type]
        with open_image(str(file)) as image:
            assert image.config.env == ["A=1"] and image.config.cmd == ["/c"]
        with LayerStore(tmp_path / f"store-{form}") as other:
            again = Importer(Builder(other)).load(str(file), Wanted(name="x:1", kind="base"))
            assert again.blobs == layer.blobs and again.config.env == {"A": "1"}
            assert again.digest == layer.digest


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("localhost:5000/a/b:1", "localhost:5000/a/b:1"),
        ("docker://example.com/a", "example.com/a:latest"),
        ("example.com/a@sha256:" + "0" * 64, ""),
    ],
)
def test_names(source: str, name: str) -> None:
    assert name_of(source) == name


def test_a_file_has_no_name() -> None:
    with pytest.raises(InvalidArgument, match="give the layer a name"):
        name_of("oci-archive:x.tar")
