"""A copy has all that an overlay's upper holds, and trusts nothing in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dsec.core.errors import InvalidArgument
from dsec.linux.copy_tree import MAX_DEPTH, Copy


def _copy(source: Path, target: Path, copy: Copy | None = None) -> Copy:
    target.mkdir()
    fds = [os.open(p, os.O_RDONLY | os.O_DIRECTORY) for p in (source.parent, target)]
    copy = copy or Copy()
    try:
        copy.directory(fds[0], os.fsencode(source.name), fds[1])
    finally:
        for fd in fds:
            os.close(fd)
    return copy


def _shape(top: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in [top, *top.rglob("*")]:
        st = path.lstat()
        kind = stat.S_IFMT(st.st_mode)
        content: object = path.read_bytes() if kind == stat.S_IFREG else None
        content = os.readlink(path) if kind == stat.S_IFLNK else content
        names = os.listxattr(path, follow_symlinks=False)
        xattrs = {n: os.getxattr(path, n, follow_symlinks=False) for n in names}
        same = (st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, st.st_rdev)
        size = st.st_size if kind == stat.S_IFREG else 0
        found[str(path.relative_to(top))] = (*same, size, content, xattrs)
    return found


@pytest.mark.kernel
def test_everything(tmp_path: Path) -> None:
    top = tmp_path / "upper"
    (top / "dir/sub").mkdir(parents=True)
    (top / "dir/file").write_bytes(os.urandom(300_000))
    (top / "dir/empty").touch()
    os.chown(top / "dir/file", 1000, 1001)
    (top / "dir/file").chmod(0o4711)
    os.link(top / "dir/file", top / "dir/sub/linked")
    (top / "dangling").symlink_to("/nowhere")
    os.chown(top / "dangling", 5, 6, follow_symlinks=False)
    os.mknod(top / "gone", stat.S_IFCHR, 0)
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(top / "fifo", 0o640)
    os.setxattr(top / "dir", "trusted.overlay.opaque", b"y")
    os.setxattr(top / "dangling", "trusted.x", b"on a link", follow_symlinks=False)
    os.setxattr(top / "gone", "trusted.y", b"on a node", follow_symlinks=False)
    with (top / "sparse").open("wb") as f:
        f.seek(50 << 20)
        f.write(b"end")
        f.truncate(80 << 20)
    (top / os.fsdecode(b"\xff\xfe")).touch()
    (top / "dir").chmod(0o0)
    for path in (top / "dir", top, top / "gone"):
        os.utime(path, ns=(1, 987654321987654321), follow_symlinks=False)
    _copy(top, tmp_path / "copy")
    copy = tmp_path / "copy/upper"
    assert _shape(copy) == _shape(top)
    assert (copy / "dir/file").stat().st_ino == (copy / "dir/sub/linked").stat().st_ino
    assert (copy / "sparse").stat().st_blocks < 1024


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH])
def test_depth(tmp_path: Path, depth: int) -> None:
    top = tmp_path / "upper"
    top.joinpath(*["d"] * depth).mkdir(parents=True)
    if depth < MAX_DEPTH:
        _copy(top, tmp_path / "copy")
        assert (tmp_path / "copy/upper").joinpath(*["d"] * depth).is_dir()
    else:
        with pytest.raises(InvalidArgument, match="deep"):
            _copy(top, tmp_path / "copy")


def test_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper/file").touch()
    with pytest.raises(InterruptedError):
        _copy(tmp_path / "upper", tmp_path / "copy", Copy(lambda: True))


def test_entries_that_change_meanwhile(tmp_path: Path) -> None:
    """Between the listing and the look at it one is removed, others become links out of the tree."""
    (secret := tmp_path / "secret").mkdir()
    (secret / "x").write_text("the host's")
    top = tmp_path / "upper"
    for name in ("a", "b", "c", "d"):
        (top / name).mkdir(parents=True)
        (top / name / "x").write_text("own")
    turns = iter(range(1000))

    def change() -> bool:
        if next(turns) == 0:
            for name in os.listdir(top)[1:]:
                (top / name / "x").unlink()
                (top / name).rmdir()
                if name != "d":
                    (top / name).symlink_to(secret)
        return False

    _copy(top, tmp_path / "copy", Copy(change))
    for path in (tmp_path / "copy/upper").iterdir():
        assert path.is_symlink() or (path / "x").read_text() == "own"


def test_a_file_that_becomes_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("the host's")
    (top := tmp_path / "upper").mkdir()
    (top / "file").write_text("own")
    copy = Copy()
    real = copy._file

    def late(source: int, name: bytes, target: int) -> None:
        (top / "file").unlink()
        (top / "file").symlink_to(tmp_path / "secret")
        real(source, name, target)

    monkeypatch.setattr(copy, "_file", late)
    _copy(top, tmp_path / "copy", copy)
    assert list((tmp_path / "copy/upper").iterdir()) == []
