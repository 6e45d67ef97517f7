"""A store that is slow and counts: FUSE over a directory, whose reads have a latency and a bandwidth.

    python -m bench.slowfs SOURCE MOUNTPOINT COUNTERS --latency-ms 2 --bandwidth 1000000000

What is read is counted by request and by byte in COUNTERS, a file of three numbers that others may map.
Writes pass through at once: a node notes in its store what it uses, and what a first run read.
"""

from __future__ import annotations

import argparse
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

COUNTERS: Final = struct.Struct("<QQQ")
"""Reads, bytes read, bytes read of other files than blobs."""


class Slow:
    """The filesystem, in this process."""

    def __init__(self, source: str, counters: mmap.mmap, latency_s: float, bandwidth: float) -> None:
        self._source = source
        self._counters = counters
        self._latency_s = latency_s
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._counts = [0, 0, 0]

    def path(self, path: str) -> str:
        return self._source + path

    def read(self, path: str, size: int, offset: int, fd: int) -> bytes:
        data = os.pread(fd, size, offset)
        with self._lock:  # the line is shared, the way is not: waits overlap
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + len(data) / self._bandwidth
            due = self._free_at + self._latency_s
            self._counts[0] += 1
            self._counts[1] += len(data)
            self._counts[2] += 0 if "/blobs/" in path else len(data)
            COUNTERS.pack_into(self._counters, 0, *self._counts)
        time.sleep(max(0.0, due - time.monotonic()))
        return data


def serve(source: str, where: str, counters: str, latency_s: float, bandwidth: float) -> None:
    import mfusepy  # type: ignore[import-untyped]

    with open(counters, "r+b") as f:
        mapped = mmap.mmap(f.fileno(), COUNTERS.size)
    files = Files(Slow(source, mapped, latency_s, bandwidth))
    mfusepy.FUSE(files, where, foreground=True, kernel_cache=True, use_ino=True, fsname="slowfs")


class Files:
    """What mfusepy calls, by these names. It makes an errno of each OSError."""

    use_ns = True

    def __init__(self, slow: Slow) -> None:
        self._slow = slow

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        st = os.lstat(self._slow.path(path))
        keys = ("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
        times = {k: getattr(st, f"{k}_ns") for k in ("st_atime", "st_mtime", "st_ctime")}
        return {**{k: getattr(st, k) for k in keys}, **times}

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """Numbers of inodes too: the kernel shows no entry whose number is 0."""
        top = self._slow.path(path)
        for name in (".", "..", *os.listdir(top)):
            st = os.lstat(os.path.join(top, name))
            yield name, {"st_ino": st.st_ino, "st_mode": st.st_mode}, 0

    def statfs(self, path: str) -> dict[str, int]:
        st = os.statvfs(self._slow.path(path))
        return {k: getattr(st, k) for k in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")}

    def open(self, path: str, flags: int) -> int:
        # The kernel reads a page before it writes a part of it, and knows where the end is.
        flags = flags & ~(os.O_APPEND | os.O_ACCMODE) | (os.O_RDWR if flags & os.O_ACCMODE else os.O_RDONLY)
        return os.open(self._slow.path(path), flags)

    def create(self, path: str, mode: int) -> int:
        return os.open(self._slow.path(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self._slow.read(path, size, offset, fh)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._slow.path(path), length)

    def unlink(self, path: str) -> None:
        os.unlink(self._slow.path(path))

    def link(self, target: str, source: str) -> None:
        os.link(self._slow.path(source), self._slow.path(target))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._slow.path(old), self._slow.path(new))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._slow.path(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._slow.path(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._slow.path(path), mode)

    def utimens(self, path: str, times: tuple[int, int]) -> None:
        os.utime(self._slow.path(path), ns=times)


class SlowStore:
    """A child that serves `source` at `where` while this is entered. Needs root and /dev/fuse."""

    def __init__(self, source: Path, where: Path, *, latency_ms: float = 2.0, bandwidth: float = 1e9) -> None:
        self.where = where
        self._counters = where.with_name(where.name + ".counters")
        self._argv = [sys.executable, "-m", "bench.slowfs", str(source), str(where), str(self._counters)]
        self._argv += ["--latency-ms", str(latency_ms), "--bandwidth", str(bandwidth)]

    def __enter__(self) -> SlowStore:
        self.where.mkdir(exist_ok=True)
        self._counters.write_bytes(bytes(COUNTERS.size))
        before = os.stat(self.where).st_dev
        self._child = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while os.stat(self.where).st_dev == before:
            if self._child.poll() is not None or time.monotonic() > deadline:
                self._child.kill()
                raise RuntimeError(f"the slow store did not start (status {self._child.wait()})")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        subprocess.run(["umount", "-l", str(self.where)], check=False)
        self._child.wait(20)
        self._counters.unlink()
        self.where.rmdir()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Reads, bytes, bytes of other files than blobs."""
        reads, total, other = COUNTERS.unpack(self._counters.read_bytes())
        return reads, total, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("source", "where", "counters"):
        parser.add_argument(name)
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--bandwidth", type=float, default=1e9)
    a = parser.parse_args()
    serve(a.source, a.where, a.counters, a.latency_ms / 1000, a.bandwidth)


if __name__ == "__main__":
    main()
