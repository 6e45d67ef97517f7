"""Files in real sandboxes: each kind that peers get wrong."""

from __future__ import annotations

import asyncio
import os

import pytest

from dsec.client import DSecClient, DSecContainerRunArgs
from dsec.core import errors

pytestmark = pytest.mark.kernel


@pytest.fixture
async def sandbox(server):
    async with DSecClient(url=server.url, token=server.token) as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="base"))
        yield sandbox
        await sandbox.stop()


async def test_readable_once_acknowledged_with_mode_owner_and_times(sandbox):
    await sandbox.files.write("/srv/a/b/x.sh", b"#!/bin/sh\necho ran\n", mode=0o750, owner="daemon")
    listing = await sandbox.exec(["stat", "-c", "%a %U %G", "/srv/a/b/x.sh"])
    assert listing.stdout == b"750 daemon daemon\n"
    assert (await sandbox.exec(["/srv/a/b/x.sh"], user="daemon")).stdout == b"ran\n"
    await sandbox.files.write("/tmp/mine/x", b"1", user="daemon")
    listing = await sandbox.exec(["stat", "-c", "%U", "/tmp/mine", "/tmp/mine/x"])
    assert listing.stdout == b"daemon\ndaemon\n"
    await sandbox.files.write("/srv/a/b/x.sh", b"#!/bin/sh\necho again\n")
    info = await sandbox.files.stat("/srv/a/b/x.sh")
    assert (info.mode, info.user) == (0o750, "daemon")


async def test_acting_user_is_held_to_permissions(sandbox):
    for attempt in (
        sandbox.files.read("/etc/shadow", user="daemon"),
        sandbox.files.write("/etc/passwd", b"x", user="daemon"),
        sandbox.files.remove("/etc/passwd", user="daemon"),
        sandbox.files.mkdir("/etc/d", user="daemon"),
        sandbox.files.move("/etc/passwd", "/tmp/p", user="daemon"),
    ):
        with pytest.raises(errors.FileAccessDenied):
            await attempt


async def test_special_files_do_not_hang(sandbox):
    await sandbox.exec(["mkfifo", "/tmp/fifo"])
    for path in ("/tmp/fifo", "/dev/zero", "/dev/tty"):
        with pytest.raises(errors.DSecError):
            async with asyncio.timeout(20):
                await sandbox.files.read(path)
    assert b"processor" in await sandbox.files.read("/proc/cpuinfo")


async def test_links_are_written_through_and_stay_inside(sandbox, tmp_path):
    await sandbox.exec(
        ["/bin/sh", "-c", "echo old > /srv/real; ln -s real /srv/link; ln -s /nowhere /srv/dangling"]
    )
    await sandbox.files.write("/srv/link", b"new")
    assert await sandbox.files.read("/srv/real") == b"new"
    assert (await sandbox.files.stat("/srv/link", follow=False)).type == "symlink"
    with pytest.raises(errors.FileNotFound):
        await sandbox.files.stat("/srv/dangling")
    await sandbox.exec(["ln", "-s", f"{tmp_path}/outside", "/srv/out"])
    (tmp_path / "outside").write_bytes(b"host")
    with pytest.raises(errors.FileNotFound):
        await sandbox.files.read("/srv/out")


async def test_trees_both_ways(sandbox, tmp_path):
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / ("n" * 200)).write_bytes(b"long name")
    (source / "exec").write_bytes(b"#!/bin/sh\n")
    (source / "exec").chmod(0o755)
    os.utime(source / "exec", ns=(10**18, 10**18 + 123_456_789))
    (source / "link").symlink_to("deep")
    os.link(source / "exec", source / "hard")
    (source / os.fsdecode(b"odd-\xff")).write_bytes(b"odd")
    (source / "empty").mkdir()
    await sandbox.files.upload(source, "/srv/tree")
    assert (await sandbox.exec(["stat", "-c", "%a %h", "/srv/tree/exec"])).stdout == b"755 2\n"
    back = tmp_path / "back"
    await sandbox.files.download("/srv/tree", back)
    assert (back / "deep" / "er" / ("n" * 200)).read_bytes() == b"long name"
    assert (back / "exec").stat().st_mtime_ns == 10**18 + 123_456_789
    assert os.readlink(back / "link") == "deep"
    assert (back / os.fsdecode(b"odd-\xff")).read_bytes() == b"odd"
    assert (back / "empty").is_dir()


async def test_moves_across_layers(sandbox):
    await sandbox.files.move("/usr/share", "/usr/share-moved")
    assert not await sandbox.files.exists("/usr/share")
    assert (await sandbox.exec(["ls", "/usr/share-moved"])).stdout
    await sandbox.files.write("/tmp/a", b"a")
    await sandbox.files.write("/tmp/b", b"b")
    with pytest.raises(errors.FileExists):
        await sandbox.files.move("/tmp/a", "/tmp/b", overwrite=False)
    await sandbox.files.move("/tmp/a", "/dev/shm/a")
    assert await sandbox.files.read("/dev/shm/a") == b"a"


async def test_watch(sandbox):
    await sandbox.files.mkdir("/srv/w")
    seen: list[tuple[str, str]] = []
    async with asyncio.timeout(30):
        begun = False
        async for event in sandbox.files.watch("/srv/w", recursive=True):
            seen.append((event.event, str(event.path)))
            if not begun:
                begun = True
                await sandbox.exec(
                    ["/bin/sh", "-c", "mkdir /srv/w/d; sleep 0.3; echo x > /srv/w/d/f; rm /srv/w/d/f"]
                )
            if ("removed", "/srv/w/d/f") in seen:
                break
    assert ("created", "/srv/w/d") in seen
    assert ("modified", "/srv/w/d/f") in seen


async def test_gigabytes_are_not_held_in_memory(server, sandbox):
    """64 MiB here; the benchmark `transfer` does 1 GiB and states the server's growth."""

    async def blocks():
        for i in range(64):
            yield bytes([i]) * (1 << 20)

    await sandbox.files.write("/srv/large", blocks())
    digest = await sandbox.exec(["sha256sum", "/srv/large"], timeout=60)
    import hashlib

    expected = hashlib.sha256(b"".join(bytes([i]) * (1 << 20) for i in range(64))).hexdigest()
    assert digest.stdout_text.split()[0] == expected
    got = hashlib.sha256()
    async for chunk in sandbox.files.stream("/srv/large"):
        got.update(chunk)
    assert got.hexdigest() == expected
