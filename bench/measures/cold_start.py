"""A node that holds nothing, to the first result of a program in a large image, from a slow store.

Everything that is read from the store since it was mounted counts: catalogue, metadata, and blobs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import host, science
from bench.load import Fleet
from bench.measures import Options
from bench.measures.common import with_client
from bench.result import Result, percentile, ratio, rounded
from bench.server import Target, on_store
from bench.slowfs import SlowStore
from bench.tools import CACHE, Unavailable, run
from dsec.client import DSecClient
from dsec.layers.store import LayerStore


@dataclass(frozen=True)
class Start:
    """Times are to the first result, in ms."""

    cold: float
    warm: float
    read: int = 0
    """Bytes of the store by then."""


def measure(options: Options) -> Result:
    source = science.store()
    size = sum(path.stat().st_size for path in _files(source))
    with TemporaryDirectory(dir=CACHE, prefix="cold-") as top:
        store = Path(top) / "source"
        run("cp", "-al", source, store)
        starts = [_from_store(store, "--no-prefetch", forget=True) for _ in range(options.count or 3)]
        ahead = [_from_store(store, "--prefetch") for _ in range(options.count or 3)]
        copy_ms, copied = _copied(store)
    return _result(size, starts, ahead, copy_ms, copied)


def _result(size: int, starts: list[Start], ahead: list[Start], copy_ms: float, copied: Start) -> Result:
    cold = percentile([s.cold for s in starts], 0.5)
    warm = percentile([s.warm for s in (*starts, *ahead)], 0.5)
    with_ahead = percentile([s.cold for s in ahead], 0.5)
    read = percentile([float(s.read) for s in starts], 0.5)
    full = copy_ms + copied.cold
    return Result(
        measure="cold-start",
        value=round(cold, 1),
        unit="ms",
        ratios=rounded(
            {
                "full_copy": ratio(full, cold),
                "full_copy_prefetch": ratio(full, with_ahead),
                "warm": ratio(cold, warm),
                "prefetch_warm": ratio(with_ahead, warm),
            }
        ),
        figures=rounded(
            {
                "bytes_share": read / size,
                "image_mb": size / 1e6,
                "read_mb": read / 1e6,
                "warm_ms": warm,
                "prefetch_ms": with_ahead,
                "copy_ms": copy_ms,
                "copy_line_rate_ms": size / 1e6,
            }
        ),
        samples=len(starts),
        host=host.describe(),
    )


def _files(store: Path) -> Iterator[Path]:
    for directory in ("layers", "blobs"):
        yield from (path for path in (store / directory).iterdir() if path.suffix != ".json")


def _forget(*paths: Path) -> None:
    """Takes these files out of the page cache; only these."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@contextmanager
def _mounted(store: Path) -> Iterator[SlowStore]:
    """Freshly, so that the kernel holds nothing of it; nor does it of what lies below."""
    _forget(*_files(store))
    try:
        with SlowStore(store, store.with_name("mounted")) as slow:
            yield slow
    except (RuntimeError, FileNotFoundError) as e:
        raise Unavailable(f"{e}: needs root, /dev/fuse and libfuse3") from e


def _from_store(store: Path, *server_options: str, forget: bool = False) -> Start:
    """forget: what an earlier run noted for reading ahead."""
    if forget:
        shutil.rmtree(store / "hot")
    with _mounted(store) as slow, on_store(slow.where, science.IMAGE, *server_options) as to:
        return _cold_and_warm(to, slow)


def _cold_and_warm(to: Target, slow: SlowStore | None = None) -> Start:
    async def both(client: DSecClient) -> Start:
        cold = await _first_result(client, to)
        read = slow.counts[1] if slow else 0
        return Start(cold, await _first_result(client, to), read)

    return with_client(to, both)


async def _first_result(client: DSecClient, to: Target) -> float:
    fleet = Fleet(client, to)
    start = time.perf_counter()
    sandbox = await fleet.make()
    done = await sandbox.exec(["python3", "-c", science.PROGRAM])
    took = (time.perf_counter() - start) * 1e3
    await fleet.stop()
    if done.exit_code:
        raise Unavailable(f"the image's program failed: {done.stderr!r:.300}")
    return took


def _copied(store: Path) -> tuple[float, Start]:
    """Ms that copying the whole image takes, and a start from the copy."""
    with TemporaryDirectory(dir=CACHE, prefix="copied-") as top:
        copy = Path(top) / "store"
        with _mounted(store) as slow:
            start = time.perf_counter()
            run("cp", "-r", slow.where, copy)
            took = (time.perf_counter() - start) * 1e3
        LayerStore(copy).close()
        with on_store(copy, science.IMAGE, "--no-prefetch") as to:
            return took, _cold_and_warm(to)
