"""The layers that the tests name, made once and kept below build/."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from pathlib import Path

from tests.backends.root import build_root

from dsec.core.images import ImageConfig
from dsec.layers.build import Builder, Wanted
from dsec.layers.store import LayerStore

CACHE = Path(__file__).parents[2] / "build" / "test-store-2"


def _suite() -> str:
    release = platform.freedesktop_os_release()
    return release.get("VERSION_CODENAME", "bookworm")


def _make_base(builder: Builder) -> None:
    wanted = Wanted(name="base", kind="base")
    if "DSEC_KERNEL_VM" not in os.environ:
        builder.from_suite(_suite(), ["python3-minimal"], wanted)
        return
    with tempfile.TemporaryDirectory() as name:  # there is no network in the VM
        build_root(Path(name))
        Path(name).chmod(0o755)
        builder.from_directory(Path(name), wanted)


def _base() -> Path:
    """A store that holds `base`, made the first time: a suite, or in the kernel VM its own programs."""
    if not CACHE.exists():
        beside = CACHE.with_name(f"test-store.{os.getpid()}")
        beside.mkdir(parents=True)
        with LayerStore(beside) as store:
            _make_base(Builder(store))
        beside.rename(CACHE)
    return CACHE


def stock_store(data: Path) -> None:
    """Fills <data>/store: base (under the paper's name as well), empty, and two damaged ones."""
    store_path = data / "store"
    shutil.copytree(_base(), store_path, copy_function=shutil.copy2)
    scratch = data / "scratch"
    with LayerStore(store_path) as store:
        store.tag("base", "registry.example/sphinx-9658:official")
        builder = Builder(store)
        scratch.mkdir()
        posix = ImageConfig(shell=["/bin/sh"])
        builder.from_directory(scratch, Wanted(name="posix-shell", kind="toolkit", config=posix))
        shutil.rmtree(scratch)
        for name in ("empty", "cut", "corrupt"):
            scratch.mkdir()
            if name != "empty":
                (scratch / "file").write_bytes(os.urandom(300_000))
            layer = builder.from_directory(scratch, Wanted(name=name, kind="base"))
            shutil.rmtree(scratch)
            if name != "empty":
                _damage(store.file(layer.digest), name)


def _damage(image: Path, how: str) -> None:
    image.chmod(0o644)
    if how == "cut":
        os.truncate(image, 8192)
    else:
        with image.open("r+b") as f:  # the superblock lies at 1024
            f.seek(1024)
            f.write(b"\0" * 128)
    image.chmod(0o444)
