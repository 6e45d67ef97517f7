"""Compressed streams: every kind, damaged, and larger than they look."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
from collections.abc import Callable

import pytest
import zstandard

from dsec.core.errors import PayloadTooLarge
from dsec.layers import decompress
from dsec.layers.decompress import DAMAGED, Decompressed

DATA = random.Random(2).randbytes(300_000) + bytes(3_000_000)
KINDS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def read(packed: bytes, limit: int | None = None, piece: int = 65_537) -> bytes:
    out = bytearray()
    stream = Decompressed(io.BufferedReader(io.BytesIO(packed)), limit=limit)
    while data := stream.read(piece):
        out += data
    return bytes(out)


@pytest.fixture(params=["igzip", "zlib"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the fast library."""
    if request.param == "zlib":
        monkeypatch.setattr(decompress, "igzip", None)
    else:
        assert vars(decompress)["igzip"] is not None


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds(kind: str) -> None:
    packed = KINDS[kind](DATA)
    assert read(packed) == DATA
    assert read(packed, limit=len(DATA)) == DATA


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_several_in_one(kind: str) -> None:
    pack = KINDS[kind]
    assert read(pack(DATA[:1000]) + pack(b"") + pack(DATA[1000:])) == DATA


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz"])
def test_cut_short(kind: str) -> None:
    packed = KINDS[kind](DATA)
    for at in (7, len(packed) // 2, len(packed) - 1):
        with pytest.raises(DAMAGED):
            read(packed[:at])


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_altered(kind: str) -> None:
    packed = bytearray(KINDS[kind](DATA))
    packed[100_000] ^= 4
    with pytest.raises(DAMAGED) as caught:
        read(bytes(packed))
    assert getattr(caught.value, "errno", None) is None


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_bombs(kind: str) -> None:
    packed = KINDS[kind](bytes(64 << 20))
    assert len(packed) < 1 << 17
    with pytest.raises(PayloadTooLarge, match="more than 1000000 bytes"):
        read(packed, limit=1_000_000)


def test_a_window_that_is_too_large() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(DATA) + packer.flush()
    with pytest.raises(DAMAGED):
        read(packed)


@pytest.mark.usefixtures("either")
def test_what_only_begins_like_it() -> None:
    for magic in (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\0"):
        with pytest.raises(DAMAGED):
            assert read(magic + b"\xff" * 50) is None
