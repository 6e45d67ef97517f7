"""Layer mounts: each EROFS image is mounted once per node, below the data directory, and shared.

File-backed where the kernel can (Linux 6.12), else over a loop device; found by trial.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from pathlib import Path
from typing import Final

from dsec.backends.base import LayerRef
from dsec.core.errors import LayerCorrupt, UnknownLayer, Unsupported
from dsec.linux import loop
from dsec.linux.mounts import is_mount
from dsec.linux.syscalls import (
    AT_EMPTY_PATH,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_PRIVATE,
    MS_RDONLY,
    OPEN_TREE_CLONE,
    mount,
    open_tree,
    umount2,
)

FLAGS: Final = MS_RDONLY | MS_NODEV
"""Not nosuid: setuid programs of an image work inside; the host's paths to it are closed to all but root."""
CORRUPT: Final = {errno.EUCLEAN, errno.EINVAL, errno.EIO}
"""EUCLEAN is the kernel's EFSCORRUPTED; EINVAL: no EROFS at all."""


SUPERBLOCK: Final = 1024
SUPERBLOCK_SIZE: Final = 128


class LayerMounts:
    """Thread-safe. Mounts stay until `close`: a later sandbox of the same image finds them."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._busy: dict[str, threading.Lock] = {}
        self.file_backed: bool | None = None

    def open(self) -> None:
        """Takes over what an earlier life of this edge left mounted."""
        self.where.mkdir(mode=0o700, exist_ok=True)
        if not is_mount(self.where):
            mount(str(self.where), self.where, "", MS_BIND)
        mount("", self.where, "", MS_PRIVATE)
        for entry in self.where.iterdir():
            if os.path.ismount(entry):
                self._fds[entry.name] = _tree(entry)

    def close(self, *, keep: bool) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        if keep or not self.where.exists():
            return
        for entry in self.where.iterdir():
            with contextlib.suppress(OSError):
                umount2(entry, MNT_DETACH)
            entry.rmdir()
        umount2(self.where, MNT_DETACH)
        self.where.rmdir()

    def get(self, layer: LayerRef) -> int:
        """A descriptor of the layer's mount, to be cloned; it stays ours."""
        name = layer.digest.replace(":", "-")
        fd = self._fds.get(name)
        if fd is not None:
            return fd
        with self._lock:
            busy = self._busy.setdefault(name, threading.Lock())
        with busy:
            if (fd := self._fds.get(name)) is None:
                fd = self._fds[name] = self._mount(layer, self.where / name)
        return fd

    def _mount(self, layer: LayerRef, target: Path) -> int:
        target.mkdir(exist_ok=True)
        try:
            _check_size(layer.path)
            self._mount_image(layer.path, target)
        except OSError as e:
            target.rmdir()
            if e.errno == errno.ENOENT:
                raise UnknownLayer(f"layer {layer.digest}: its image {layer.path} is gone") from e
            if e.errno in CORRUPT:
                raise LayerCorrupt(
                    f"layer {layer.digest} cannot be mounted ({e.strerror}): "
                    "it is cut short or damaged; build it again"
                ) from e
            raise
        return _tree(target)

    def _mount_image(self, path: str, target: Path) -> None:
        if self.file_backed is not False:
            try:
                mount(path, target, "erofs", FLAGS)
            except OSError as e:
                if e.errno not in (errno.ENOTBLK, errno.ENODEV):
                    raise
                if e.errno == errno.ENODEV:
                    raise Unsupported("this kernel has no EROFS: modprobe erofs") from e
                self.file_backed = False
            else:
                self.file_backed = True
                return
        device, fd = loop.attach(path, read_only=True)
        try:
            mount(device, target, "erofs", FLAGS)
        finally:
            os.close(fd)  # the mount holds the device; without a mount it goes by itself


def _check_size(path: str) -> None:
    """Raises OSError EUCLEAN for an image with fewer bytes than its superblock says: the kernel mounts it all
    the same, and answers with I/O errors later."""
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        f.seek(SUPERBLOCK)
        block = f.read(SUPERBLOCK_SIZE)
    if len(block) < SUPERBLOCK_SIZE:
        raise OSError(errno.EUCLEAN, "no superblock", path)
    (blocks,), (devices,) = struct.unpack_from("<I", block, 36), struct.unpack_from("<H", block, 86)
    if not devices and block[12] < 32 and size < blocks << block[12]:
        raise OSError(errno.EUCLEAN, f"{size} bytes of {blocks << block[12]}", path)


def _tree(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def clone(fd: int) -> int:
    """A detached copy of a mount, to be idmapped for one sandbox."""
    return open_tree(fd, "", OPEN_TREE_CLONE | AT_EMPTY_PATH)
