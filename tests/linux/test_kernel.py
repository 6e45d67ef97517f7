"""Thin wrappers, each against the kernel."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.linux import btrfs, loop, probe
from dsec.linux.syscalls import (
    MNT_DETACH,
    MS_NODEV,
    MS_RDONLY,
    fsconfig_create,
    fsopen,
    keep_capabilities,
    mount,
    move_mount,
    open_tree,
    pidfd_send_signal,
    set_fs_ids,
    umount2,
)

pytestmark = pytest.mark.kernel


def test_mounts_by_descriptor(tmp_path: Path) -> None:
    fd = probe.detached_tmpfs(size="64k", mode="0700")
    os.mkdir("inside", dir_fd=fd)
    move_mount(fd, tmp_path)
    assert os.path.ismount(tmp_path) and os.listdir(tmp_path) == ["inside"]
    os.close(fd)
    umount2(tmp_path, MNT_DETACH)


def test_errors_say_what_and_where() -> None:
    with pytest.raises(OSError, match="no-such-fs") as e:
        fsopen("no-such-fs")
    assert e.value.errno == errno.ENODEV
    with pytest.raises(FileNotFoundError, match="/no/such"):
        mount("tmpfs", "/no/such", "tmpfs", 0)
    with pytest.raises(FileNotFoundError, match="/no/such"):
        umount2("/no/such")
    with pytest.raises(OSError, match="99999"):
        open_tree(99999, "", 0x1000)


def test_the_contexts_log_is_told() -> None:
    context = fsopen("overlay")
    try:
        with pytest.raises(OSError, match="overlay without lower"):
            fsconfig_create(context, "overlay without lower")
    finally:
        os.close(context)


def test_fs_ids_keep_capabilities(tmp_path: Path) -> None:
    """A thread's own matter, so in a thread."""
    (tmp_path / "closed").mkdir(mode=0o700)
    made: list[os.stat_result | BaseException] = []

    def body() -> None:
        try:
            keep_capabilities()
            set_fs_ids(12345, 12346)
            (tmp_path / "closed" / "file").touch()
            made.append((tmp_path / "closed" / "file").stat())
        except BaseException as e:
            made.append(e)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    (stat,) = made
    assert isinstance(stat, os.stat_result) and (stat.st_uid, stat.st_gid) == (12345, 12346)
    (tmp_path / "mine").touch()
    assert (tmp_path / "mine").stat().st_uid == 0


def test_pidfd() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    pidfd = os.pidfd_open(child.pid)
    pidfd_send_signal(pidfd, 9)
    assert child.wait() == -9
    with pytest.raises(ProcessLookupError):
        pidfd_send_signal(pidfd, 9)
    os.close(pidfd)


def test_loop_device_goes_by_itself(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as f:
        f.truncate(1 << 20)
    device, fd = loop.attach(image, read_only=True)
    assert loop.devices_of(image) == [device]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[int]:
    image, where = tmp_path / "pool", tmp_path / "mnt"
    with image.open("wb") as f:
        f.truncate(256 << 20)
    where.mkdir()
    subprocess.run(["mkfs.btrfs", "-q", "-m", "single", str(image)], check=True)
    device, fd = loop.attach(image, read_only=False)
    mount(device, where, "btrfs", MS_NODEV)
    os.close(fd)
    top = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    yield top
    os.close(top)
    umount2(where)


def _fill(fd: int, size: int) -> None:
    for _ in range(size >> 20):
        os.write(fd, os.urandom(1 << 20))
        os.fsync(fd)


def test_subvolume_with_a_limit(pool: int) -> None:
    assert btrfs.enable_quota(pool) in ("simple", "qgroups")
    btrfs.subvolume_create(pool, "one")
    with pytest.raises(FileExistsError):
        btrfs.subvolume_create(pool, "one")
    fd = os.open("one", os.O_RDONLY, dir_fd=pool)
    assert btrfs.is_subvolume(fd)
    btrfs.limit(fd, 4 << 20)
    file = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    with pytest.raises(OSError, match=r"quota exceeded|No space"):
        _fill(file, 64 << 20)
    os.close(file)
    os.close(fd)
    btrfs.subvolume_destroy(pool, "one")
    with pytest.raises(FileNotFoundError):
        btrfs.subvolume_destroy(pool, "one")


def test_probes_leave_nothing() -> None:
    for trial in (probe.overlay_by_fd, probe.erofs_file_mount, probe.userns_with_maps):
        assert isinstance(trial(), str)


def test_newer_kernels_take_the_newer_path() -> None:
    """Runs by descriptor are skipped where the kernel cannot: a broken trial must not pass for that."""
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if release < (6, 15):
        pytest.skip("this kernel may not have overlay by descriptor")
    assert probe.overlay_by_fd() == ""


def test_mount_refuses_a_write(tmp_path: Path) -> None:
    mount("tmpfs", tmp_path, "tmpfs", MS_RDONLY, "size=4k")
    with pytest.raises(OSError, match="Read-only"):
        (tmp_path / "x").touch()
    umount2(tmp_path)
