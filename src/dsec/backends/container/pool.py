"""Writable layers: a btrfs pool file of the edge's own, one subvolume with a limit per sandbox.

A kernel without btrfs, or a host without mkfs.btrfs, gets plain directories with no limit, and is told so.

<data>/pool.btrfs        sparse; what it holds is thrown away, so nothing in it is made durable
<data>/pool/<sandbox>/   subvolume: upper/ and work/ of the overlay
<data>/pool/.<name>/     read-only snapshot of one, while a layer is made of it
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from dsec.core.errors import DiskFull, Unsupported
from dsec.linux import btrfs, loop
from dsec.linux.copy_tree import Copy
from dsec.linux.mounts import is_mount
from dsec.linux.syscalls import (
    MNT_DETACH,
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NOSUID,
    MS_REMOUNT,
    mount,
    syncfs,
    umount2,
)

log = logging.getLogger(__name__)
MIN_SIZE: Final = 256 << 20
MAX_SIZE: Final = 1 << 44
OPTIONS: Final = "nobarrier,nodatasum,commit=300,space_cache=v2,discard=async"

Limit = Literal["simple", "qgroups", "none"]
How = Literal["snapshot", "reflink", "copy"]
"""By how much a snapshot costs while the sandbox waits: nothing, by file, by byte."""


class Pool:
    """Thread-safe: every call is one or two system calls on descriptors of its own."""

    def __init__(self, data: Path) -> None:
        self.file = data / "pool.btrfs"
        self.where = data / "pool"
        self.limited_by: Limit = "none"
        self.fd = -1
        self.why_not = ""
        self._fsid = ""

    @property
    def described(self) -> str:
        if self.limited_by == "none":
            return f"none: {self.why_not or 'plain directories, found as they were'}"
        return f"btrfs pool, {self.limited_by} quota"

    def open(self) -> None:
        """Mount the pool, made anew unless an earlier life's mount or its sandboxes still hold it."""
        self.where.mkdir(mode=0o700, exist_ok=True)
        if not is_mount(self.where):
            self._mount_or_not()
        self.where.chmod(0o700)
        self.fd = os.open(self.where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if btrfs.is_subvolume(self.fd):
            self.limited_by = "simple" if btrfs.enable_quota(self.fd) == "simple" else "qgroups"
            self._fsid = btrfs.filesystem_id(self.fd)

    def _mount_or_not(self) -> None:
        try:
            self._mount()
        except Unsupported as e:
            self.why_not = e.message
            log.warning("writable layers have no limit on disk: %s", e.message)
            mount(str(self.where), self.where, "", MS_BIND)
            # Flags of a bind mount are set by a second call alone.
            mount("", self.where, "", MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV)

    def _mount(self) -> None:
        """What no device holds is of before a reboot: no record can name what is in it, it may be torn, and
        only a file system that was made anew is sure to be whole."""
        if held := loop.devices_of(self.file.resolve()) if self.file.exists() else []:
            self._mount_device(held[0])
            return
        self.file.unlink(missing_ok=True)
        self._make()
        device, fd = loop.attach(self.file, read_only=False, direct_io=False)
        try:
            self._mount_device(device)
        finally:
            os.close(fd)

    def _mount_device(self, device: str) -> None:
        try:
            mount(device, self.where, "btrfs", MS_NOSUID | MS_NODEV | MS_NOATIME, OPTIONS)
        except OSError as e:
            if e.errno == errno.ENODEV:
                raise Unsupported("this kernel has no btrfs (modprobe btrfs)") from e
            raise Unsupported(f"{self.file} cannot be mounted: {e.strerror}") from e

    def _make(self) -> None:
        free = shutil.disk_usage(self.file.parent).free
        if free < MIN_SIZE:
            raise DiskFull(f"{self.file.parent} has {free >> 20} MiB free, the pool needs {MIN_SIZE >> 20}")
        beside = self.file.with_suffix(".new")
        with beside.open("wb") as f:
            f.truncate(min(MAX_SIZE, max(MIN_SIZE, free // 100 * 95)) & ~0xFFFFF)
        if not shutil.which("mkfs.btrfs"):
            beside.unlink()
            raise Unsupported("there is no mkfs.btrfs (package btrfs-progs)")
        command = ["mkfs.btrfs", "-q", "-f", "-K", "-m", "single", "-d", "single", str(beside)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            beside.unlink()
            raise Unsupported(f"{' '.join(command)}: {done.stderr.strip()}")
        beside.rename(self.file)

    def close(self, *, keep: bool) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if keep:
            return
        if is_mount(self.where):
            umount2(self.where, MNT_DETACH)
        self.file.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.where.rmdir()

    def create(self, name: str, limit_bytes: int) -> int:
        """A descriptor of a fresh subvolume with upper/ and work/ in it, and room for `limit_bytes`."""
        try:
            if self.limited_by == "none":
                os.mkdir(name, 0o700, dir_fd=self.fd)
            else:
                btrfs.subvolume_create(self.fd, name)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                if self.limited_by != "none":
                    btrfs.limit(fd, limit_bytes)
                os.mkdir("upper", 0o755, dir_fd=fd)
                os.mkdir("work", 0o700, dir_fd=fd)
            except BaseException:
                os.close(fd)
                raise
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(
                    "the pool of writable layers is full: stop sandboxes, or give the node more disk"
                ) from e
            raise
        return fd

    def destroy(self, name: str) -> None:
        """Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            if self.limited_by == "none":
                shutil.rmtree(name, dir_fd=self.fd)
            else:
                btrfs.subvolume_destroy(self.fd, name)

    def has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def flush(self) -> None:
        """Writes out what is dirty: a snapshot soon after has the less to wait for."""
        if self.limited_by != "none":
            syncfs(self.fd)

    def snapshot(self, name: str, copy: str, stop: Callable[[], bool]) -> How:
        """Leaves `.<copy>/upper` as upper/ of `name` is now; nothing of it where it fails.

        Without btrfs every file is copied, by reflink where the file system can; nothing may write meanwhile,
        and once `stop` says so it ends with InterruptedError. OSError ENOENT where the sandbox is gone.
        """
        source = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            if self.limited_by != "none":
                btrfs.snapshot_create(self.fd, f".{copy}", source)
                return "snapshot"
            return self._copy(source, copy, stop)
        finally:
            os.close(source)

    def _copy(self, source: int, copy: str, stop: Callable[[], bool]) -> How:
        os.mkdir(f".{copy}", 0o700, dir_fd=self.fd)
        try:
            target = os.open(f".{copy}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                done = Copy(stop)
                done.directory(source, b"upper", target)
            finally:
                os.close(target)
        except BaseException:
            shutil.rmtree(f".{copy}", dir_fd=self.fd)
            raise
        return "reflink" if done.reflinks else "copy"

    def destroy_snapshot(self, copy: str) -> None:
        """Idempotent."""
        if self.fd < 0:  # of a pool that is closed, the next life takes it away
            return
        self.destroy(f".{copy}")
        if self.limited_by != "none":
            btrfs.sync(self.fd)  # what only the snapshot held still counts against its sandbox

    def snapshots(self) -> set[str]:
        return {name[1:] for name in self._directories() if name.startswith(".")}

    def usage(self, name: str) -> int | None:
        """Bytes; None where nothing counts them."""
        if self.limited_by == "none":
            return None
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        try:
            return btrfs.usage(fd, self._fsid)
        finally:
            os.close(fd)

    def names(self) -> set[str]:
        return {name for name in self._directories() if not name.startswith(".")}

    def _directories(self) -> set[str]:
        with os.scandir(self.where) as entries:
            return {e.name for e in entries if e.is_dir(follow_symlinks=False)}
