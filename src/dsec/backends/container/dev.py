"""/dev of all sandboxes: one read-only tmpfs with the few devices that they may open."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

from dsec.backends.container.layers import clone
from dsec.linux.probe import detached_tmpfs
from dsec.linux.syscalls import MNT_DETACH, MS_PRIVATE, mount, move_mount, umount2

DEVICES: Final = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
LINKS: Final = {
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
    "ptmx": "pts/ptmx",
}


def make_dev(place: Path) -> int:
    """A mount to be cloned for each sandbox: detached, or at `place` on kernels older than 6.15, which clone
    only what has a place."""
    fd = detached_tmpfs(mode="0755", size="64k")
    for name, numbers in DEVICES.items():
        os.mknod(name, 0o666 | 0o020000, os.makedev(*numbers), dir_fd=fd)
        os.chmod(name, 0o666, dir_fd=fd)
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(name, 0o755, dir_fd=fd)
    for name, target in LINKS.items():
        os.symlink(target, name, dir_fd=fd)
    try:
        os.close(clone(fd))
    except OSError as e:
        if e.errno != errno.EINVAL:
            os.close(fd)
            raise
        return _attached(fd, place)
    return fd


def _attached(fd: int, place: Path) -> int:
    """The same mount by its path; an earlier life's is taken away first."""
    remove_dev(place)
    place.mkdir(mode=0o700)
    try:
        move_mount(fd, place)
        # Where the host's mounts are shared (systemd), each clone would be a peer of this one, and what one
        # sandbox mounts below its /dev would cover that of all others and of the host.
        mount("", place, "", MS_PRIVATE)
        return os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def remove_dev(place: Path) -> None:
    """Idempotent. Sandboxes have clones of their own."""
    with contextlib.suppress(OSError):
        umount2(place, MNT_DETACH)
    with contextlib.suppress(FileNotFoundError):
        place.rmdir()
