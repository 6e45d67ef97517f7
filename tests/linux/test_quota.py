"""What can be told of project quotas without a file system that has them.

`test_in_force` runs where one has.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.core.errors import ResourceExhausted
from dsec.linux import quota


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield number
    os.close(number)


def test_structures_have_the_kernels_size() -> None:
    assert ctypes.sizeof(quota.fsxattr) == quota.FS_IOC_FSGETXATTR >> 16 & 0x3FFF == 28
    assert ctypes.sizeof(quota.if_nextdqblk) == 72


def test_free_id_is_the_least_not_taken() -> None:
    assert quota.free_id([], 5, 7) == 5
    assert quota.free_id([5, 7, 900], 5, 7) == 6


def test_no_id_left_says_so() -> None:
    with pytest.raises(ResourceExhausted, match="5 to 6"):
        quota.free_id([6, 5], 5, 6)


def test_proc_has_no_project_quotas() -> None:
    number = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert quota.why_not(number)
        with pytest.raises(OSError, match="project"):
            quota.usage(number, 0)
    finally:
        os.close(number)


def test_in_force(fd: int) -> None:
    if reason := quota.why_not(fd):
        pytest.skip(reason)
    number = quota.free_id(quota.known(fd, 1 << 30, (1 << 30) + 9999), 1 << 30, (1 << 30) + 9999)
    quota.limit(fd, number, 1 << 20, 10)
    try:
        assert number in quota.known(fd, number, number)
        quota.set_project(fd, number)
        assert quota.project(fd) == number
        with pytest.raises(OSError, match=r"quota|space") as failed:
            for i in range(11):
                os.close(os.open(f"f{i}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        # XFS says ENOSPC.
        assert failed.value.errno in (errno.EDQUOT, errno.ENOSPC)
        assert quota.usage(fd, number).inodes == 10
    finally:
        quota.limit(fd, number, 0, 0)
