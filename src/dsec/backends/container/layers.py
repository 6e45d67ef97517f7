"""Layer mounts: each EROFS image is mounted once per node, below the data directory, and shared.

Its metadata is the node's own copy where the store lies elsewhere; its blobs are read there, on demand.
Not nosuid: setuid programs of an image work inside; the host's paths to it are closed to all but root.
File-backed where the kernel can (Linux 6.12), else over loop devices; found by trial.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec.backends.base import LayerRef
from dsec.core.errors import DSecError, LayerCorrupt, UnknownLayer, Unsupported
from dsec.layers.metadata_cache import MetadataCache
from dsec.linux import loop
from dsec.linux.mounts import is_mount
from dsec.linux.syscalls import (
    AT_EMPTY_PATH,
    MNT_DETACH,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_PRIVATE,
    OPEN_TREE_CLONE,
    fsconfig_create,
    fsconfig_flag,
    fsconfig_string,
    fsmount,
    fsopen,
    mount,
    move_mount,
    open_tree,
    umount2,
)

CAP: Final = 1024
"""Mounts that stay though nothing stands on them."""
CORRUPT: Final = {errno.EUCLEAN, errno.EINVAL, errno.EIO}
"""EUCLEAN is the kernel's EFSCORRUPTED; EINVAL: no EROFS at all."""


SUPERBLOCK: Final = 1024
SUPERBLOCK_SIZE: Final = 128


