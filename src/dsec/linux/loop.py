"""Loop devices by ioctl. LOOP_CONFIGURE takes and sets a device in one step."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from dsec.core.errors import Unsupported
from dsec.linux.syscalls import ioctl

LOOP_CONFIGURE: Final = 0x4C0A
LOOP_CLR_FD: Final = 0x4C01
LOOP_CTL_GET_FREE: Final = 0x4C82
LO_FLAGS_READ_ONLY: Final = 1
LO_FLAGS_AUTOCLEAR: Final = 4
LO_FLAGS_DIRECT_IO: Final = 16


class loop_info64(ctypes.Structure):
    _fields_ = (
        ("lo_device", ctypes.c_uint64),
        ("lo_inode", ctypes.c_uint64),
        ("lo_rdevice", ctypes.c_uint64),
        ("lo_offset", ctypes.c_uint64),
        ("lo_sizelimit", ctypes.c_uint64),
        ("lo_number", ctypes.c_uint32),
        ("lo_encrypt_type", ctypes.c_uint32),
        ("lo_encrypt_key_size", ctypes.c_uint32),
        ("lo_flags", ctypes.c_uint32),
        ("lo_file_name", ctypes.c_uint8 * 64),
        ("lo_crypt_name", ctypes.c_uint8 * 64),
        ("lo_encrypt_key", ctypes.c_uint8 * 32),
        ("lo_init", ctypes.c_uint64 * 2),
    )


class loop_config(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
        ("info", loop_info64),
        ("reserved", ctypes.c_uint64 * 8),
    )


def attach(path: str | os.PathLike[str], *, read_only: bool, direct_io: bool = False) -> tuple[str, int]:
    """A device on a file, and a descriptor that holds it. Once mounted the descriptor may be closed: the
    device goes by itself with the mount (autoclear), also when we are killed."""
    backing = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
    try:
        config = loop_config(fd=backing)
        config.info.lo_flags = LO_FLAGS_AUTOCLEAR
        config.info.lo_flags |= LO_FLAGS_READ_ONLY if read_only else 0
        config.info.lo_flags |= LO_FLAGS_DIRECT_IO if direct_io else 0
        return _configure(config, read_only)
    finally:
        os.close(backing)


def _configure(config: loop_config, read_only: bool) -> tuple[str, int]:
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as e:
        raise Unsupported("this kernel has no loop devices now: modprobe loop") from e
    try:
        for _ in range(64):
            number = ioctl(control, LOOP_CTL_GET_FREE, 0, "a free loop device")
            device = f"/dev/loop{number}"
            fd = os.open(device, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
            try:
                ioctl(fd, LOOP_CONFIGURE, ctypes.byref(config), f"configure {device}")
            except OSError as e:
                os.close(fd)
                if e.errno != errno.EBUSY:  # another took it between the two calls
                    raise
                continue
            return device, fd
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no free loop device")


def devices_of(path: Path) -> list[str]:
    """Devices whose backing file is `path`, not one of that name that has been deleted since."""
    found = []
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = entry.read_text().strip()
        except OSError:
            continue
        if name == str(path):
            found.append(f"/dev/{entry.parent.parent.name}")
    return found
