"""The store and its catalogue: names, what is damaged, what processes share."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest
from tests.layers.conftest import empty, workspace

from dsec.core.errors import InvalidArgument, LayerCorrupt, UnknownLayer
from dsec.core.images import ImageConfig
from dsec.layers.build import Builder, Wanted
from dsec.layers.store import LayerStore

BUILD = """
import sys
from pathlib import Path
from dsec.layers.build import Builder, Wanted
from dsec.layers.store import LayerStore
with LayerStore(Path(sys.argv[1])) as store:
    Builder(store).from_directory(Path(sys.argv[2]), Wanted(name=sys.argv[3], kind="workspace"))
"""


def test_resolve(store, builder, source):
    base = builder.from_directory(
        source, Wanted(name="base", kind="base", config=ImageConfig(env={"A": "1"}, shell=["/bin/sh"]))
    )
    (source / "more").touch()
    above = builder.from_directory(
        source, Wanted(name="work:1", kind="workspace", config=ImageConfig(workdir="/srv"))
    )
    stack = store.resolve("base", ["work:1"])
    assert [layer.digest for layer in stack.layers] == [base.digest, above.digest]
    assert [Path(layer.path) for layer in stack.layers] == [store.file(base.digest), store.file(above.digest)]
    assert stack.config == ImageConfig(env={"A": "1"}, shell=["/bin/sh"], workdir="/srv")
    assert store.resolve(base.digest, [f"sha256:{above.digest}"]).layers == stack.layers
    assert store.resolve(base.digest[:12], []).layers == stack.layers[:1]
    assert store.resolve("base", ["work:1"]) is stack


def test_paths_are_absolute(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with LayerStore(Path("relative")) as store:
        Builder(store).from_directory(source, workspace("w"))
        assert os.path.isabs(store.resolve("w", []).layers[0].path)


def test_unknown_layers_list_near_names(store, builder, source):
    for name in ("registry.example/sphinx-9658:official", "django:5.0", "django:4.2"):
        builder.from_directory(source, workspace(name))
    with pytest.raises(UnknownLayer, match=r"near it: registry\.example/sphinx-9658:official"):
        store.resolve("registry.example/sphinx-9568:official", [])
    with pytest.raises(UnknownLayer, match=r"django:4\.2.*django:5\.0|django:5\.0.*django:4\.2"):
        store.resolve("django", [])
    with pytest.raises(UnknownLayer):
        store.resolve("django:5.0", ["0" * 64])
    with pytest.raises(InvalidArgument):
        store.resolve("../../etc", [])


def test_a_name_moves(store, builder, source):
    old = builder.from_directory(source, workspace("w"))
    assert store.resolve("w", []).layers[0].digest == old.digest
    (source / "file").write_text("other")
    new = builder.from_directory(source, workspace("w"))
    assert new.digest != old.digest
    assert store.resolve("w", []).layers[0].digest == new.digest
    assert store.resolve(old.digest, []).layers[0].digest == old.digest
    assert {(layer.name, layer.digest) for layer in store.list()} == {
        ("w:latest", new.digest),
        ("", old.digest),
    }


def test_one_digest_two_names_two_configurations(store, builder, source):
    one = builder.from_directory(source, Wanted(name="one", kind="workspace", config=ImageConfig(user="a")))
    two = builder.from_directory(source, Wanted(name="two", kind="workspace", config=ImageConfig(user="b")))
    assert one.digest == two.digest
    assert store.resolve("one", []).config.user == "a"
    assert store.resolve("two", []).config.user == "b"
    assert store.names_of(one.digest) == ["one:latest", "two:latest"]


def test_tag_and_remove(store, builder, source):
    layer = builder.from_directory(source, workspace("w:1"))
    store.tag("w:1", "w:2")
    assert store.remove("w:1") == ["w:1"]
    assert store.resolve("w:2", []).layers[0].digest == layer.digest
    assert store.remove("w:2") == ["w:2", layer.digest]
    assert empty(store)
    with pytest.raises(UnknownLayer):
        store.resolve("w:2", [])
    with pytest.raises(UnknownLayer):
        store.remove("w:2")


def test_removing_a_digest_takes_its_names(store, builder, source):
    layer = builder.from_directory(source, workspace("w:1"))
    store.tag("w:1", "w:2")
    assert store.remove(layer.digest) == ["w:1", "w:2", layer.digest]
    assert empty(store)


def test_removing_by_a_prefix_is_removing_the_digest(store, builder, source):
    layer = builder.from_directory(source, workspace("w"))
    assert store.remove(layer.digest[:12]) == ["w:latest", layer.digest]
    assert empty(store)


def test_images_are_immutable(store, builder, source):
    layer = builder.from_directory(source, workspace("w"))
    assert store.file(layer.digest).stat().st_mode & 0o777 == 0o444
    assert store.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("size", [0, 1000, -1])
def test_a_file_cut_short_is_found_when_resolved(store, builder, source, size):
    layer = builder.from_directory(source, workspace("w"))
    store.resolve("w", [])  # warm: the cache must not hide it
    path = store.file(layer.digest)
    os.truncate(path, size) if size >= 0 else path.unlink()
    with pytest.raises(LayerCorrupt, match="build it again"):
        store.resolve("w", [])
    with pytest.raises(LayerCorrupt):
        store.verify("w")
    # and mended by what it says
    assert builder.from_directory(source, workspace("w")).digest == layer.digest
    assert store.resolve("w", []).layers[0].digest == layer.digest
    store.verify("w")


def test_an_altered_file_is_found_by_verify(store, builder, source):
    layer = builder.from_directory(source, workspace("w"))
    path = store.file(layer.digest)
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.seek(path.stat().st_size - 1)
        f.write(b"\x55")
    with pytest.raises(LayerCorrupt, match="altered"):
        store.verify("w")
    builder.from_directory(source, workspace("w"))
    store.verify("w")


def test_unclaimed_files_are_swept(store, builder, source):
    layer = builder.from_directory(source, workspace("w"))
    stray = store.files / ("0" * 64 + ".erofs")
    stray.write_bytes(b"half")
    (store.tmp / "file").touch()
    (store.tmp / "dead").mkdir()
    with LayerStore(store.path) as again:
        assert not stray.exists()
        assert not any(again.tmp.iterdir())
        again.verify(layer.digest)


def test_a_build_that_runs_is_not_swept(store):
    with store.stage() as (staged, _):
        (staged / "image").touch()
        LayerStore(store.path).close()
        assert (staged / "image").exists()
    assert not staged.exists()


def test_what_another_process_does_is_seen(store, source):
    with pytest.raises(UnknownLayer):
        store.resolve("w", [])
    sources = [source.parent / f"source-{n}" for n in range(3)]
    for n, mine in enumerate(sources):
        mine.mkdir()
        (mine / "number").write_text(str(n))
    workers = [
        subprocess.Popen([sys.executable, "-c", BUILD, store.path, mine, f"w:{n}"])
        for n, mine in enumerate(sources)
    ]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert len({store.resolve(f"w:{n}", []).layers[0].digest for n in range(3)}) == 3


def test_threads(store, builder, source):
    builder.from_directory(source, workspace("w"))
    failures = []

    def work() -> None:
        try:
            for _ in range(200):
                store.resolve("w", [])
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for n in range(5):
        store.tag("w", f"w:{n}")
    for thread in threads:
        thread.join()
    assert not failures


def test_a_catalogue_that_is_none(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store/catalogue.db").write_bytes(b"x" * 5000)
    from dsec.core.errors import DSecError

    with pytest.raises(DSecError, match="opening"):
        LayerStore(tmp_path / "store")


def test_errors_of_sqlite_are_typed():
    from dsec.core.errors import DiskFull, Internal, Unavailable
    from dsec.layers.catalogue import typed

    assert isinstance(typed(apsw.FullError("x"), "doing"), DiskFull)
    assert isinstance(typed(apsw.BusyError("x"), "doing"), Unavailable)
    assert isinstance(typed(apsw.CorruptError("x"), "doing"), Internal)
