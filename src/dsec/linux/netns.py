"""Network namespaces: a thread that lives in one, and a file that keeps one when nobody lives there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from dsec.linux.mounts import is_mount
from dsec.linux.syscalls import CLONE_NEWNET, MNT_DETACH, MS_BIND, MS_PRIVATE, mount, setns, umount2, unshare

T = TypeVar("T")
OWN: Final = "/proc/thread-self/ns/net"


class NamespaceThread:
    """One thread in another network namespace than the process's. `run` may be called from any thread."""

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        """enter: puts the thread into its namespace; what it raises, this raises."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        try:
            self._pool.submit(enter).result()
            self.fd: int = self._pool.submit(os.open, OWN, os.O_RDONLY | os.O_CLOEXEC).result()
        except BaseException:
            self._pool.shutdown()
            raise

    @classmethod
    def in_new(cls, name: str) -> NamespaceThread:
        return cls(name, lambda: unshare(CLONE_NEWNET))

    @classmethod
    def in_file(cls, name: str, path: Path) -> NamespaceThread:
        def enter() -> None:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                setns(fd, CLONE_NEWNET)
            finally:
                os.close(fd)

        return cls(name, enter)

    def run(self, body: Callable[[], T]) -> T:
        return self._pool.submit(body).result()

    def submit(self, body: Callable[[], None]) -> None:
        """Later; it must raise nothing."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._pool.submit(body)

    @contextlib.contextmanager
    def within(self, netns: int) -> Iterator[None]:
        """In the thread itself: another namespace, for a while."""
        setns(netns, CLONE_NEWNET)
        try:
            yield
        finally:
            setns(self.fd, CLONE_NEWNET)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self.fd)


def pin(thread: NamespaceThread, path: Path) -> None:
    """A bind mount by which the namespace is found again after its last process has gone."""
    path.touch(mode=0o600, exist_ok=True)
    mount(f"/proc/{os.getpid()}/fd/{thread.fd}", path, "", MS_BIND)
    mount("", path, "", MS_PRIVATE)


def is_pinned(path: Path) -> bool:
    return path.exists() and is_mount(path)


def unpin(path: Path) -> None:
    """Idempotent."""
    if is_pinned(path):
        umount2(path, MNT_DETACH)
    path.unlink(missing_ok=True)


def write_sysctl(key: str, value: str) -> None:
    """`net/...` is of the namespace that this thread lives in."""
    with open(f"/proc/sys/{key}", "w", encoding="ascii") as f:
        f.write(value)


def read_sysctl(key: str) -> str | None:
    """None where this kernel has no such thing."""
    try:
        with open(f"/proc/sys/{key}", encoding="ascii") as f:
            return f.read().strip()
    except OSError:
        return None
