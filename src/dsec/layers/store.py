"""The layer store: a directory that several processes may share.

    <store>/layers/<digest>.erofs   immutable images, written by rename
    <store>/layers/<digest>.json    what the catalogue says of each
    <store>/catalogue.db            names
    <store>/tmp/                    layers in the making

The digest is SHA-256 of the image. Rename comes before the catalogue's row, so that a name never means a
file that is not there; a file without a row is removed at the next open.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import DiskFull, LayerCorrupt, PermissionDenied, UnknownLayer
from dsec.core.images import LayerRef
from dsec.layers.catalogue import Catalogue
from dsec.layers.model import Layer, ResolvedStack, merge
from dsec.layers.reference import PREFIX, canonical, digest_of
from dsec.layers.staging import flocked, staging, sweep

log = logging.getLogger(__name__)
_CHUNK: Final = 1 << 20
_MAX_CACHED: Final = 4096

Cached = tuple[int, ResolvedStack, list[tuple[str, int, Layer]]]
"""Generation of the catalogue, the answer, and each file with its size, to be looked at again."""


class LayerStore:
    """Finds layers, and keeps what `build.Builder` makes. Any thread may call."""

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()
        self.files = path / "layers"
        self.tmp = path / "tmp"
        self._lock_file = path / "lock"
        try:
            for directory in (path, self.files, self.tmp):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._lock_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except PermissionError as e:
            raise PermissionDenied(f"opening the layer store: {e.filename}: {e.strerror}") from e
        self._catalogue = Catalogue(path / "catalogue.db")
        self._cache: dict[tuple[str, ...], Cached] = {}
        self._cache_lock = threading.Lock()
        self._sweep()

    def close(self) -> None:
        self._catalogue.close()

    def __enter__(self) -> LayerStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Finding

    def resolve(self, image: str, layers: builtins.list[str]) -> ResolvedStack:
        """The stack that these references name, `layers` bottom to top above `image`.

        Looks at each file's size, which finds one cut short; `verify` reads them. Raises UnknownLayer,
        which lists near names, and LayerCorrupt.
        """
        key = (image, *layers)
        generation = self._catalogue.generation()
        cached = self._cache.get(key)
        if cached is None or cached[0] != generation:
            cached = self._resolve(key, generation)
        for path, size, layer in cached[2]:
            self._check_size(path, size, layer)
        return cached[1]

    def _resolve(self, key: tuple[str, ...], generation: int) -> Cached:
        found = [self.find(reference) for reference in key]
        stack = ResolvedStack(
            [LayerRef(layer.digest, str(self.file(layer.digest))) for layer in found],
            merge([layer.config for layer in found]),
        )
        cached = (generation, stack, [(str(self.file(f.digest)), f.size, f) for f in found])
        with self._cache_lock:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = cached
        return cached

    def find(self, reference: str) -> Layer:
        """The layer of a name, a digest, or the first 12 and more figures of one. Raises UnknownLayer."""
        digest = digest_of(reference)
        if digest:
            layer = self._catalogue.by_digest(digest)
            wanted = digest
        else:
            wanted = canonical(reference)
            layer = self._catalogue.by_name(wanted)
            if layer is None and PREFIX.match(reference):
                layer = self._catalogue.by_prefix(reference)
        if layer is None:
            near = [] if digest else self._catalogue.near(wanted)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise UnknownLayer(f"no layer {wanted!r} in this store{hint}", reference=reference)
        return layer

    def list(self) -> builtins.list[Layer]:
        """Every name, then the layers that have none."""
        return self._catalogue.list()

    def names_of(self, digest: str) -> builtins.list[str]:
        return [layer.name for layer in self._catalogue.names_of(digest)]

    def file(self, digest: str) -> Path:
        """Where the image of a digest lies."""
        return self.files / f"{digest}.erofs"

    def _check_size(self, path: str, size: int, layer: Layer) -> None:
        try:
            actual = os.stat(path).st_size
        except FileNotFoundError:
            actual = -1
        if actual != size:
            what = "is gone" if actual < 0 else f"has {actual} bytes, not {size}"
            raise LayerCorrupt(
                f"layer {layer.name or layer.digest}: {path} {what}: build it again", digest=layer.digest
            )

    def verify(self, digest: str, progress: Callable[[int], None] | None = None) -> None:
        """Reads the whole image. Raises LayerCorrupt when it is not what it was."""
        layer = self.find(digest)
        path = self.file(layer.digest)
        self._check_size(str(path), layer.size, layer)
        try:
            actual = hash_file(path, progress)
        except OSError as e:
            raise LayerCorrupt(f"layer {layer.digest}: reading {path}: {e.strerror}", digest=digest) from e
        if actual != layer.digest:
            raise LayerCorrupt(
                f"layer {layer.name or layer.digest}: {path} was altered (SHA-256 {actual}): build it again",
                digest=layer.digest,
            )

    # Changing

    def publish(self, image: Path, layer: Layer) -> Layer:
        """Takes a finished image, which must lie in a staging directory of this store, and names it."""
        with self._changing():
            with image.open("rb+") as f:
                os.fsync(f.fileno())
            image.chmod(0o444)
            self._write_beside(image.parent / "layer.json", layer)
            final = self.file(layer.digest)
            # A file of that name that is not what it says is replaced: building again mends it.
            if not (final.exists() and hash_file(final) == layer.digest):
                image.rename(final)
            sync_directory(self.files)
            self._catalogue.add(layer)
        return layer

    def _write_beside(self, draft: Path, layer: Layer) -> None:
        with draft.open("wb") as f:
            f.write(msgspec.json.format(msgspec.json.encode(layer), indent=2) + b"\n")
            f.flush()
            os.fsync(f.fileno())
        draft.rename(self.files / f"{layer.digest}.json")

    def tag(self, reference: str, name: str) -> Layer:
        """Another name for a layer that is there."""
        layer = msgspec.structs.replace(self.find(reference), name=canonical(name))
        with self._changing():
            self._catalogue.add(layer)
        return layer

    def remove(self, reference: str) -> builtins.list[str]:
        """Takes a name away, and with the last name its layer; a digest takes every name with it.

        Says what went. Sandboxes that stand on the layer keep it: their mounts hold the file.
        """
        with self._exclusive():
            layer = self.find(reference)
            if layer.name:
                name = layer.name
                self._catalogue.remove_name(name)
                if self._catalogue.names_of(layer.digest):
                    return [name]
                names = [name]
            else:
                names = self.names_of(layer.digest)
            self._catalogue.remove_digest(layer.digest)
            self._unlink(layer.digest)
            return [*names, layer.digest]

    def _unlink(self, digest: str) -> None:
        for suffix in ("json", "erofs"):
            (self.files / f"{digest}.{suffix}").unlink(missing_ok=True)
        sync_directory(self.files)

    @contextlib.contextmanager
    def stage(self) -> Iterator[tuple[Path, int]]:
        """A directory to build in. Full disks on the way become DiskFull."""
        try:
            with staging(self.tmp) as staged:
                yield staged
        except OSError as e:
            if (full := disk_full(e, self.path)) is not None:
                raise full from e
            raise

    def _changing(self) -> contextlib.AbstractContextManager[int]:
        """Held between a file's rename and its row, so that no sweep takes it for a leftover."""
        return flocked(self._lock_file, fcntl.LOCK_SH)

    def _exclusive(self) -> contextlib.AbstractContextManager[int]:
        return flocked(self._lock_file, fcntl.LOCK_EX)

    def _sweep(self) -> None:
        swept = sweep(self.tmp)
        try:
            with flocked(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                swept += self._sweep_unclaimed()
        except BlockingIOError:
            pass  # somebody is publishing; the next open will look again
        if swept:
            log.info("layer store %s: removed what unfinished builds left: %s", self.path, ", ".join(swept))

    def _sweep_unclaimed(self) -> builtins.list[str]:
        claimed = self._catalogue.digests()
        unclaimed = [e.name for e in os.scandir(self.files) if e.name.partition(".")[0] not in claimed]
        for name in unclaimed:
            (self.files / name).unlink(missing_ok=True)
        return unclaimed


def disk_full(error: OSError, path: Path) -> DiskFull | None:
    """The error as DiskFull, when that is what it says."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(
            f"building a layer in {path}: {error.strerror}: free some space, or name another --data"
        )
    return None


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, hexadecimal. `progress` is told the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as f:
        buffer = memoryview(bytearray(_CHUNK))
        while n := f.readinto(buffer):
            digest.update(buffer[:n])
            done += n
            if progress:
                progress(done)
    return digest.hexdigest()


def sync_directory(path: Path) -> None:
    """Makes renames and removals in it durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
