"""The layer store: a directory that several processes may share.

    <store>/layers/<digest>.erofs   immutable images, written by rename
    <store>/layers/<digest>.json    what the catalogue says of each
    <store>/blobs/<digest>          what images refer to: bodies of files, for one layer or for several
    <store>/hot/<digest>.json       which parts of the blobs were read first (prefetch.py)
    <store>/catalogue.db            names, and what each layer needs
    <store>/tmp/                    layers in the making

A digest is SHA-256 of the file. Renames come before the catalogue's row, so that a name never means a
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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import Conflict, DiskFull, LayerCorrupt, PermissionDenied, UnknownLayer
from dsec.core.images import LayerRef
from dsec.layers.catalogue import Catalogue
from dsec.layers.model import Layer, ResolvedStack, merge
from dsec.layers.reference import PREFIX, canonical, digest_of
from dsec.layers.staging import flocked, staging, sweep

log = logging.getLogger(__name__)
GRACE_S: Final = 24 * 3600.0
"""For so long a layer stays that nothing names: a build may be about to name it, a sandbox to stand on it."""
_CHUNK: Final = 1 << 20
_MAX_CACHED: Final = 4096

Cached = tuple[int, ResolvedStack, list[tuple[str, int, Layer]]]
"""Generation of the catalogue, the answer, and each file with its size, to be looked at again."""


class Collected(msgspec.Struct, frozen=True):
    """What a collection removed."""

    layers: list[str]
    blobs: list[str]
    bytes: int


class LayerStore:
    """Finds layers, and keeps what `build.Builder` makes. Any thread may call."""

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()
        self.files = path / "layers"
        self.blobs = path / "blobs"
        self.hot = path / "hot"
        self.tmp = path / "tmp"
        self._lock_file = path / "lock"
        try:
            for directory in (path, self.files, self.blobs, self.hot, self.tmp):
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
        named = [self.find(reference) for reference in key]
        stack = self.expand(named)
        resolved = ResolvedStack([self.ref(layer) for layer in stack], merge([n.config for n in named]))
        files = [(str(path), size, layer) for layer in stack for path, size in self.files_of(layer)]
        cached = (generation, resolved, files)
        with self._cache_lock:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = cached
        return cached

    def expand(self, named: Sequence[Layer]) -> builtins.list[Layer]:
        """With what each stands on, bottom to top, each once. Raises LayerCorrupt when one is gone."""
        stack: dict[str, Layer] = {}
        for layer in named:
            for one in (*(self._below(layer, digest) for digest in layer.below), layer):
                # What a layer holds is hidden by the same layer higher up.
                stack.pop(one.digest, None)
                stack[one.digest] = one
        return builtins.list(stack.values())

    def _below(self, layer: Layer, digest: str) -> Layer:
        found = self._catalogue.by_digest(digest)
        if found is None:
            raise LayerCorrupt(
                f"layer {layer.name or layer.digest}: {digest[:12]} below it is gone: build it again",
                digest=layer.digest,
            )
        return found

    def ref(self, layer: Layer) -> LayerRef:
        """Where its files lie."""
        blobs = tuple(str(self.blob(blob.digest)) for blob in layer.blobs)
        return LayerRef(layer.digest, str(self.file(layer.digest)), blobs)

    def find(self, reference: str) -> Layer:
        """The layer of a name, a digest, or the first 12 and more figures of one, or of the digest of an
        image's manifest. Raises UnknownLayer."""
        reference = reference.removeprefix("docker://")
        digest = digest_of(reference)
        if digest:
            by_manifest = self._catalogue.by_source if "/" in reference else lambda _: None
            layer = self._catalogue.by_digest(digest) or by_manifest(f"manifest:sha256:{digest}")
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

    def made_of(self, key: str) -> Layer | None:
        """The layer that was made of what `key` stands for, if it is whole. It counts as used now."""
        layer = self._catalogue.by_source(key)
        try:
            if layer:
                for path, size in self.files_of(layer):
                    self._check_size(str(path), size, layer)
        except LayerCorrupt as e:
            log.warning("%s; it is made again", e)
            return None
        if layer:
            self._catalogue.use([layer.digest])  # whoever asks is about to need it
        return layer

    def list(self) -> builtins.list[Layer]:
        """Every name, then the layers that have none."""
        return self._catalogue.list()

    def page(
        self, *, after: str = "", prefix: str = "", kind: str = "", limit: int = 100
    ) -> builtins.list[Layer]:
        """Names in their order that follow `after` and begin with `prefix`; at most `limit`, and 1000."""
        return self._catalogue.page(after=after, prefix=prefix, kind=kind, limit=limit)

    def names_of(self, digest: str) -> builtins.list[str]:
        return [layer.name for layer in self._catalogue.names_of(digest)]

    def needed_by(self, digest: str) -> builtins.list[str]:
        """Digests of the layers that stand on it, or were merged of it."""
        return self._catalogue.needed_by(digest)

    def file(self, digest: str) -> Path:
        """Where the image of a digest lies."""
        return self.files / f"{digest}.erofs"

    def blob(self, digest: str) -> Path:
        """Where a blob lies."""
        return self.blobs / digest

    def files_of(self, layer: Layer) -> builtins.list[tuple[Path, int]]:
        """Its image and its blobs, each with its size in bytes."""
        blobs = [(self.blob(blob.digest), blob.size) for blob in layer.blobs]
        return [(self.file(layer.digest), layer.size), *blobs]

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
        """Reads the image and its blobs whole. Raises LayerCorrupt when they are not what they were."""
        layer = self.find(digest)
        before = 0
        for path, size in self.files_of(layer):
            self._check_size(str(path), size, layer)
            self._verify_file(layer, path, before, progress)
            before += size

    def _verify_file(
        self, layer: Layer, path: Path, before: int, progress: Callable[[int], None] | None
    ) -> None:
        try:
            actual = hash_file(path, lambda n: progress(before + n) if progress else None)
        except OSError as e:
            raise LayerCorrupt(
                f"layer {layer.digest}: reading {path}: {e.strerror}", digest=layer.digest
            ) from e
        if actual != path.name.partition(".")[0]:
            raise LayerCorrupt(
                f"layer {layer.name or layer.digest}: {path} was altered (SHA-256 {actual}): build it again",
                digest=layer.digest,
            )

    # Changing

    def publish(
        self,
        image: Path,
        layer: Layer,
        blobs: dict[str, Path] | None = None,
        *,
        sources: Sequence[str] = (),
    ) -> Layer:
        """Takes a finished image, which must lie in a staging directory of this store, and names it.

        blobs: those of its blobs that are new, by digest, in the same directory. The others must be here.
        sources: keys of what it was made of, for `made_of`.
        """
        with self._changing():
            for digest, path in (blobs or {}).items():
                self._put(path, self.blob(digest), digest)
            self._check_blobs(layer)
            self._put(image, self.file(layer.digest), layer.digest)
            self._write_beside(image.parent / "layer.json", layer)
            for directory in (self.blobs, self.files):
                sync_directory(directory)
            self._catalogue.add(layer, sources=dict.fromkeys(sources, layer.digest))
        return layer

    def _put(self, draft: Path, final: Path, digest: str) -> None:
        """A file of that name that is not what it says is replaced: building again mends it."""
        if final.exists() and final.stat().st_size == draft.stat().st_size and hash_file(final) == digest:
            return
        with draft.open("rb+") as f:
            os.fsync(f.fileno())
        draft.chmod(0o444)
        draft.rename(final)

    def _check_blobs(self, layer: Layer) -> None:
        """They may have been collected since the build looked."""
        for blob in layer.blobs:
            self._check_size(str(self.blob(blob.digest)), blob.size, layer)

    def _write_beside(self, draft: Path, layer: Layer) -> None:
        with draft.open("wb") as f:
            f.write(msgspec.json.format(msgspec.json.encode(layer), indent=2) + b"\n")
            f.flush()
            os.fsync(f.fileno())
        draft.rename(self.files / f"{layer.digest}.json")

    def tag(self, reference: str, name: str, **changes: object) -> Layer:
        """Another name for a layer that is there; `changes` are fields of its record under that name."""
        layer = msgspec.structs.replace(self.find(reference), name=canonical(name), **changes)
        with self._changing():
            self._catalogue.add(layer)
        return layer

    def remember(self, key: str, digest: str) -> None:
        """That the layer was made of what `key` stands for."""
        self._catalogue.add(sources={key: digest})

    def use(self, digests: Sequence[str]) -> None:
        """Notes that layers are in use, which keeps them from collection for the grace period."""
        self._catalogue.use(digests)

    def remove(self, reference: str) -> builtins.list[str]:
        """Takes a name away, and with the last name its layer; a digest takes every name with it.

        Says what went. A layer that others stand on stays, without a name. Sandboxes that stand on the layer
        keep it: their mounts hold the file. Raises Conflict for the digest of one that others stand on.
        """
        with self._exclusive():
            layer = self.find(reference)
            needed = self._catalogue.needed_by(layer.digest)
            if layer.name:
                self._catalogue.remove_name(layer.name)
                if needed or self._catalogue.names_of(layer.digest):
                    return [layer.name]
                names = [layer.name]
            elif needed:
                raise Conflict(f"layer {layer.digest[:12]}: {needed[0][:12]} stands on it: remove that first")
            else:
                names = self.names_of(layer.digest)
            self._remove([layer.digest])
            self._sweep_unclaimed()
            return [*names, layer.digest]

    def collect(self, grace_s: float = GRACE_S) -> Collected:
        """Removes the layers that no name needs and nobody has used for `grace_s` seconds, and their blobs.

        Safe beside builds and sandboxes: a build's layers are new, a node notes what its sandboxes stand on.
        """
        with self._exclusive():
            before = self._bytes()
            gone = self._catalogue.unreachable(time.time() - grace_s)
            self._remove(gone)
            blobs = [name for name in self._sweep_unclaimed() if "." not in name]
            return Collected(gone, blobs, before - self._bytes())

    def _remove(self, digests: Sequence[str]) -> None:
        self._catalogue.remove_digests(digests)
        for digest in digests:
            for path in (self.files / f"{digest}.json", self.file(digest), self.hot / f"{digest}.json"):
                path.unlink(missing_ok=True)
        sync_directory(self.files)

    def _bytes(self) -> int:
        return sum(e.stat().st_size for d in (self.files, self.blobs) for e in os.scandir(d))

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
        claimed = {self.files: self._catalogue.digests(), self.blobs: self._catalogue.blobs()}
        claimed[self.hot] = claimed[self.files]
        unclaimed = [
            Path(entry.path)
            for directory, digests in claimed.items()
            for entry in os.scandir(directory)
            if entry.name.partition(".")[0] not in digests
        ]
        for path in unclaimed:
            path.unlink(missing_ok=True)
        return [path.name for path in unclaimed]


def disk_full(error: OSError, path: Path) -> DiskFull | None:
    """The error as DiskFull, when that is what it says."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(
            f"building a layer in {path}: {error.strerror}: free some space, or name another --data"
        )
    return None


def hash_file(path: Path, progress: Callable[[int], object] | None = None) -> str:
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
