"""System calls that Python has not, one thin wrapper each, in their C spelling. Each raises OSError.

ctypes releases the interpreter's lock around a call, so threads of one process enter the kernel side by side.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

libc: Final = ctypes.CDLL(None, use_errno=True)
_syscall: Final = libc.syscall
_syscall.restype = ctypes.c_long

# asm-generic numbers from 424 on are the same on every architecture.
SYS_open_tree: Final = 428
SYS_move_mount: Final = 429
SYS_fsopen: Final = 430
SYS_fsconfig: Final = 431
SYS_fsmount: Final = 432
SYS_mount_setattr: Final = 442
SYS_pidfd_send_signal: Final = 424

AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_RECURSIVE: Final = 0x8000
OPEN_TREE_CLONE: Final = 1
OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
FSOPEN_CLOEXEC: Final = 1
FSMOUNT_CLOEXEC: Final = 1
FSCONFIG_SET_FLAG: Final = 0
FSCONFIG_SET_STRING: Final = 1
FSCONFIG_SET_FD: Final = 5
FSCONFIG_CMD_CREATE: Final = 6
MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOEXEC: Final = 0x8
MOUNT_ATTR_NOATIME: Final = 0x10
MOUNT_ATTR_IDMAP: Final = 0x00100000

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REMOUNT: Final = 0x20
MS_NOATIME: Final = 0x400
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MS_SHARED: Final = 0x100000
MNT_DETACH: Final = 2

CLONE_FS: Final = 0x200
CLONE_NEWNS: Final = 0x20000
CLONE_NEWNET: Final = 0x40000000

PR_SET_SECUREBITS: Final = 28
PR_GET_SECUREBITS: Final = 27
SECBIT_NO_SETUID_FIXUP: Final = 4


class mount_attr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _check(result: int, *what: object) -> int:
    if result < 0:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e), " ".join(str(w) for w in what))
    return result


def _path(path: str | bytes | os.PathLike[str]) -> bytes:
    return os.fsencode(path)


def open_tree(dirfd: int, path: str, flags: int) -> int:
    r = _syscall(SYS_open_tree, dirfd, _path(path), ctypes.c_uint(flags | OPEN_TREE_CLOEXEC))
    return _check(r, "open_tree", path or dirfd)


def move_mount(from_fd: int, to: str | os.PathLike[str]) -> None:
    r = _syscall(SYS_move_mount, from_fd, b"", AT_FDCWD, _path(to), MOVE_MOUNT_F_EMPTY_PATH)
    _check(r, "move_mount", to)


def fsopen(fstype: str) -> int:
    return _check(_syscall(SYS_fsopen, fstype.encode(), FSOPEN_CLOEXEC), "fsopen", fstype)


def fsconfig_string(fd: int, key: str, value: str) -> None:
    r = _syscall(SYS_fsconfig, fd, FSCONFIG_SET_STRING, key.encode(), os.fsencode(value), 0)
    _check(r, "fsconfig", key, value)


def fsconfig_flag(fd: int, key: str) -> None:
    _check(_syscall(SYS_fsconfig, fd, FSCONFIG_SET_FLAG, key.encode(), None, 0), "fsconfig", key)


def fsconfig_fd(fd: int, key: str, value: int) -> None:
    _check(_syscall(SYS_fsconfig, fd, FSCONFIG_SET_FD, key.encode(), None, value), "fsconfig", key, value)


def fsconfig_create(fd: int, what: str) -> None:
    """Raises OSError with what the kernel logged to the context, which says more than the errno."""
    if _syscall(SYS_fsconfig, fd, FSCONFIG_CMD_CREATE, None, None, 0) >= 0:
        return
    e = ctypes.get_errno()
    raise OSError(e, f"{os.strerror(e)}{_context_log(fd)}", what)


def _context_log(fd: int) -> str:
    lines = []
    try:
        while text := os.read(fd, 4096):
            lines.append(text.decode(errors="replace").strip())
    except OSError:
        pass
    return f" ({'; '.join(lines)})" if lines else ""


def fsmount(fd: int, attributes: int) -> int:
    return _check(_syscall(SYS_fsmount, fd, FSMOUNT_CLOEXEC, attributes), "fsmount")


def mount_setattr(fd: int, *, attr_set: int, userns_fd: int = 0, recursive: bool = False) -> None:
    attr = mount_attr(attr_set, 0, 0, userns_fd)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    r = _syscall(SYS_mount_setattr, fd, b"", flags, ctypes.byref(attr), ctypes.sizeof(attr))
    _check(r, "mount_setattr", fd)


def mount(source: str, target: str | os.PathLike[str], fstype: str, flags: int, data: str = "") -> None:
    r = libc.mount(
        source.encode(), _path(target), fstype.encode() or None, ctypes.c_ulong(flags), data.encode()
    )
    _check(r, "mount", fstype, source, target)


def umount2(target: str | os.PathLike[str], flags: int = 0) -> None:
    _check(libc.umount2(_path(target), flags), "umount", target)


def unshare(flags: int) -> None:
    _check(libc.unshare(flags), "unshare", hex(flags))


def setns(fd: int, kind: int) -> None:
    """This thread alone enters a namespace. (os.setns comes with Python 3.12.)"""
    _check(libc.setns(fd, kind), "setns")


def prctl(option: int, argument: int) -> int:
    return _check(libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), "prctl", option)


def keep_capabilities() -> None:
    """From now on this thread's changes of fsuid leave its capabilities alone."""
    prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)


def set_fs_ids(uid: int, gid: int) -> None:
    """This thread's ids for file systems. setfsuid tells no errors: a second call asks what it did."""
    libc.setfsgid(ctypes.c_uint(gid))
    libc.setfsuid(ctypes.c_uint(uid))
    if libc.setfsuid(ctypes.c_uint(0xFFFFFFFF)) != ctypes.c_int(uid).value:
        raise PermissionError(f"setfsuid {uid}")


def pidfd_send_signal(pidfd: int, number: int) -> None:
    _check(_syscall(SYS_pidfd_send_signal, pidfd, number, None, 0), "pidfd_send_signal", number)


def ioctl(fd: int, request: int, argument: Any, what: str) -> int:
    return _check(libc.ioctl(fd, ctypes.c_ulong(request), argument), what)


def syncfs(fd: int) -> None:
    """All that is dirty in the file system that the descriptor lies in is written out."""
    _check(libc.syncfs(fd), "syncfs", fd)
