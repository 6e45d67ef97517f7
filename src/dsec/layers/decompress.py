"""Archives as plain byte streams, whatever they are compressed with."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from dsec.core.errors import InvalidArgument, Unsupported
from dsec.layers.mkfs import with_us


@contextlib.contextmanager
def plain(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed content of a file. Raises Unsupported when zstd is needed and missing."""
    with path.open("rb") as raw:
        magic = raw.peek(6)[:6]
        if magic.startswith(b"\x28\xb5\x2f\xfd"):
            with _zstd(path) as f:
                yield f
        elif magic.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=raw) as z:
                yield cast("IO[bytes]", z)
        elif magic.startswith(b"BZh"):
            with bz2.BZ2File(raw) as b:
                yield b
        elif magic == b"\xfd7zXZ\0":
            with lzma.LZMAFile(raw) as x:
                yield x
        else:
            yield raw


@contextlib.contextmanager
def _zstd(path: Path) -> Iterator[IO[bytes]]:
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
