"""The root of a sandbox: idmapped layers below, an idmapped writable layer above, as one detached mount.

Two ways, chosen by trial at the start; one suite runs against both.
- `fd` (Linux 6.15): every lower is a detached mount, given to overlayfs by descriptor.
- `staged` (Linux 6.1): lowers are attached in a mount namespace of one thread alone, and given by path.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Protocol

from dsec.backends.container.layers import clone
from dsec.linux.syscalls import (
    CLONE_FS,
    CLONE_NEWNS,
    MNT_DETACH,
    MOUNT_ATTR_IDMAP,
    MOUNT_ATTR_NODEV,
    MS_PRIVATE,
    MS_REC,
    fsconfig_create,
    fsconfig_fd,
    fsconfig_flag,
    fsconfig_string,
    fsmount,
    fsopen,
    keep_capabilities,
    mount,
    mount_setattr,
    move_mount,
    set_fs_ids,
    umount2,
    unshare,
)

OPTIONS: Final = {"redirect_dir": "nofollow", "metacopy": "off", "index": "off", "xino": "off"}
"""Explicit, whatever the module's defaults: an image must not be able to redirect a lookup."""

_thread = threading.local()


class Overlay(Protocol):
    def build(self, lowers: list[int], writable: int, userns: int, root_id: int) -> int:
        """A detached overlay mount. `lowers` are mounts, bottom to top; `writable` holds upper/ and work/."""

    def close(self) -> None: ...


@contextlib.contextmanager
def closing(fds: list[int]) -> Iterator[list[int]]:
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def idmapped(fd: int, userns: int) -> int:
    """A detached clone of a mount whose ids on disk are those inside the user namespace."""
    copy = clone(fd)
    try:
        mount_setattr(copy, attr_set=MOUNT_ATTR_IDMAP, userns_fd=userns)
    except BaseException:
        os.close(copy)
        raise
    return copy


@contextlib.contextmanager
def acting_as(root_id: int) -> Iterator[None]:
    """The overlay writes with the ids of the thread that mounts it: they must be mapped in the upper, or the
    mount is silently read-only. Capabilities stay (SECBIT_NO_SETUID_FIXUP)."""
    if not getattr(_thread, "ready", False):
        keep_capabilities()
        _thread.ready = True
    set_fs_ids(root_id, root_id)
    try:
        yield
    finally:
        set_fs_ids(0, 0)


def _options(context: int) -> None:
    for key, value in OPTIONS.items():
        fsconfig_string(context, key, value)
    # Nothing in a sandbox outlives it but by a copy that is made outside: a sync inside may do nothing.
    fsconfig_flag(context, "volatile")


class ByDescriptor:
    name = "fd"

    def build(self, lowers: list[int], writable: int, userns: int, root_id: int) -> int:
        context = fsopen("overlay")
        with closing([context]) as held:
            fsconfig_string(context, "source", "dsec")
            for lower in reversed(lowers):
                held.append(idmapped(lower, userns))
                fsconfig_fd(context, "lowerdir+", held[-1])
            held.append(top := idmapped(writable, userns))
            for key, name in (("upperdir", "upper"), ("workdir", "work")):
                held.append(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=top))
                fsconfig_fd(context, key, held[-1])
            _options(context)
            with acting_as(root_id):
                fsconfig_create(context, "overlay by descriptor")
            return fsmount(context, MOUNT_ATTR_NODEV)

    def close(self) -> None:
        pass


class Staged:
    """A thread with a mount namespace of its own, in which layers get a path for the length of one mount."""

    name = "staged"

    def __init__(self, where: Path) -> None:
        self._where = where
        self._jobs: queue.SimpleQueue[tuple[Callable[[], int], Future[int]] | None] = queue.SimpleQueue()
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="staging", daemon=True)
        self._thread.start()
        started.result()

    def _run(self, started: Future[int]) -> None:
        try:
            unshare(CLONE_FS | CLONE_NEWNS)
            mount("", "/", "", MS_REC | MS_PRIVATE)
            mount("dsec-staging", self._where, "tmpfs", 0, "mode=0755,size=1m")
            os.chdir(self._where)  # of this thread alone (CLONE_FS)
            started.set_result(0)
        except BaseException as e:
            started.set_exception(e)
            return
        while (job := self._jobs.get()) is not None:
            body, done = job
            try:
                done.set_result(body())
            except BaseException as e:
                done.set_exception(e)

    def build(self, lowers: list[int], writable: int, userns: int, root_id: int) -> int:
        # Clones are made here: a mount can be cloned only from within its own mount namespace.
        with closing([]) as held:
            for fd in (*reversed(lowers), writable):
                held.append(idmapped(fd, userns))
            done: Future[int] = Future()
            self._jobs.put((lambda: self._build(held[:-1], held[-1], root_id), done))
            return done.result()

    def _build(self, lowers: list[int], top: int, root_id: int) -> int:
        """Paths are relative to the staging directory, which this thread works in: a list of them may have
        255 characters, and the sandbox sees them in its mountinfo."""
        with contextlib.ExitStack() as undo:
            names = [self._attach(str(i), fd, undo) for i, fd in enumerate(lowers)]
            self._attach("top", top, undo)
            context = fsopen("overlay")
            with closing([context]):
                fsconfig_string(context, "source", "dsec")
                fsconfig_string(context, "lowerdir", ":".join(names))
                fsconfig_string(context, "upperdir", "top/upper")
                fsconfig_string(context, "workdir", "top/work")
                _options(context)
                with acting_as(root_id):
                    fsconfig_create(context, "overlay by path")
                return fsmount(context, MOUNT_ATTR_NODEV)

    @staticmethod
    def _attach(name: str, fd: int, undo: contextlib.ExitStack) -> str:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755)
        move_mount(fd, name)
        undo.callback(umount2, name, MNT_DETACH)
        return name

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
