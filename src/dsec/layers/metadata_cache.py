"""Metadata of layers on the node's own disk; the data stays on the store, and is read on demand.

Each image is checked whole against its digest as it is copied. What the bound has no room for goes, the
longest unused first: a mount keeps its file for as long as it lasts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from dsec.core.errors import LayerCorrupt, UnknownLayer
from dsec.core.images import LayerRef
from dsec.layers.staging import staging, sweep

log = logging.getLogger(__name__)
LIMIT: Final = 8 << 30
"""Bytes."""
TRIES: Final = 2
AT_ONCE: Final = 8
"""Pieces that are read at the same time."""
_CHUNK: Final = 1 << 20


class MetadataCache:
    """Below a directory of the node's own. Any thread may call."""

    def __init__(self, where: Path, *, limit: int = LIMIT) -> None:
        self._where = where
        self.files = where / "files"
        self._tmp = where / "tmp"
        self._limit = limit
        self._lock = threading.Lock()
        self.copied_bytes = 0
        """Read from the store so far."""

    def open(self) -> None:
        """Removes what copies that were cut off left. Directories are made with the first copy."""
        if self._tmp.exists():
            sweep(self._tmp)

    def local(self, layer: LayerRef) -> str:
        """Where the layer's image lies on this node: in place when the store is of the same filesystem.

        Raises LayerCorrupt when what the store gives is not what the digest says, also the second time;
        UnknownLayer when the store has it no more; OSError.
        """
        try:
            found = os.stat(layer.path)
        except FileNotFoundError:
            raise UnknownLayer(f"layer {layer.digest}: its image {layer.path} is gone") from None
        if found.st_dev == self._where.parent.stat().st_dev:
            return layer.path
        path = self.files / f"{layer.digest}.erofs"
        with self._lock:
            for directory in (self.files, self._tmp):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _has_size(path, found.st_size):
                self._make_room(found.st_size)
                self._fetch(layer, path)
            with contextlib.suppress(OSError):
                os.utime(path)
        return str(path)

    def drop(self, layer: LayerRef) -> None:
        """One that turned out to be damaged is fetched anew the next time."""
        (self.files / f"{layer.digest}.erofs").unlink(missing_ok=True)

    def _fetch(self, layer: LayerRef, path: Path) -> None:
        for left in reversed(range(TRIES)):
            with staging(self._tmp) as (staged, _):
                draft = staged / "image"
                if self._copy(layer.path, draft) == layer.digest:
                    draft.chmod(0o400)
                    draft.rename(path)
                    return
            what = f"layer {layer.digest}: the metadata in {layer.path} is not what its digest says"
            if not left:
                raise LayerCorrupt(f"{what}: build the layer again", digest=layer.digest)
            log.warning("%s; fetching it again", what)

    def _copy(self, source: str, draft: Path) -> str:
        digest = hashlib.sha256()
        with open(source, "rb", buffering=0) as src, draft.open("wb", buffering=0) as out:
            for data in _read_whole(src.fileno()):
                digest.update(data)
                out.write(data)
                self.copied_bytes += len(data)
        return digest.hexdigest()

    def _make_room(self, size: int) -> None:
        entries = [(entry.stat(), entry.path) for entry in os.scandir(self.files)]
        total = size + sum(st.st_size for st, _ in entries)
        for st, path in sorted(entries, key=lambda e: e[0].st_mtime):
            if total <= self._limit:
                return
            os.unlink(path)
            total -= st.st_size


def _read_whole(fd: int) -> Iterator[bytes]:
    """A file's bytes in order. Several pieces are on their way at once: a store answers each one late."""
    size = os.fstat(fd).st_size
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="metadata") as pool:
        for start in range(0, size, AT_ONCE * _CHUNK):
            pieces = range(start, min(size, start + AT_ONCE * _CHUNK), _CHUNK)
            yield from pool.map(lambda at: os.pread(fd, _CHUNK, at), pieces)


def _has_size(path: Path, size: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size == size
    return False
