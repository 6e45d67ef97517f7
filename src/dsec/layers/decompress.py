"""Archives as plain byte streams, whatever they are compressed with."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

import zstandard

from dsec.core.errors import InvalidArgument, PayloadTooLarge, Unsupported
from dsec.layers.mkfs import with_us

try:
    from isal import igzip, isal_zlib
except ImportError:  # no build of it for this processor
    igzip = isal_zlib = None  # type: ignore[assignment]

GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
MAX_ZSTD_WINDOW: Final = 128 << 20
_BROKEN: Final[tuple[type[Exception], ...]] = (zstandard.ZstdError, *((isal_zlib.error,) if igzip else ()))
DAMAGED: Final = (EOFError, zlib.error, lzma.LZMAError, OSError)
"""What reading damaged data raises; an OSError only when its errno is None."""


class Decompressed(io.RawIOBase):
    """What `raw` holds, decompressed as its first bytes ask; anything else is passed on as it is.

    limit: bytes that may come out, beyond which PayloadTooLarge is raised. Damaged data raises one of
    DAMAGED; a zstd stream that is cut short may just end, so that a digest or a tar's end must be looked at.
    Closing does not close `raw`.
    """

    def __init__(self, raw: io.BufferedReader, *, limit: int | None = None) -> None:
        self._stream = _opened(raw)
        self._left = limit
        self._limit = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            got = cast("int", self._stream.readinto(buffer))
        except _BROKEN as e:
            raise zlib.error(str(e)) from e
        if self._left is not None:
            self._left -= got
            if self._left < 0:
                raise PayloadTooLarge(f"more than {self._limit} bytes come out when it is decompressed")
        return got


def _opened(raw: io.BufferedReader) -> Any:
    magic = raw.peek(6)[:6]
    if magic.startswith(GZIP):
        if igzip is None:
            return gzip.GzipFile(fileobj=raw)
        return igzip.IGzipFile(fileobj=raw, mode="rb")  # type: ignore[no-untyped-call]
    if magic.startswith(ZSTD):
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
        return decompressor.stream_reader(raw, read_across_frames=True, closefd=False)
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(raw)
    if magic == b"\xfd7zXZ\0":
        return lzma.LZMAFile(raw)
    return raw


@contextlib.contextmanager
def plain(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed content of a file. Raises Unsupported when zstd is needed and missing."""
    with path.open("rb") as raw:
        magic = raw.peek(6)[:6]
        if magic.startswith(ZSTD):
            with _zstd(path) as f:
                yield f
        else:
            with Decompressed(raw) as stream:
                yield cast("IO[bytes]", stream)


@contextlib.contextmanager
def _zstd(path: Path) -> Iterator[IO[bytes]]:
    # The tool, not the library, because it tells a file that was cut short.
    if shutil.which("zstd") is None:
        raise Unsupported(f"{path} is compressed with zstd, which is not installed: apt-get install zstd")
    with path.open("rb") as raw:
        child = subprocess.Popen(
            with_us(["zstd", "-dcq"]), stdin=raw, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    assert child.stdout and child.stderr
    try:
        with child.stdout, child.stderr:
            yield child.stdout
            if not child.stdout.read(1):
                said = child.stderr.read(4096).decode(errors="replace").strip()
                if child.wait():
                    raise InvalidArgument(f"{path}: damaged or cut short: {said}")
    finally:
        child.kill()
        child.wait()
