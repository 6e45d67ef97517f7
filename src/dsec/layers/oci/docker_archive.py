"""Archives that `docker save` writes: `manifest.json` names a configuration and layers, all by path."""

from __future__ import annotations

import hashlib
import io
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument, NotFound, PayloadTooLarge, Unsupported
from dsec.layers.decompress import GZIP, ZSTD
from dsec.layers.oci.archive import Files, read_small
from dsec.layers.oci.model import (
    DOCKER_CONFIG,
    DOCKER_MANIFEST,
    MAX_CONFIG,
    MAX_LAYERS,
    MAX_MANIFEST,
    Descriptor,
    Manifest,
    OciConfig,
    decode,
    digest_of,
    parse_config,
)
from dsec.layers.oci.platforms import Platform
from dsec.layers.oci.reference import Reference
from dsec.layers.oci.source import MAX_DECOMPRESSED, Image, check_platform
from dsec.layers.oci.streams import BUFFER

MANIFEST: Final = "manifest.json"
_LAYER: Final = "application/vnd.docker.image.rootfs.diff.tar"


class Entry(msgspec.Struct, rename="pascal"):
    """One image of the archive."""

    config: str
    layers: list[str] | None = None
    repo_tags: list[str] | None = None


class _PathBlobs:
    """Blobs by digest, each under the path that the archive has for it."""

    def __init__(self, files: Files, paths: dict[str, str]) -> None:
        self._files, self._paths = files, paths

    def open(self, descriptor: Descriptor, what: str) -> io.RawIOBase:
        return self._files.open(self._paths[descriptor.digest], what)

    def close(self) -> None:
        self._files.close()


def open_docker_archive(
    files: Files,
    reference: str,
    *,
    tag: str = "",
    platform: Platform | None = None,
    max_decompressed: int = MAX_DECOMPRESSED,
) -> Image:
    """The image of that name; without one, the only image there is. Takes over `files`, also when it fails.

    `manifest_digest` is that of the manifest which Docker would write for it.
    """
    try:
        entry = _entry(files, tag, reference)
        manifest, paths = _manifest(files, entry, reference)
        digest = digest_of(msgspec.json.encode(manifest, order="deterministic"))
        blobs = _PathBlobs(files, paths)
        image = Image(reference, blobs, manifest, digest, max_decompressed=max_decompressed)
        check_platform(image, platform)
        return image
    except BaseException:
        files.close()
        raise


def _entry(files: Files, tag: str, reference: str) -> Entry:
    try:
        data = read_small(files, MANIFEST, MAX_MANIFEST, reference)
    except NotFound as e:
        if files.has("repositories"):
            raise Unsupported(f"{reference}: an archive of Docker before 1.10: load and save it again") from e
        raise InvalidArgument(f"{reference}: no archive of `docker save`: it has no {MANIFEST}") from e
    entries = decode(data, list[Entry], f"{reference}: {MANIFEST}")
    wanted = str(Reference.parse(tag)) if tag else ""
    found = [e for e in entries if not tag or wanted in _names(e)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(sorted({n for e in entries for n in _names(e)})[:20]) or "nothing with a name"
    if tag:
        raise NotFound(f"{reference}: no image {tag!r}; there is {there}")
    raise InvalidArgument(f"{reference}: {len(entries)} images: name one after a colon; {there}")


def _names(entry: Entry) -> list[str]:
    names = []
    for name in entry.repo_tags or []:
        try:
            names.append(str(Reference.parse(name)))
        except InvalidArgument:
            continue  # what cannot be asked for
    return names


def _manifest(files: Files, entry: Entry, reference: str) -> tuple[Manifest, dict[str, str]]:
    """As it would be in a registry, with the paths of the blobs."""
    raw = read_small(files, entry.config, MAX_CONFIG, reference)
    config = parse_config(raw, reference)
    layers = entry.layers or []
    if len(layers) > MAX_LAYERS:
        raise PayloadTooLarge(f"{reference}: {len(layers)} layers, more than {MAX_LAYERS}")
    if len(layers) != len(config.diff_ids):
        raise InvalidArgument(
            f"{reference}: {len(layers)} layers, but {len(config.diff_ids)} in its configuration"
        )
    described = [_layer(files, path, config, n, reference) for n, path in enumerate(layers)]
    head = Descriptor(DOCKER_CONFIG, digest_of(raw), len(raw))
    manifest = Manifest(schema_version=2, media_type=DOCKER_MANIFEST, config=head, layers=described)
    paths = {d.digest: path for d, path in zip(described, layers, strict=True)}
    return manifest, paths | {head.digest: entry.config}


def _layer(files: Files, path: str, config: OciConfig, number: int, reference: str) -> Descriptor:
    """A layer's digest is known when it is a plain tar; when not, it is read once."""
    what = f"{reference}: layer {number}"
    size = files.size(path, what)
    with files.open(path, what) as source:
        start = source.read(6) or b""
        if start.startswith(GZIP):
            return Descriptor(f"{_LAYER}.gzip", _hashed(source, start), size)
        if start.startswith(ZSTD):
            return Descriptor(f"{_LAYER}.zstd", _hashed(source, start), size)
    return Descriptor(_LAYER, config.diff_ids[number], size)


def _hashed(source: io.RawIOBase, start: bytes) -> str:
    digest = hashlib.sha256(start)
    while piece := source.read(BUFFER):
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"
