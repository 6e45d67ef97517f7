"""What is kept and what is collected; pages of a large catalogue; what layers stand on."""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.core.errors import Conflict, LayerCorrupt, UnknownLayer
from dsec.core.images import ImageConfig
from dsec.layers.assemble import Assembly
from dsec.layers.build import Builder, Wanted
from dsec.layers.erofs.tree import File
from dsec.layers.model import Kind, Layer
from dsec.layers.store import LayerStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    with LayerStore(tmp_path / "store") as made:
        yield made


def build(
    store: LayerStore,
    name: str = "",
    content: bytes = b"",
    *,
    below: tuple[str, ...] = (),
    kind: Kind = "base",
    path: bytes = b"f",
    **how: object,
) -> Layer:
    content = content or os.urandom(9000)

    def fill(into: Assembly) -> None:
        body = into.blob.add(io.BytesIO(content), len(content))
        into.tree.put(
            path, File(stat.S_IFREG | 0o644, size=len(content), extents=body.extents, tail=body.tail)
        )

    wanted = Wanted(name=name, kind=kind, **how)  # type: ignore[arg-type]
    return Builder(store).fill(wanted, "a test", fill, below=below)


def files(store: LayerStore) -> set[str]:
    return {e.name.partition(".")[0] for d in (store.files, store.blobs) for e in os.scandir(d)}


def test_names_keep_what_they_need(store: LayerStore) -> None:
    a, b = build(store), build(store)
    top = build(store, "top:1", below=(a.digest, b.digest))
    alone = build(store)
    gone = store.collect(grace_s=0)
    assert gone.layers == [alone.digest] and gone.blobs == [alone.blobs[0].digest] and gone.bytes > 9000
    kept = [a, b, top]
    assert files(store) == {x for layer in kept for x in (layer.digest, layer.blobs[0].digest)}
    store.remove("top:1")
    assert store.collect(grace_s=0).bytes > 0
    assert files(store) == set() and store.list() == []


def test_grace_is_from_the_last_use(store: LayerStore) -> None:
    layer = build(store)
    assert store.collect(grace_s=60).layers == []
    assert store.collect(grace_s=-1).layers == [layer.digest]
    layer = build(store)
    before = time.time()
    store.use([layer.digest])
    assert store._catalogue.unreachable(before) == []
    assert store._catalogue.unreachable(time.time() + 1) == [layer.digest]


def test_what_a_build_finds_counts_as_used(store: LayerStore) -> None:
    layer = build(store)
    store.remember("step:1", layer.digest)
    later = time.time()
    assert store._catalogue.unreachable(later) == [layer.digest]
    assert store.made_of("step:1") is not None
    assert store._catalogue.unreachable(later) == []


def test_shared_blobs_stay_while_one_needs_them(store: LayerStore) -> None:
    content = os.urandom(20_000)
    a = build(store, "a:1", content)
    b = build(store, "b:1", content, below=(a.digest,))
    assert a.digest != b.digest and a.blobs == b.blobs  # told apart by what they stand on
    store.remove("a:1")
    assert store.collect(grace_s=0).layers == []
    store.remove("b:1")
    store.collect(grace_s=0)
    assert files(store) == set()


def test_parts_of_a_collapsed_layer(store: LayerStore) -> None:
    a, b = build(store, content=b"1" * 9000), build(store, content=b"2" * 9000, path=b"g")
    both = Builder(store).collapse([a, b], Wanted(name="ab:1", kind="base"), "a and b", base=True)
    assert store.collect(grace_s=0).layers == []
    assert [layer.digest for layer in store.expand([both])] == [both.digest]  # the parts are no lowers
    one = Builder(store).collapse([a], Wanted(name="just-a:1", kind="base"), "a", base=True)
    assert one.digest == a.digest and one.parts == []
    store.remove("ab:1")
    assert set(store.collect(grace_s=0).layers) == {b.digest}
    assert store.find("just-a:1").digest == a.digest


