"""Images out of a registry: blobs that are taken up again where a connection broke."""

from __future__ import annotations

import io
import re
import time
from typing import Any, Final, cast

from dsec.core.errors import DSecError, LayerCorrupt, ProtocolError, Unavailable
from dsec.layers.oci.http import translated
from dsec.layers.oci.model import Descriptor
from dsec.layers.oci.platforms import Platform
from dsec.layers.oci.reference import Reference
from dsec.layers.oci.registry import Registry
from dsec.layers.oci.source import MAX_DECOMPRESSED, Image, check_platform, resolve

MAX_RESUMES: Final = 50
"""Of one blob, however much each of them brings."""
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(?:(\d{1,15})|\*)\Z")


class BlobReader(io.RawIOBase):
    """A blob's bytes, not yet looked at. A broken connection is made anew from the byte where it broke."""

    def __init__(self, registry: Registry, repository: str, descriptor: Descriptor, what: str) -> None:
        self._registry, self._repository, self._blob, self._what = registry, repository, descriptor, what
        self._at = 0
        self._skip = 0
        """Bytes that are here already, and come again."""
        self._failed = 0
        self._resumes = 0
        self._response: Any = None
        self._connect()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not len(buffer):
            return 0
        while True:
            try:
                return self._read(buffer)
            except Unavailable:
                self._drop()
                self._give_up_after_enough()
                self._registry.pause(self._failed - 1)

    def _read(self, buffer: Any) -> int:
        if self._response is None:
            self._connect()
        while True:
            with translated(self._what):
                data: bytes = self._response.read1(max(len(buffer), 1), decode_content=False)
            self._watch_speed(len(data))
            if data and self._skip:
                dropped = min(self._skip, len(data))
                self._skip -= dropped
                data = data[dropped:]
                if not data:
                    continue
            if not data and self._at < self._blob.size and self._response.length_remaining is None:
                # Without a length, an end and a broken connection look alike.
                raise Unavailable(f"{self._what}: the connection ended early")
            buffer[: len(data)] = data
            self._at += len(data)
            self._failed = 0 if data else self._failed
            return len(data)

    def _connect(self) -> None:
        self._response = self._registry.get_blob(self._repository, self._blob.digest, self._at, self._what)
        try:
            self._check_head()
        except DSecError:
            self._drop()
            raise
        self._since, self._got = time.monotonic(), 0

    def _check_head(self) -> None:
        """What is promised must fit before a byte of it is read."""
        head = self._response.headers
        start, left = 0, self._blob.size
        if self._response.status == 206:
            span = _CONTENT_RANGE.match(head.get("Content-Range", ""))
            if not span or int(span[1]) != self._at:
                raise ProtocolError(
                    f"{self._what}: asked from byte {self._at}, the registry sends other bytes"
                )
            start, left = self._at, self._blob.size - self._at
        self._skip = self._at - start
        length = head.get("Content-Length")
        if length is not None and length.isdecimal() and int(length) != left:
            raise LayerCorrupt(f"{self._what}: the registry has {length[:15]} bytes, not {left}")

    def _watch_speed(self, got: int) -> None:
        self._got += got
        patience = self._registry.patience
        took = time.monotonic() - self._since
        if took > patience.head:
            if self._got < patience.slowest * took:
                raise Unavailable(f"{self._what}: {self._got} bytes in {took:.0f} s are too few")
            self._since, self._got = time.monotonic(), 0

    def _give_up_after_enough(self) -> None:
        self._failed += 1
        self._resumes += 1
        if self._failed >= self._registry.patience.attempts or self._resumes > MAX_RESUMES:
            got = f"{self._at} of {self._blob.size} bytes"
            raise Unavailable(f"{self._what}: broke off {self._resumes} times, the last after {got}")

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()


class RegistryBlobs:
    """Blobs of one repository. Takes the registry over, and closes it."""

    def __init__(self, registry: Registry, repository: str) -> None:
        self._registry, self._repository = registry, repository

    def open(self, descriptor: Descriptor, what: str) -> io.RawIOBase:
        return BlobReader(self._registry, self._repository, descriptor, what)

    def close(self) -> None:
        self._registry.close()


class _Manifests:
    """A registry keeps manifests apart from other blobs."""

    def __init__(self, registry: Registry, reference: Reference) -> None:
        self._registry, self._repository = registry, reference.repository

    def open(self, descriptor: Descriptor, what: str) -> io.RawIOBase:
        data, _, _ = self._registry.manifest(self._repository, descriptor.digest, what)
        return cast("io.RawIOBase", io.BytesIO(data))

    def close(self) -> None:
        pass


def open_registry_image(
    registry: Registry,
    reference: Reference,
    *,
    platform: Platform | None = None,
    max_decompressed: int = MAX_DECOMPRESSED,
) -> Image:
    """Takes over `registry`, also when it fails. Raises what `Registry.manifest` and `resolve` raise."""
    name = str(reference)
    blobs = RegistryBlobs(registry, reference.repository)
    try:
        data, kind, digest = registry.manifest(reference.repository, reference.wanted, f"image {name}")
        found = Descriptor(kind, digest, len(data))
        manifest, digest = resolve(name, _Manifests(registry, reference), found, data, platform)
        image = Image(name, blobs, manifest, digest, max_decompressed=max_decompressed)
        check_platform(image, platform)
        return image
    except BaseException:
        registry.close()
        raise
