"""OCI image layouts: a directory (`oci:`), or a tar archive of one (`oci-archive:`)."""

from __future__ import annotations

import io
from typing import Final

import msgspec

from dsec.core.errors import DSecError, InvalidArgument, NotFound, Unsupported
from dsec.layers.oci.archive import Files, read_small
from dsec.layers.oci.model import (
    MAX_MANIFEST,
    OCI_INDEX,
    Descriptor,
    Index,
    decode,
    parse_manifest,
    printable,
)
from dsec.layers.oci.platforms import Platform
from dsec.layers.oci.source import MAX_DECOMPRESSED, Image, check_platform, fetch, resolve

NAME: Final = "org.opencontainers.image.ref.name"
FULL_NAME: Final = "io.containerd.image.name"
MARKER: Final = "oci-layout"


class _Marker(msgspec.Struct, rename="camel"):
    image_layout_version: str


class LayoutBlobs:
    """Blobs of a layout, by their digests."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def open(self, descriptor: Descriptor, what: str) -> io.RawIOBase:
        return self._files.open(f"blobs/sha256/{descriptor.hex}", what)

    def close(self) -> None:
        self._files.close()


def open_layout(
    files: Files,
    reference: str,
    *,
    tag: str = "",
    platform: Platform | None = None,
    max_decompressed: int = MAX_DECOMPRESSED,
) -> Image:
    """The image of that tag; without one, the only image there is. Takes over `files`, also when it fails."""
    try:
        index = _index(files, reference)
        entry = _entry(index, tag, reference)
        blobs = LayoutBlobs(files)
        document = fetch(blobs, entry, MAX_MANIFEST, f"{reference}: manifest")
        manifest, digest = resolve(reference, blobs, entry, document, platform)
        image = Image(reference, blobs, manifest, digest, max_decompressed=max_decompressed)
        check_platform(image, platform)
        return image
    except BaseException:
        files.close()
        raise


def _index(files: Files, reference: str) -> Index:
    try:
        marker = decode(read_small(files, MARKER, 4096, reference), _Marker, f"{reference}: {MARKER}")
    except NotFound as e:
        raise InvalidArgument(f"{reference}: no OCI layout: it has no file {MARKER}") from e
    if marker.image_layout_version.split(".")[0] != "1":
        raise Unsupported(f"{reference}: a layout of version {marker.image_layout_version[:20]!r}, not 1")
    data = read_small(files, "index.json", MAX_MANIFEST, reference)
    parsed = parse_manifest(data, OCI_INDEX, f"{reference}: index.json")
    if not isinstance(parsed, Index):
        raise InvalidArgument(f"{reference}: index.json is no index")
    return parsed


def _entry(index: Index, tag: str, reference: str) -> Descriptor:
    entries = index.manifests
    if tag:
        entries = [e for e in entries if tag in _names(e)] or [
            e for e in entries if any(n.endswith(f":{tag}") for n in _names(e))
        ]
    if len(entries) == 1 or len({e.digest for e in entries}) == 1:
        return entries[0]
    raise _unclear(index, tag, reference)


def _unclear(index: Index, tag: str, reference: str) -> DSecError:
    there = sorted({n for e in index.manifests for n in _names(e)})[:20]
    names = ", ".join(printable(n) for n in there) or "nothing with a name"
    if tag:
        return NotFound(f"{reference}: no image {tag!r}, or several; there is {names}")
    return InvalidArgument(f"{reference}: {len(index.manifests)} images: name one after a colon; {names}")


def _names(entry: Descriptor) -> list[str]:
    notes = entry.annotations or {}
    return [notes[key] for key in (NAME, FULL_NAME) if key in notes]
