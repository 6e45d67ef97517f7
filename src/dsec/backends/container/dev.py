"""/dev of all sandboxes: one read-only tmpfs with the few devices that they may open."""

from __future__ import annotations

import os
from typing import Final

from dsec.linux.probe import detached_tmpfs

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


def make_dev() -> int:
    """A detached mount, to be cloned for each sandbox."""
    fd = detached_tmpfs(mode="0755", size="64k")
    for name, numbers in DEVICES.items():
        os.mknod(name, 0o666 | 0o020000, os.makedev(*numbers), dir_fd=fd)
        os.chmod(name, 0o666, dir_fd=fd)
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(name, 0o755, dir_fd=fd)
    for name, target in LINKS.items():
        os.symlink(target, name, dir_fd=fd)
    return fd
