"""Directories in which layers are made. One whose owner has died is swept by the next process that looks."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)


@contextlib.contextmanager
def flocked(path: Path, operation: int) -> Iterator[int]:
    """Holds a lock on an existing file or directory. Raises BlockingIOError with LOCK_NB."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, operation)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def staging(parent: Path) -> Iterator[tuple[Path, int]]:
    """A fresh directory, gone at the end, and the descriptor whose lock says that it is in use.

    A child process that is given the descriptor keeps the directory in use for as long as it lives.
    """
    path, fd = _claim(parent)
    try:
        yield path, fd
    finally:
        try:
            remove(path)
        finally:
            os.close(fd)


def _claim(parent: Path) -> tuple[Path, int]:
    while True:
        path = parent / secrets.token_hex(8)
        path.mkdir(mode=0o700)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        # A sweeper may have been quicker than our lock.
        if path.exists():
            return path, fd
        os.close(fd)


def remove(path: Path) -> None:
    """The tree, whatever it holds. What cannot be removed is logged, and swept later."""
    failures: list[str] = []
    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=lambda _, p, e: failures.append(f"{p}: {e}"))
    else:
        shutil.rmtree(path, onerror=lambda _, p, e: failures.append(f"{p}: {e[1]}"))
    if failures and path.exists():
        log.warning("%s could not be removed, and will be tried again: %s", path, "; ".join(failures[:3]))


def sweep(parent: Path) -> list[str]:
    """Removes what dead processes left; says what it was."""
    swept = []
    for entry in sorted(os.scandir(parent), key=lambda e: e.name):
        path = Path(entry.path)
        if not entry.is_dir(follow_symlinks=False):
            path.unlink(missing_ok=True)
            continue
        with (
            contextlib.suppress(BlockingIOError, FileNotFoundError),
            flocked(path, fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            remove(path)
            swept.append(entry.name)
    return swept