def test_what_others_stand_on_is_not_removed(store: LayerStore) -> None:
    a = build(store, "a:1")
    build(store, "b:1", below=(a.digest,))
    with pytest.raises(Conflict, match="stands on it"):
        store.remove(a.digest)
    assert store.remove("a:1") == ["a:1"]
    assert len(store.resolve("b:1", []).layers) == 2
    with pytest.raises(UnknownLayer):
        store.find("a:1")


def test_stack(store: LayerStore) -> None:
    a = build(store, "a:1", config=ImageConfig(env={"A": "1"}, workdir="/a"))
    b = build(store, "b:1", below=(a.digest,), config=ImageConfig(env={"B": "2"}, entrypoint=["/e"]))
    tool = build(store, "tool@1", kind="toolkit")
    stack = store.resolve("b:1", ["tool@1"])
    assert [ref.digest for ref in stack.layers] == [a.digest, b.digest, tool.digest]
    assert all(len(ref.blobs) == 1 for ref in stack.layers)
    assert stack.config.env == {"B": "2"} and stack.config.entrypoint == ["/e"]
    again = store.resolve("b:1", ["a:1", "tool@1"])  # what is hidden by the same layer higher up is left out
    assert [ref.digest for ref in again.layers] == [b.digest, a.digest, tool.digest]
    store.file(a.digest).unlink()
    with pytest.raises(LayerCorrupt):
        store.resolve("b:1", [])


def test_made_of(store: LayerStore) -> None:
    layer = build(store)
    store.remember("diff:1", layer.digest)
    found = store.made_of("diff:1")
    assert found and found.digest == layer.digest
    os.truncate(store.blob(layer.blobs[0].digest), 1)
    assert store.made_of("diff:1") is None  # it is made again
    store.collect(grace_s=-1)
    assert store.made_of("diff:1") is None


def test_verify_reads_blobs(store: LayerStore) -> None:
    layer = build(store, "a:1")
    told: list[int] = []
    store.verify(layer.digest, told.append)
    assert told[-1] == layer.total and told == sorted(told)
    blob = store.blob(layer.blobs[0].digest)
    blob.chmod(0o600)
    with blob.open("r+b") as f:
        f.write(b"!")
    with pytest.raises(LayerCorrupt, match="was altered"):
        store.verify("a:1")


def test_pages(store: LayerStore) -> None:
    layer = build(store)
    names = [f"{kind}/{n:03}:1" for kind in ("base", "tool") for n in range(25)]
    for name in names:
        store.tag(layer.digest, name, kind="toolkit" if name.startswith("tool") else "base")
    seen: list[str] = []
    while page := store.page(after=seen[-1] if seen else "", limit=7):
        assert len(page) <= 7
        seen += [found.name for found in page]
    assert seen == names
    assert [x.name for x in store.page(prefix="tool/01", limit=100)] == names[35:45]
    assert [x.name for x in store.page(kind="toolkit", limit=3)] == names[25:28]
    assert [x.name for x in store.page(kind="toolkit", after=names[27], prefix="tool", limit=2)] == names[
        28:30
    ]
    assert store.page(kind="snapshot") == [] and store.page(prefix="x") == []
    assert len(store.page(limit=10**9)) == 50


def test_names_of_any_text_in_pages(store: LayerStore) -> None:
    layer = build(store)
    for name in ("a-b:1", "a.b:1", "a/b:1", "a_b:1", "ab:1", "A:1", "a+b@1"):
        store.tag(layer.digest, name)
    assert [x.name for x in store.page(prefix="a/")] == ["a/b:1"]
    assert len(store.page(prefix="a")) == 6


def test_leftovers_of_blobs_are_swept(store: LayerStore, tmp_path: Path) -> None:
    layer = build(store, "a:1")
    (store.blobs / ("0" * 64)).write_bytes(b"left by a build that was killed before its row")
    (store.hot / ("1" * 64 + ".json")).write_bytes(b"{}")
    with LayerStore(store.path):
        assert files(store) == {layer.digest, layer.blobs[0].digest}
        assert list(store.hot.iterdir()) == []
