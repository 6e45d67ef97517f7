"""The pool of writable layers after a power cut: what it held is worth nothing, a limit on disk is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.backends.container.pool import Pool
from dsec.linux.syscalls import MNT_DETACH, umount2

pytestmark = pytest.mark.kernel


def _torn(file: Path) -> None:
    """Its superblock did not get there whole."""
    with file.open("r+b") as f:
        f.seek(64 << 10)
        f.write(os.urandom(4096))


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _holed(file: Path) -> None:
    """The superblock is there and trees it points to are not: nothing orders writes without barriers."""
    with file.open("r+b") as f:
        f.seek(1 << 20)
        f.write(bytes(100 << 20))


def _as_it_was(file: Path) -> None:
    pass


@pytest.mark.parametrize("cut", [_torn, _empty, _holed, _as_it_was])
def test_a_pool_of_before_a_reboot_is_made_anew(tmp_path: Path, cut: Callable[[Path], None]) -> None:
    pool = Pool(tmp_path)
    pool.open()
    if pool.limited_by == "none":
        pytest.skip(pool.why_not)
    os.close(pool.create("old", 1 << 20))
    pool.close(keep=True)
    umount2(pool.where, 0)
    cut(pool.file)

    later = Pool(tmp_path)
    later.open()
    try:
        assert (later.limited_by, later.names()) == (pool.limited_by, set())
        os.close(later.create("new", 1 << 20))
    finally:
        later.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_sandboxes_still_hold_is_taken_over(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.open()
    if pool.limited_by == "none":
        pytest.skip(pool.why_not)
    held = pool.create("held", 1 << 20)
    pool.close(keep=True)
    umount2(pool.where, MNT_DETACH)

    later = Pool(tmp_path)
    later.open()
    try:
        assert later.names() == {"held"}
        os.mkdir("upper/seen", dir_fd=held)
        assert (later.where / "held/upper/seen").is_dir(), "one file system, not two on one file"
    finally:
        os.close(held)
        later.close(keep=False)
