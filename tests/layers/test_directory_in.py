"""Directories as trees: what stands there is kept, and what cannot be is refused by name."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.layers.test_build import rich_tree
from tests.layers.trees import Made, facts

from dsec.core.errors import InvalidArgument
from dsec.layers import directory_in
from dsec.layers.erofs.tree import HOLE, OPAQUE, File, Special

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices need root")


def read(root: Path) -> Made:
    made = Made()
    made.read_directory(root)
    return made


@ROOT
def test_all_there_is(tmp_path: Path) -> None:
    rich_tree(tmp_path)
    made = read(tmp_path)
    found = facts(made)
    paths = sorted(os.fsencode(path)[len(os.fsencode(tmp_path)) :] for path in tmp_path.rglob("*"))
    assert sorted(found)[1:] == paths
    for path in paths:
        st, fact = os.lstat(os.fsencode(tmp_path) + path), found[path]
        assert (fact.mode, fact.uid, fact.gid, fact.mtime_ns) == (
            st.st_mode,
            st.st_uid,
            st.st_gid,
            st.st_mtime_ns,
        )
        inode = made.tree.lookup(path)
        if isinstance(inode, File):
            assert made.content(path) == (tmp_path / os.fsdecode(path[1:])).read_bytes()
        elif isinstance(inode, Special):
            assert inode.rdev == st.st_rdev
    assert made.tree.lookup(b"hard") is made.tree.lookup(b"dir/file")
    assert found[b"/opaque"].xattrs == ((OPAQUE, b"y"),)
    assert stat.S_ISCHR(found[b"/whiteout"].mode) and found[b"/whiteout"].body == 0
    assert dict(found[b"/dir/file"].xattrs) == {b"user.note": b"\0binary\xff"}


def test_holes_are_kept(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as f:
        f.seek(1 << 30)
        f.write(b"end")
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 20)
    made = read(tmp_path)
    sparse, hole = made.tree.lookup(b"sparse"), made.tree.lookup(b"hole")
    assert isinstance(sparse, File) and sparse.extents[0].blob == HOLE and sparse.size == (1 << 30) + 3
    assert isinstance(hole, File) and made.content(b"hole") == bytes(1 << 20)
    assert len(made.blob.getvalue()) <= 1 << 16


def test_what_is_excluded_is_not_looked_at(tmp_path: Path) -> None:
    for path in ("a/b/c", "a/d"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    made = Made()
    asked: list[bytes] = []

    def exclude(path: bytes) -> bool:
        asked.append(path)
        return path == b"a/b"

    summary = made.read_directory(tmp_path, exclude)
    assert sorted(facts(made)) == [b"", b"/a", b"/a/d"] and summary.entries == 2
    assert asked == [b"a", b"a/b", b"a/d"]


@pytest.mark.parametrize("depth", [20, 21])
def test_the_longest_path(tmp_path: Path, depth: int) -> None:
    """From where it is read; that there is more above it does not count."""
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("f" * 75, os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    if depth == 20:
        assert len(facts(read(tmp_path))) == 22
        return
    with pytest.raises(InvalidArgument, match="its path is too long"):
        read(tmp_path)


@ROOT
@pytest.mark.parametrize("name", ["redirect", "metacopy"])
def test_what_an_overlay_would_misread(tmp_path: Path, name: str) -> None:
    (tmp_path / "d").mkdir()
    os.setxattr(tmp_path / "d", f"trusted.overlay.{name}", b"/x")
    with pytest.raises(InvalidArgument, match=f"'/d': an overlay's trusted.overlay.{name}"):
        read(tmp_path)
    os.removexattr(tmp_path / "d", f"trusted.overlay.{name}")
    os.setxattr(tmp_path / "d", "trusted.overlay.origin", b"x")
    assert facts(read(tmp_path))[b"/d"].xattrs == ()


@ROOT
def test_another_file_system(tmp_path: Path) -> None:
    from dsec.linux import syscalls

    (tmp_path / "m").mkdir()
    syscalls.mount("none", tmp_path / "m", "tmpfs", 0)
    try:
        with pytest.raises(InvalidArgument, match="'/m': another filesystem"):
            read(tmp_path)
    finally:
        syscalls.umount2(tmp_path / "m")


@pytest.mark.parametrize("what", ["grows", "shrinks", "vanishes", "becomes a link", "directory vanishes"])
def test_what_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The change is made between the look at an entry and its reading."""
    victim = tmp_path / "x"
    if what.startswith("directory"):
        victim.mkdir()
    else:
        victim.write_bytes(b"x" * 10_000)

    def change() -> None:
        if what == "grows":
            with victim.open("ab") as f:
                f.write(b"more")
        elif what == "shrinks":
            os.truncate(victim, 10)
        elif what == "directory vanishes":
            victim.rmdir()
        else:
            victim.unlink()
            if what == "becomes a link":
                victim.symlink_to("/etc/passwd")

    where = "_runs" if what in ("grows", "shrinks") else "_seen"
    real = getattr(directory_in, where)

    def hooked(*args: Any) -> Any:
        if where == "_runs":
            change()
            return real(*args)
        found = real(*args)
        change()
        return found

    monkeypatch.setattr(directory_in, where, hooked)
    with pytest.raises(InvalidArgument, match=r"'/x': .*(vanished|changed|replaced|ends .* early)"):
        read(tmp_path)


def test_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    monkeypatch.setattr(directory_in, "MAX_ENTRIES", 2)
    with pytest.raises(InvalidArgument, match="'/c': more than 2 entries"):
        read(tmp_path)
