"""Project quotas of ext4 and XFS: a directory with an id, the id with limits.

Needs Linux 5.14 and CAP_SYS_ADMIN. The kernel takes a change of id or of PROJINHERIT from the initial user
namespace alone, so the root of a sandbox's own namespace cannot leave its project.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dsec.core.errors import ResourceExhausted
from dsec.linux.syscalls import ioctl, libc

SYS_quotactl_fd: Final = 443
FS_IOC_FSGETXATTR: Final = 0x801C581F
FS_IOC_FSSETXATTR: Final = 0x401C5820
FS_XFLAG_PROJINHERIT: Final = 0x200
PRJQUOTA: Final = 2
# XFS answers these too: the kernel translates them for it.
Q_GETQUOTA: Final = 0x800007
Q_SETQUOTA: Final = 0x800008
Q_GETNEXTQUOTA: Final = 0x800009
Q_XGETQSTAT: Final = 0x5805
FS_QUOTA_PDQ_ENFD: Final = 1 << 5
QIF_BLIMITS: Final = 1
QIF_ILIMITS: Final = 4
BLOCK: Final = 1024


class fsxattr(ctypes.Structure):
    _fields_ = (
        ("xflags", ctypes.c_uint32),
        ("extsize", ctypes.c_uint32),
        ("nextents", ctypes.c_uint32),
        ("projid", ctypes.c_uint32),
        ("cowextsize", ctypes.c_uint32),
        ("pad", ctypes.c_uint8 * 8),
    )


class if_nextdqblk(ctypes.Structure):
    """`if_dqblk` with the id in what is padding there."""

    _fields_ = (
        ("bhardlimit", ctypes.c_uint64),
        ("bsoftlimit", ctypes.c_uint64),
        ("curspace", ctypes.c_uint64),
        ("ihardlimit", ctypes.c_uint64),
        ("isoftlimit", ctypes.c_uint64),
        ("curinodes", ctypes.c_uint64),
        ("btime", ctypes.c_uint64),
        ("itime", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
    )


class fs_quota_stat(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int8), ("flags", ctypes.c_uint16), ("rest", ctypes.c_uint64 * 16))


@dataclass(frozen=True)
class Usage:
    bytes: int
    inodes: int


def _quotactl(fd: int, command: int, project: int, args: ctypes.Structure, what: str) -> None:
    number = ctypes.c_uint32(command << 8 | PRJQUOTA)
    call = libc.syscall(SYS_quotactl_fd, fd, number, ctypes.c_uint32(project), ctypes.byref(args))
    if call < 0:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e), what)


def project(fd: int) -> int:
    """The directory's project id; 0 where it has none."""
    args = fsxattr()
    ioctl(fd, FS_IOC_FSGETXATTR, ctypes.byref(args), "read project id")
    return int(args.projid)


def set_project(directory_fd: int, number: int) -> None:
    """What is made in the directory from now on counts against `number`; what is in it already does not."""
    args = fsxattr()
    ioctl(directory_fd, FS_IOC_FSGETXATTR, ctypes.byref(args), "read project id")
    args.projid = number
    args.xflags |= FS_XFLAG_PROJINHERIT
    ioctl(directory_fd, FS_IOC_FSSETXATTR, ctypes.byref(args), f"set project id {number}")


def limit(fd: int, number: int, limit_bytes: int, limit_inodes: int) -> None:
    """Hard limits of the project on the file system of `fd`, bytes rounded up to KiB; 0 is no limit."""
    args = if_nextdqblk(valid=QIF_BLIMITS | QIF_ILIMITS)
    args.bhardlimit = -(-limit_bytes // BLOCK)
    args.ihardlimit = limit_inodes
    _quotactl(fd, Q_SETQUOTA, number, args, f"limit project {number}")


def usage(fd: int, number: int) -> Usage:
    args = if_nextdqblk()
    _quotactl(fd, Q_GETQUOTA, number, args, f"usage of project {number}")
    return Usage(int(args.curspace), int(args.curinodes))


def known(fd: int, first: int, last: int) -> Iterator[int]:
    """Ids from `first` to `last` that have a limit or files on the file system of `fd`."""
    while first <= last:
        args = if_nextdqblk()
        try:
            _quotactl(fd, Q_GETNEXTQUOTA, first, args, f"project after {first}")
        except OSError as e:
            if e.errno == errno.ENOENT:
                return
            raise
        if args.id > last:
            return
        if args.bhardlimit or args.ihardlimit or args.curspace or args.curinodes:
            yield int(args.id)
        first = int(args.id) + 1


def enforced(fd: int) -> bool:
    """Whether limits hold. ext4 with the feature but mounted without prjquota counts, and limits nothing."""
    args = fs_quota_stat()
    _quotactl(fd, Q_XGETQSTAT, 0, args, "state of project quotas")
    return bool(args.flags & FS_QUOTA_PDQ_ENFD)


def free_id(taken: Iterable[int], first: int, last: int) -> int:
    """The least id not taken; the caller holds a lock from here until it has set a limit on it.

    Raises ResourceExhausted where none is left.
    """
    held = set(taken)
    for number in range(first, last + 1):
        if number not in held:
            return number
    raise ResourceExhausted(f"all project ids from {first} to {last} are in use: destroy sandboxes")


def why_not(fd: int) -> str:
    """Why the file system of `fd` has no project quotas in force; empty where it has. Changes nothing."""
    try:
        project(fd)
        usage(fd, 0)
        if not enforced(fd):
            return "project quotas count but do not limit: mount with prjquota"
    except OSError as e:
        if e.errno in (errno.EPERM, errno.EACCES):
            return "project quotas need CAP_SYS_ADMIN: run as root"
        return f"no project quotas ({e.strerror}): mount ext4 or XFS with prjquota"
    return ""
