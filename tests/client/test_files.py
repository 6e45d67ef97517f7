"""Files through the SDK, real HTTP and the real edge; the fake keeps a tree as the archive that came."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from dsec.core import errors


async def test_write_and_read(sandbox):
    info = await sandbox.files.write("/tmp/a b+c%.txt", "text: \u00e4", mode=0o600)
    assert info.size == 8
    assert await sandbox.files.read_text("/tmp/a b+c%.txt") == "text: \u00e4"
    assert await sandbox.files.read("/tmp/a b+c%.txt", offset=2, length=3) == b"xt:"
    await sandbox.files.write("/tmp/a b+c%.txt", b"!", append=True)
    assert (await sandbox.files.read("/tmp/a b+c%.txt")).endswith(b"!")


async def test_large_file_streamed_both_ways(sandbox, tmp_path):
    data = os.urandom(1 << 20) * 5 + b"end"
    (tmp_path / "up").write_bytes(data)
    done = await sandbox.files.upload(tmp_path / "up", "/tmp/big")
    assert done.bytes == len(data)
    assert [e.size for e in await sandbox.files.list("/tmp")] == [len(data)]
    done = await sandbox.files.download("/tmp/big", tmp_path / "down")
    assert done.bytes == len(data) and (tmp_path / "down").read_bytes() == data
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []

    async def pieces():
        for _ in range(3):
            yield b"x" * 300_000

    assert (await sandbox.files.write("/tmp/pieces", pieces())).size == 900_000


async def test_names(sandbox):
    await sandbox.files.mkdir("/tmp/d/e")
    await sandbox.files.write("/tmp/d/e/f", b"1")
    await sandbox.files.move("/tmp/d/e/f", "/tmp/d/g")
    await sandbox.files.write("/tmp/d/h", b"2")
    with pytest.raises(errors.FileExists):
        await sandbox.files.move("/tmp/d/g", "/tmp/d/h")
    await sandbox.files.move("/tmp/d/g", "/tmp/d/h", overwrite=True)
    assert await sandbox.files.read("/tmp/d/h") == b"1"
    with pytest.raises(errors.DirectoryNotEmpty):
        await sandbox.files.remove("/tmp/d")
    await sandbox.files.remove("/tmp/d", recursive=True)
    assert not await sandbox.files.exists("/tmp/d")
    with pytest.raises(errors.FileNotFound):
        await sandbox.files.remove("/tmp/d")
    await sandbox.files.remove("/tmp/d", missing_ok=True)


async def test_names_that_are_no_text(sandbox):
    name = b"/tmp/odd-\xff-name"
    info = await sandbox.files.write(name, b"x")
    assert info.path_bytes == name and "\ufffd" in info.path
    [entry] = await sandbox.files.list("/tmp")
    assert entry.path_bytes == name
    assert await sandbox.files.read(entry.path_bytes) == b"x"
    assert await sandbox.files.read(os.fsdecode(name)) == b"x"


@pytest.mark.parametrize("path", ["relative", "", "/a\0b", "/" + "x" * 5000, "/\ud800"])
async def test_wrong_paths(sandbox, path):
    for call in (
        sandbox.files.write(path, b"x"),
        sandbox.files.read(path),
        sandbox.files.list(path),
        sandbox.files.stat(path),
        sandbox.files.mkdir(path),
        sandbox.files.remove(path),
        sandbox.files.move("/etc", path),
    ):
        with pytest.raises(errors.PathInvalid):
            await call


async def test_errors_are_told_before_and_after_the_bytes(sandbox, tmp_path):
    with pytest.raises(errors.FileNotFound):
        await sandbox.files.read("/none")
    with pytest.raises(errors.IsADirectory):
        await sandbox.files.write("/tmp", b"x" * (8 << 20))
    with pytest.raises(errors.FileNotFound):
        await sandbox.files.write("/no/such/x", b"x" * (8 << 20), parents=False)
    await sandbox.files.write("/tmp/x", b"x" * 1000)
    with pytest.raises(errors.PayloadTooLarge):
        await sandbox.files.download("/tmp/x", tmp_path / "x", limit_bytes=10)
    assert not [p for p in tmp_path.iterdir() if p.name == "x" or p.name.startswith(".x")]


async def test_trees(sandbox, tmp_path: Path):
    up = tmp_path / "up"
    (up / "deep/er").mkdir(parents=True)
    (up / "deep/er/file").write_bytes(b"content" * 100_000)
    (up / "tool").write_bytes(b"#!")
    (up / "tool").chmod(0o755)
    os.utime(up / "tool", ns=(5_000_000_000, 5_250_000_000))
    (up / "link").symlink_to("/etc/passwd")
    os.link(up / "tool", up / "hard")
    os.mkfifo(up / "fifo")
    (up / os.fsdecode(b"odd-\xff")).write_bytes(b"?")
    (up / ("n" * 200)).mkdir()
    (up / ("n" * 200) / ("m" * 200)).write_bytes(b"long")
    await sandbox.files.upload(up, "/tmp/tree")

    down = tmp_path / "down"
    await sandbox.files.download("/tmp/tree", down)
    assert (down / "deep/er/file").read_bytes() == b"content" * 100_000
    assert (down / "tool").stat().st_mode & 0o777 == 0o755
    assert (down / "tool").stat().st_mtime_ns == 5_250_000_000
    assert os.readlink(down / "link") == "/etc/passwd"
    assert (down / "hard").samefile(down / "tool")
    assert not (down / "fifo").exists()
    assert (down / os.fsdecode(b"odd-\xff")).read_bytes() == b"?"
    assert (down / ("n" * 200) / ("m" * 200)).read_bytes() == b"long"


def archive(*members: tuple[str, bytes | str, str]) -> bytes:
    """(kind, name, content or target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for kind, name, content in members:
            info = tarfile.TarInfo(name)
            if kind == "file":
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content.encode()))
                continue
            info.type = {"symlink": tarfile.SYMTYPE, "link": tarfile.LNKTYPE, "dir": tarfile.DIRTYPE}[kind]
            info.linkname = content
            tar.addfile(info)
    return out.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("file", "../out", "x")],
        [("file", "/tmp/dsec-out", "x")],
        [("file", "a/../../out", "x")],
        [("symlink", "s", ".."), ("file", "s/out", "x")],
        [("dir", "d", ""), ("symlink", "d/s", "../.."), ("file", "d/s/out", "x")],
        [("symlink", "s", "../outside"), ("link", "out", "s/secret")],
        [("link", "l", "../outside/secret")],
    ],
)
async def test_hostile_archive(sandbox, tmp_path: Path, members):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    await sandbox.files.mkdir("/tmp/tree")
    await sandbox.files.write("/tmp/tree/.tar", archive(*members))
    with pytest.raises((errors.PathInvalid, errors.NotADirectory)):
        await sandbox.files.download("/tmp/tree", tmp_path / "down")
    assert not (tmp_path / "out").exists()
    assert not any(p.read_text() == "secret" for p in (tmp_path / "down").rglob("*") if p.is_file())


async def test_symlinks_in_the_target_are_not_followed(sandbox, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "victim").write_text("victim")
    down = tmp_path / "down"
    down.mkdir()
    (down / "sub").symlink_to(tmp_path / "outside")
    (down / "file").symlink_to(tmp_path / "victim")
    await sandbox.files.mkdir("/tmp/tree")
    await sandbox.files.write("/tmp/tree/.tar", archive(("file", "file", "new"), ("file", "sub/x", "x")))
    with pytest.raises((errors.PathInvalid, errors.NotADirectory)):
        await sandbox.files.download("/tmp/tree", down)
    assert (tmp_path / "victim").read_text() == "victim"
    assert list((tmp_path / "outside").iterdir()) == []


async def test_garbage_instead_of_an_archive(sandbox, tmp_path: Path):
    await sandbox.files.mkdir("/tmp/tree")
    await sandbox.files.write("/tmp/tree/.tar", b"garbage" * 1000)
    with pytest.raises(errors.ProtocolError):
        await sandbox.files.download("/tmp/tree", tmp_path / "down")


async def test_watch_errors(sandbox):
    with pytest.raises(errors.PathInvalid):
        async for _ in sandbox.files.watch("relative"):
            pass
