"""An image that can be read, wherever it lies."""

from __future__ import annotations

import io
from typing import Final, Protocol, Self

from dsec.core.errors import InvalidArgument, NotFound
from dsec.layers.oci.model import (
    MAX_CONFIG,
    MAX_MANIFEST,
    Descriptor,
    Index,
    Manifest,
    OciConfig,
    check_document,
    digest_of,
    parse_config,
    parse_manifest,
    printable,
)
from dsec.layers.oci.platforms import Platform, choose, here
from dsec.layers.oci.streams import BUFFER, Checked, Tar, read_all

MAX_DECOMPRESSED: Final = 64 << 30
"""Bytes that one layer may have when it is decompressed, unless said otherwise."""
_MAX_DEPTH: Final = 4


class ImageSource(Protocol):
    """An image. Several threads may read layers of one at the same time."""

    @property
    def reference(self) -> str: ...
    @property
    def manifest_digest(self) -> str: ...
    @property
    def config(self) -> OciConfig: ...
    @property
    def raw_config(self) -> bytes: ...
    @property
    def layers(self) -> list[Descriptor]: ...
    @property
    def diff_ids(self) -> list[str]: ...
    def open_layer(self, number: int) -> io.BufferedReader:
        """The layer as it is kept. Raises LayerCorrupt while it is read, when it is not what it should be."""

    def open_tar(self, number: int) -> io.BufferedReader:
        """The layer's tar. Raises LayerCorrupt as above, PayloadTooLarge when it grows beyond its limit."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class Blobs(Protocol):
    """Where an image's pieces lie."""

    def open(self, descriptor: Descriptor, what: str) -> io.RawIOBase:
        """The bytes, not yet looked at. Raises NotFound."""

    def close(self) -> None: ...


class Image:
    """What `ImageSource` promises, over anything that finds blobs."""

    def __init__(
        self, reference: str, blobs: Blobs, manifest: Manifest, manifest_digest: str, *, max_decompressed: int
    ) -> None:
        self.reference = reference
        self.manifest_digest = manifest_digest
        self.manifest = manifest
        self.layers = manifest.layers
        self._blobs = blobs
        self._limit = max_decompressed
        self.raw_config = fetch(blobs, manifest.config, MAX_CONFIG, f"{reference}: configuration")
        self.config = parse_config(self.raw_config, reference)
        self.diff_ids = self.config.diff_ids
        if len(self.diff_ids) != len(self.layers):
            raise InvalidArgument(
                f"{reference}: {len(self.layers)} layers, but {len(self.diff_ids)} in its configuration"
            )

    def open_layer(self, number: int) -> io.BufferedReader:
        layer, what = self.layers[number], self._what(number)
        source = self._blobs.open(layer, what)
        return io.BufferedReader(Checked(source, what=what, digest=layer.digest, size=layer.size), BUFFER)

    def open_tar(self, number: int) -> io.BufferedReader:
        what = self._what(number)
        tar = Tar(self.open_layer(number), what=what, limit=self._limit)
        checked = Checked(tar, what=f"{what}, unpacked", digest=self.diff_ids[number], size=None)
        return io.BufferedReader(checked, BUFFER)

    def _what(self, number: int) -> str:
        return f"{self.reference}: layer {number} ({self.layers[number].digest[:19]})"

    def close(self) -> None:
        self._blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch(blobs: Blobs, descriptor: Descriptor, limit: int, what: str) -> bytes:
    """A small blob, checked. Raises LayerCorrupt, PayloadTooLarge and NotFound."""
    size = min(descriptor.size, limit)
    data = read_all(blobs.open(descriptor, what), size, what)
    return check_document(data, descriptor.digest, what)


def resolve(
    reference: str, blobs: Blobs, found: Descriptor, document: bytes, platform: Platform | None
) -> tuple[Manifest, str]:
    """The manifest for a platform and its digest, through as many indexes as lie before it.

    platform: None for Linux on this machine. Raises NotFound when there is none for it, InvalidArgument
    when indexes lie too deep.
    """
    for _ in range(_MAX_DEPTH):
        parsed = parse_manifest(document, found.media_type, reference)
        if isinstance(parsed, Manifest):
            return parsed, digest_of(document)
        found = _pick(parsed, platform or here(), reference)
        document = fetch(blobs, found, MAX_MANIFEST, f"{reference}: manifest {found.digest[:19]}")
    raise InvalidArgument(f"{reference}: more than {_MAX_DEPTH} indexes, one in the other")


def _pick(index: Index, platform: Platform, reference: str) -> Descriptor:
    if len(index.manifests) == 1 and index.manifests[0].platform is None:
        return index.manifests[0]
    return choose(index.manifests, platform, reference)


def check_platform(image: Image, platform: Platform | None) -> None:
    """A platform that was asked for holds for an image without an index too. Raises NotFound."""
    config = image.config
    if platform and (config.os, config.architecture) != (platform.os, platform.architecture):
        is_for = Platform(config.os, config.architecture)
        raise NotFound(f"{image.reference}: nothing for {platform}: it is for {printable(str(is_for))}")
