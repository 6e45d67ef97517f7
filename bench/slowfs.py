"""A store that is slow and counts: a FUSE filesystem over a directory, with a latency and a bandwidth.

    python -m bench.slowfs SOURCE MOUNTPOINT COUNTERS --latency-ms 2 --bandwidth 1000000000

What is read is counted by request and by byte in COUNTERS, a file of three numbers that others may map.
"""

from __future__ import annotations

import argparse
import errno
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
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
    import mfusepy

    with open(counters, "r+b") as f:
        mapped = mmap.mmap(f.fileno(), COUNTERS.size)
    slow = Slow(source, mapped, latency_s, bandwidth)

    class Operations(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            try:
                st = os.lstat(slow.path(path))
            except OSError as e:
                raise mfusepy.FuseOSError(e.errno or errno.EIO) from e
            keys = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
            times = {k: getattr(st, f"{k}_ns") for k in ("st_atime", "st_mtime", "st_ctime")}
            return {**{k: getattr(st, k) for k in keys}, **times}

        def readdir(self, path: str, fh: int) -> Any:
            return [".", "..", *os.listdir(slow.path(path))]

        def open(self, path: str, flags: int) -> int:
            return os.open(slow.path(path), os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return slow.read(path, size, offset, fh)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    mfusepy.FUSE(Operations(), where, foreground=True, ro=True, kernel_cache=True, fsname="slowfs")


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
