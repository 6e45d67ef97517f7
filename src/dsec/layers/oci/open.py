"""An image by what a user calls it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec.core.errors import InvalidArgument, NotFound
from dsec.layers.oci import credentials
from dsec.layers.oci.archive import Archive, Directory, Files
from dsec.layers.oci.credentials import Credentials
from dsec.layers.oci.docker_archive import MANIFEST, open_docker_archive
from dsec.layers.oci.http import Patience
from dsec.layers.oci.layout import MARKER, open_layout
from dsec.layers.oci.platforms import Platform
from dsec.layers.oci.pull import open_registry_image
from dsec.layers.oci.reference import Reference
from dsec.layers.oci.registry import Registry
from dsec.layers.oci.source import MAX_DECOMPRESSED, Image

MAX_SOURCE: Final = 4096
_Opener = Callable[..., Image]


def open_image(
    source: str,
    *,
    platform: str | None = None,
    auth: Credentials | None = None,
    docker_config: Path | None = None,
    verify: bool = True,
    ca: Path | None = None,
    plain_http: bool | None = None,
    patience: Patience | None = None,
    max_decompressed: int = MAX_DECOMPRESSED,
) -> Image:
    """An image to read; close it, or use it in `with`.

    source: `docker://HOST/REPOSITORY:TAG`, `oci:DIRECTORY[:TAG]`, `oci-archive:FILE[:TAG]`,
    `docker-archive:FILE[:NAME]`; else a file or directory that is there, by what it holds; else a reference
    to a registry.
    platform: such as `linux/arm64`; Linux on this machine when it is not given.
    auth: None looks into Docker's own configuration (`docker_config`, or where Docker keeps it).
    verify, ca, plain_http, patience: as `Registry` and `Patience` say.
    max_decompressed: bytes that one layer may have.

    Raises InvalidArgument, Unsupported, NotFound, LayerCorrupt, PayloadTooLarge, and of a registry
    Unauthenticated, PermissionDenied, TooManyRequests, Unavailable and ProtocolError.
    """
    if not source or len(source) > MAX_SOURCE or "\0" in source:
        raise InvalidArgument(f"image {source[:80]!r}: no name of an image")
    wanted = Platform.parse(platform) if platform else None
    local = _local(source)
    if local:
        opener, files, tag = local
        return opener(files, source, tag=tag, platform=wanted, max_decompressed=max_decompressed)
    reference = Reference.parse(source)
    registry = Registry(
        reference.host,
        credentials=auth or credentials.find(reference.host, docker_config),
        verify=verify,
        ca=ca,
        plain_http=plain_http,
        patience=patience,
    )
    return open_registry_image(registry, reference, platform=wanted, max_decompressed=max_decompressed)


def _local(source: str) -> tuple[_Opener, Files, str] | None:
    """None for an image of a registry."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme in ("oci", "oci-archive", "docker-archive"):
        path, tag = _split(rest, source)
        if path.is_dir() != (scheme == "oci"):
            raise InvalidArgument(f"{source}: {path} is {'a' if path.is_dir() else 'no'} directory")
        if scheme == "oci":
            return open_layout, Directory(path), tag
        opener = open_layout if scheme == "oci-archive" else open_docker_archive
        return opener, Archive(path, source), tag
    if source.startswith("docker://") or not os.path.exists(source):
        if source.startswith(("/", "./", "../")):
            raise NotFound(f"{source}: there is no such file or directory")
        return None
    return _by_content(Path(source), source)


def _split(rest: str, source: str) -> tuple[Path, str]:
    """The longest path that is there, and what follows it after a colon."""
    path, tag = rest, ""
    while path:
        if os.path.exists(path):
            return Path(path), tag
        path, _, tag = path.rpartition(":")
        tag = rest[len(path) + 1 :]
    raise NotFound(f"{source}: there is no such file or directory")


def _by_content(path: Path, source: str) -> tuple[_Opener, Files, str]:
    if path.is_dir():
        return open_layout, Directory(path), ""
    files = Archive(path, source)
    if files.has(MARKER):
        return open_layout, files, ""
    if files.has(MANIFEST):
        return open_docker_archive, files, ""
    files.close()
    raise InvalidArgument(f"{source}: no image: neither {MARKER} nor {MANIFEST} is in the archive")
