"""A catalogue of many thousand environments: lookups, pages, and one toolkit updated under all of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import host
from bench.measures import Options
from bench.measures.common import with_client
from bench.result import Result, percentile, ratio, rounded
from bench.server import Target, on_store
from bench.tools import CACHE, small_dirs
from dsec.client import DSecClient
from dsec.layers.build import Builder, Wanted
from dsec.layers.model import BlobRef, Kind, Layer
from dsec.layers.store import LayerStore

BASES, WORKSPACES, TOOLKITS = 11_266, 102_171, 103
STEP = 7919
"""Coprime with the counts: lookups jump about."""
PAGE = 1000
"""As many as the SDK asks for at once."""
TOOLKIT = "tools/toolkit-7:1"


def measure(options: Options) -> Result:
    """`count` is the number of lookups."""
    with TemporaryDirectory(dir=CACHE, prefix="catalogue-") as top:
        path = Path(top) / "store"
        with LayerStore(path) as store:
            filled = _fill(store)
            lookups = _lookups(store, options.count or 20_000)
            update = _update(store)
        with LayerStore(Path(top) / "small") as small:
            alone = _update(small)
        with on_store(path, "", "--no-prefetch") as to:
            pages, each, memory = _served(to)
    return _result(
        lookups,
        pages,
        {
            "fill_s": filled,
            "toolkit_update_s": update,
            "toolkit_update_empty_store_s": alone,
            "http_lookup_p50_ms": percentile(each, 0.5),
            "server_mb": memory,
        },
        {"toolkit_update_empty_store": ratio(update, alone)},
    )


def _result(
    lookups: list[float], pages: list[float], figures: dict[str, float], ratios: dict[str, float]
) -> Result:
    p99 = percentile(lookups, 0.99)
    found = {
        "lookup_ms": percentile(lookups, 0.5),
        "lookup_p99_ms": p99,
        "page_ms": percentile(pages, 0.5),
        "page_p99_ms": percentile(pages, 0.99),
    }
    return Result(
        measure="catalogue",
        value=float(f"{p99:.3g}"),
        unit="ms (lookup, p99)",
        ratios=rounded(ratios),
        figures=rounded({**found, **figures}),
        samples=len(lookups),
        host=host.describe(),
    )


def _layers() -> Iterator[Layer]:
    for kind, count, name in _KINDS:
        for n in range(count):
            yield _layer(kind, name(n))


_KINDS: tuple[tuple[Kind, int, Callable[[int], str]], ...] = (
    ("base", BASES, "bases/image-{}:1".format),
    ("workspace", WORKSPACES, "tasks/workspace-{}:1".format),
    ("toolkit", TOOLKITS, "tools/toolkit-{}:1".format),
)


def _layer(kind: Kind, name: str) -> Layer:
    digest, blob = (hashlib.sha256(f"{part} {name}".encode()).hexdigest() for part in ("layer", "blob"))
    blobs = [BlobRef(blob, 1 << 20)]
    return Layer(digest=digest, size=4096, blobs=blobs, kind=kind, created=time.time(), name=name, files=9)


def _fill(store: LayerStore) -> float:
    """Rows alone, in one transaction; no files: nothing here mounts them."""
    start = time.perf_counter()
    store._catalogue.add(*_layers())  # no way of a user's makes a hundred thousand layers at once
    return time.perf_counter() - start


def _lookups(store: LayerStore, count: int) -> list[float]:
    """Ms of each, by name, of all kinds."""
    took = []
    for i in range(count):
        _, total, name = _KINDS[i % 3]
        wanted = name(i * STEP % total)
        start = time.perf_counter()
        store.find(wanted)
        took.append((time.perf_counter() - start) * 1e3)
    return took


def _update(store: LayerStore) -> float:
    """Seconds to build a toolkit anew under its name; whoever names it has it from then on.

    The environments name it, and none of their rows is touched.
    """
    source = small_dirs()[1]
    start = time.perf_counter()
    built = Builder(store).from_directory(source, Wanted(name=TOOLKIT, kind="toolkit"))
    took = time.perf_counter() - start
    assert store.find(TOOLKIT).digest == built.digest
    return took


def _served(to: Target) -> tuple[list[float], list[float], float]:
    """Ms of each page of a listing of all, and of single layers, over HTTP; and the server's memory in MB."""

    async def go(client: DSecClient) -> tuple[list[float], list[float]]:
        pages, each = [], []
        start, seen = time.perf_counter(), 0
        async for _ in client.layers():
            seen += 1
            if seen % PAGE == 0:
                pages.append((time.perf_counter() - start) * 1e3)
                start = time.perf_counter()
        for i in range(500):
            start = time.perf_counter()
            await client.layer(_KINDS[1][2](i * STEP % WORKSPACES))
            each.append((time.perf_counter() - start) * 1e3)
        assert seen >= BASES + WORKSPACES + TOOLKITS
        return pages, each

    pages, each = with_client(to, go)
    return pages, each, host.rss_mb(to.pids)
