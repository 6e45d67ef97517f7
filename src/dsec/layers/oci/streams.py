"""Byte streams that look at what passes through them."""

from __future__ import annotations

import hashlib
import io
import os
from typing import IO, Any, Final

from dsec.core.errors import DSecError, LayerCorrupt, PayloadTooLarge
from dsec.layers.decompress import DAMAGED, Decompressed

BUFFER: Final = 1 << 18


class Checked(io.RawIOBase):
    """`source`, with its SHA-256 and size looked at.

    More bytes than `size` raise LayerCorrupt at once, fewer or others at the end. `size` None: any number.
    """

    def __init__(self, source: io.RawIOBase, *, what: str, digest: str, size: int | None) -> None:
        self._source, self._what, self._digest, self._size = source, what, digest, size
        self._hash = hashlib.sha256()
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        got: int = self._source.readinto(buffer) or 0
        self._done += got
        self._hash.update(memoryview(buffer)[:got])
        if self._size is not None and self._done > self._size:
            raise LayerCorrupt(f"{self._what}: more than the {self._size} bytes that were promised")
        if self._done == self._size or (not got and len(buffer)):
            self._finish()
        return got

    def _finish(self) -> None:
        if self._size is not None and self._done < self._size:
            raise LayerCorrupt(
                f"{self._what}: ends after {self._done} bytes of {self._size}: fetch or build it again"
            )
        actual = f"sha256:{self._hash.hexdigest()}"
        if actual != self._digest:
            raise LayerCorrupt(f"{self._what}: its content is {actual}, not {self._digest}: fetch it again")

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


class Tar(io.RawIOBase):
    """The decompressed content of a layer; what is wrong with it becomes a typed error that names it."""

    def __init__(self, compressed: io.BufferedReader, *, what: str, limit: int) -> None:
        self._compressed, self._what = compressed, what
        self._limit = limit
        self._stream: Decompressed | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            if self._stream is None:
                self._stream = Decompressed(self._compressed, limit=self._limit)
            got = self._stream.readinto(buffer)
            if not got and len(buffer):
                self._drain()
            return got
        except PayloadTooLarge as e:
            raise PayloadTooLarge(f"{self._what}: {e.message}") from e
        except DSecError:
            raise
        except DAMAGED as e:
            if isinstance(e, OSError) and e.errno is not None:
                raise
            raise LayerCorrupt(f"{self._what}: damaged or cut short: {e!s:.300}") from e

    def _drain(self) -> None:
        """What follows the compressed data is looked at too: it is part of the digest."""
        while self._compressed.read(BUFFER):
            pass

    def close(self) -> None:
        if not self.closed:
            self._compressed.close()
        super().close()


class Section(io.RawIOBase):
    """A piece of a file, read without moving the file's own position. Closing leaves the file open."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file, self._at, self._end = file, offset, offset + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._end - self._at)]
        got = os.preadv(self._file.fileno(), [view], self._at) if len(view) else 0
        self._at += got
        return got


def read_all(source: io.RawIOBase, limit: int, what: str) -> bytes:
    """Everything, and closes it. Raises PayloadTooLarge beyond `limit` bytes."""
    data = bytearray()
    with source:
        while piece := source.read(min(BUFFER, limit + 1 - len(data))):
            data += piece
            if len(data) > limit:
                raise PayloadTooLarge(f"{what}: more than {limit} bytes")
    return bytes(data)
