"""What a cold layer's first run reads is noted, and read ahead on a later cold start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.backends.test_layer_mounts import layer

from dsec.core.images import LayerRef
from dsec.layers import prefetch
from dsec.layers.store import LayerStore
from dsec.layers.warmth import Warmth

MIB = 1 << 20


def chill(path: str) -> None:
    """Out of memory with it: a later look sees what was read since."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if prefetch.resident(path):
        pytest.skip("the filesystem of the tests keeps its files in memory")


def read(path: str, offset: int, length: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no more than what is asked for
    os.pread(fd, length, offset)
    os.close(fd)


@pytest.fixture
def cold(tmp_path: Path) -> LayerRef:
    with LayerStore(tmp_path / "store") as store:
        ref = store.ref(layer(store, "a:1", {"big": os.urandom(16 * MIB)}))
    chill(ref.blobs[0])
    return ref


def hot(ref: LayerRef) -> Path:
    return Path(ref.path).parent.parent / "hot" / f"{ref.digest}.json"


def test_first_run_is_noted_and_read_ahead(cold: LayerRef) -> None:
    warmth = Warmth()
    warmth.mounted(cold)
    read(cold.blobs[0], 4 * MIB, 100_000)
    read(cold.blobs[0], 9 * MIB, 8192)
    warmth.first_result([cold.digest, "another"])
    warmth.close(finish=True)
    found = prefetch.load(hot(cold))
    assert found is not None
    ranges = found.blobs[os.path.basename(cold.blobs[0])]
    assert (9 * MIB, 8192) in ranges and found.total < MIB
    assert any(offset <= 4 * MIB and offset + length >= 4 * MIB + 100_000 for offset, length in ranges)
    chill(cold.blobs[0])
    later = Warmth()
    later.mounted(cold)
    later.close(finish=True)
    assert later.ahead_bytes == found.total
    assert sum(length for _, length in prefetch.resident(cold.blobs[0])) >= found.total
    before = hot(cold).read_bytes()
    later = Warmth()
    later.mounted(cold)
    later.first_result([cold.digest])
    later.close(finish=True)
    assert hot(cold).read_bytes() == before  # the first record stands


def test_switched_off(cold: LayerRef) -> None:
    prefetch.save(hot(cold), prefetch.Hot({os.path.basename(cold.blobs[0]): [(0, MIB)]}))
    warmth = Warmth(enabled=False)
    warmth.mounted(cold)
    warmth.close(finish=True)
    assert prefetch.resident(cold.blobs[0]) == [] and warmth.ahead_bytes == 0


def test_a_warm_layer_tells_nothing(cold: LayerRef) -> None:
    read(cold.blobs[0], 0, 4 * MIB)
    warmth = Warmth()
    warmth.mounted(cold)
    read(cold.blobs[0], 8 * MIB, 4 * MIB)
    warmth.first_result([cold.digest])
    warmth.close(finish=True)
    assert prefetch.load(hot(cold)) is None


def test_records_that_are_none(cold: LayerRef) -> None:
    """What is damaged, or asks for what is not there, costs the reading ahead and no more."""
    for text in (b"", b"{", b'{"blobs": {"x": [[1]]}}', b'{"blobs": 1}'):
        hot(cold).write_bytes(text)
        assert prefetch.load(hot(cold)) is None
        warmth = Warmth()
        warmth.mounted(cold)
        warmth.close(finish=True)
    hot(cold).write_bytes(
        b'{"blobs": {"%s": [[99999999999, 8192]]}}' % os.path.basename(cold.blobs[0]).encode()
    )
    warmth = Warmth()
    warmth.mounted(cold)
    warmth.close(finish=True)
    assert warmth.ahead_bytes == 0


def test_many_ranges_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MAX_RANGES", 10)
    ranges = [(n * 3 * prefetch.PAGE, prefetch.PAGE) for n in range(100)]
    fewer = prefetch._fewer(ranges)
    assert len(fewer) <= 10
    assert fewer[0][0] == 0 and sum(fewer[-1]) == sum(ranges[-1])
