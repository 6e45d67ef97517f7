"""Trials of what the kernel can do. Each gives an empty text when it works, else why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from dsec.linux.syscalls import (
    MS_NODEV,
    MS_RDONLY,
    fsconfig_create,
    fsconfig_fd,
    fsconfig_string,
    fsmount,
    fsopen,
    libc,
    mount,
    umount2,
)

CLONE_NEWUSER = 0x10000000


def detached_tmpfs(**options: str) -> int:
    """A tmpfs that no path leads to."""
    context = fsopen("tmpfs")
    try:
        for key, value in options.items():
            fsconfig_string(context, key, value)
        fsconfig_create(context, "tmpfs")
        return fsmount(context, 0)
    finally:
        os.close(context)


def overlay_by_fd() -> str:
    """Overlay lowers as detached mounts, by descriptor: Linux 6.15."""
    held: list[int] = []
    try:
        lower, top = detached_tmpfs(), detached_tmpfs()
        held += [lower, top]
        for name in ("upper", "work"):
            os.mkdir(name, dir_fd=top)
        context = fsopen("overlay")
        held.append(context)
        fsconfig_fd(context, "lowerdir+", lower)
        for key, name in (("upperdir", "upper"), ("workdir", "work")):
            held.append(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=top))
            fsconfig_fd(context, key, held[-1])
        fsconfig_create(context, "overlay by descriptor")
        held.append(fsmount(context, 0))
    except OSError as e:
        return str(e)
    finally:
        for fd in reversed(held):
            os.close(fd)
    return ""


def erofs_file_mount() -> str:
    """EROFS on a plain file, with no loop device: Linux 6.12."""
    if not shutil.which("mkfs.erofs"):
        return "not tried: no mkfs.erofs"
    with tempfile.TemporaryDirectory(prefix="dsec-probe-") as name:
        place = Path(name)
        for sub in ("empty", "mnt"):
            (place / sub).mkdir()
        image = str(place / "image")
        subprocess.run(
            ["mkfs.erofs", "--quiet", image, str(place / "empty")], capture_output=True, check=False
        )
        try:
            mount(image, place / "mnt", "erofs", MS_RDONLY | MS_NODEV)
        except OSError as e:
            return str(e.strerror)
        umount2(place / "mnt")
    return ""


def userns_with_maps() -> str:
    """A user namespace can be made."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if libc.unshare(CLONE_NEWUSER) == 0 else 1)
    _, status = os.waitpid(pid, 0)
    return "" if status == 0 else "unshare(CLONE_NEWUSER) is refused"