class LayerMounts:
    """Thread-safe. One mount per layer: a later sandbox of the same image finds it.

    Of those that no sandbox uses go: beyond `cap` mounts the longest unused first, and those whose image was
    removed from the store, so that its space is free. (A mount that is taken away
    lives on under the sandboxes that stand on it; only sharing with later ones would be lost.)
    """

    def __init__(
        self,
        where: Path,
        cache: MetadataCache,
        *,
        cap: int = CAP,
        mounted: Callable[[LayerRef], None] = lambda layer: None,
    ) -> None:
        """mounted: told of a layer that was mounted just now, before anything is read of it."""
        self.where = where
        self._told = mounted
        self._cache = cache
        self._cap = cap
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        """By name, the longest unused first."""
        self._paths: dict[str, str] = {}
        """In the store, of those mounted in this life."""
        self._busy: dict[str, threading.Lock] = {}
        self._users: dict[str, set[str]] = {}
        """Sandboxes that stand on a layer, by the layer's name."""
        self.file_backed: bool | None = None

    def open(self) -> None:
        """Takes over what an earlier life of this edge left mounted."""
        self._cache.open()
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
        self._users.clear()
        if keep or not self.where.exists():
            return
        for entry in self.where.iterdir():
            _take_away(entry)
        umount2(self.where, MNT_DETACH)
        self.where.rmdir()

    def use(self, layers: list[LayerRef], sandbox_id: str) -> list[int]:
        """Descriptors of the layers' mounts, to be cloned; they stay ours, until `leave` at the least."""
        with self._lock:
            for layer in layers:
                self._users.setdefault(_name(layer.digest), set()).add(sandbox_id)
        return [self._get(layer) for layer in layers]

    def note(self, digests: list[str], sandbox_id: str) -> None:
        """That a sandbox of an earlier life of this edge stands on these."""
        with self._lock:
            for digest in digests:
                self._users.setdefault(_name(digest), set()).add(sandbox_id)

    def leave(self, sandbox_id: str) -> None:
        """The sandbox is gone. Idempotent."""
        with self._lock:
            for name in [name for name, users in self._users.items() if sandbox_id in users]:
                self._users[name].discard(sandbox_id)
                if not self._users[name]:
                    del self._users[name]
        self._trim()

    def in_use(self) -> list[str]:
        """Digests of the layers that some sandbox stands on."""
        with self._lock:
            return list(self._users)

    @property
    def mounted(self) -> int:
        return len(self._fds)

    def _get(self, layer: LayerRef) -> int:
        name = _name(layer.digest)
        with self._lock:
            busy = self._busy.setdefault(name, threading.Lock())
            if (fd := self._fds.pop(name, None)) is not None:
                self._fds[name] = fd
                return fd
        with busy:
            if (fd := self._fds.get(name)) is None:
                fd = self._mount(layer, self.where / name)
                self._told(layer)
                with self._lock:
                    self._fds[name] = fd
                    self._paths[name] = layer.path
        self._trim()
        return fd

    def _trim(self) -> None:
        with self._lock:
            excess = max(0, len(self._fds) - self._cap)
            idle = [name for name in self._fds if name not in self._users]
            gone = [name for name in idle[excess:] if not os.path.exists(self._paths.get(name, "/"))]
            going = [(name, self._fds.pop(name)) for name in (*idle[:excess], *gone)]
            for name, _ in going:
                self._paths.pop(name, None)
        for name, fd in going:
            os.close(fd)
            _take_away(self.where / name)

    def _mount(self, layer: LayerRef, target: Path) -> int:
        target.mkdir(exist_ok=True)
        try:
            self._mount_checked(layer, target)
        except OSError as e:
            target.rmdir()
            if e.errno == errno.ENOENT:
                raise UnknownLayer(f"layer {layer.digest}: {e.filename or layer.path} is gone") from e
            if e.errno in CORRUPT:
                raise LayerCorrupt(
                    f"layer {layer.digest} cannot be mounted ({e.strerror}): "
                    "it is cut short or damaged; build it again"
                ) from e
            raise
        except DSecError:
            target.rmdir()
            raise
        return _tree(target)

    def _mount_checked(self, layer: LayerRef, target: Path) -> None:
        """A copy of the metadata that was cut off or damaged since it was made is made anew, once."""
        image = self._cache.local(layer)
        try:
            _check_size(image)
            self._mount_files((image, *layer.blobs), target)
        except OSError as e:
            if image == layer.path or e.errno not in CORRUPT:
                raise
            self._cache.drop(layer)
            image = self._cache.local(layer)
            _check_size(image)
            self._mount_files((image, *layer.blobs), target)

    def _mount_files(self, files: tuple[str, ...], target: Path) -> None:
        if self.file_backed is not False:
            try:
                self._mount_file_backed(files, target)
            except OSError as e:
                if e.errno not in (errno.ENOTBLK, errno.ENODEV):
                    raise
                if e.errno == errno.ENODEV:
                    raise Unsupported("this kernel has no EROFS: modprobe erofs") from e
                self.file_backed = False
            else:
                self.file_backed = True
                return
        with (
            contextlib.ExitStack() as held
        ):  # the mount holds the devices; without a mount they go by themselves
            devices = []
            for file in files:
                device, fd = loop.attach(file, read_only=True)
                held.callback(os.close, fd)
                devices.append(device)
            _mount_erofs(devices, target)

    @staticmethod
    def _mount_file_backed(files: tuple[str, ...], target: Path) -> None:
        """By descriptor: a value of fsconfig has at most 255 characters, a path may have more."""
        fds = []
        try:
            for file in files:
                fds.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            _mount_erofs([f"/proc/self/fd/{fd}" for fd in fds], target)
        finally:
            for fd in fds:
                os.close(fd)


def _mount_erofs(files: list[str], target: Path) -> None:
    context = fsopen("erofs")
    try:
        fsconfig_string(context, "source", files[0])
        fsconfig_flag(context, "ro")
        for blob in files[1:]:
            fsconfig_string(context, "device", blob)
        fsconfig_create(context, f"erofs {target.name[:12]}")
        mounted = fsmount(context, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV)
    finally:
        os.close(context)
    try:
        move_mount(mounted, target)
    finally:
        os.close(mounted)


def _take_away(entry: Path) -> None:
    with contextlib.suppress(OSError):
        umount2(entry, MNT_DETACH)
    entry.rmdir()


def _name(digest: str) -> str:
    return digest.replace(":", "-")


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
