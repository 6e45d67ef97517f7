"""Stores, and layers looked at through a mount."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.layers.build import Builder, Wanted
from dsec.layers.model import Layer
from dsec.layers.store import LayerStore
from dsec.linux import syscalls

MS_RDONLY = 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    with LayerStore(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def builder(store: LayerStore) -> Builder:
    return Builder(store)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    (made / "file").write_text("content\n")
    return made


@contextlib.contextmanager
def mounted(store: LayerStore, layer: Layer, where: Path) -> Iterator[Path]:
    """The layer's tree."""
    where.mkdir(exist_ok=True)
    blobs = ",".join(f"device={path}" for path in store.ref(layer).blobs)
    syscalls.mount(str(store.file(layer.digest)), where, "erofs", MS_RDONLY, blobs)
    try:
        yield where
    finally:
        syscalls.umount2(where)


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, content: bytes = b"", **fields: object) -> Member:
    """An entry; a regular file unless `type` says otherwise."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mtime = 1_700_000_000
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    def make(*members: Member, mode: str = "w", name: str = "archive.tar") -> Path:
        path = tmp_path / name
        with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:
            for info, content in members:
                tar.addfile(info, io.BytesIO(content) if content else None)
        return path

    return make


def workspace(name: str) -> Wanted:
    return Wanted(name=name, kind="workspace")


def empty(store: LayerStore) -> bool:
    """Nothing was made, and nothing is left of the attempt."""
    return not store.list() and not any(store.files.iterdir()) and not any(store.tmp.iterdir())
