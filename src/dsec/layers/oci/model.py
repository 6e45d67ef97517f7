"""Manifests, indexes and configurations, in OCI's and in Docker's form, read as if every one were hostile."""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeVar

import msgspec

from dsec.core.errors import InvalidArgument, LayerCorrupt, PayloadTooLarge, Unsupported
from dsec.layers.oci.reference import check_digest

MAX_MANIFEST: Final = 4 << 20
MAX_CONFIG: Final = 8 << 20
MAX_LAYERS: Final = 512
MAX_BLOB: Final = 1 << 43
"""Bytes that one compressed layer may have."""

OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
OCI_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_GZIP: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG: Final = "application/vnd.docker.container.image.v1+json"
MANIFESTS: Final = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
INDEXES: Final = frozenset({OCI_INDEX, DOCKER_LIST})
_CONFIGS: Final = frozenset({OCI_CONFIG, DOCKER_CONFIG})
_LAYERS: Final = frozenset(
    {
        OCI_LAYER,
        OCI_LAYER_GZIP,
        f"{OCI_LAYER}+zstd",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "application/vnd.docker.image.rootfs.diff.tar.zstd",
    }
)

T = TypeVar("T")


class PlatformSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The platform that an index names beside a manifest."""

    os: str = ""
    architecture: str = ""
    variant: str | None = None


class Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A blob by its digest, with its size in bytes."""

    media_type: str
    digest: str
    size: int
    urls: list[str] | None = None
    annotations: dict[str, str] | None = None
    platform: PlatformSpec | None = None

    @property
    def hex(self) -> str:
        return self.digest.removeprefix("sha256:")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One image: its configuration and its layers, bottom to top."""

    schema_version: int
    media_type: str = ""
    config: Descriptor
    layers: list[Descriptor]
    annotations: dict[str, str] | None = None


class Index(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Manifests of one name for several platforms, or of several names."""

    schema_version: int
    media_type: str = ""
    manifests: list[Descriptor]
    annotations: dict[str, str] | None = None


class History(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a layer, or only a piece of the configuration, came to be."""

    created: str | None = None
    created_by: str | None = None
    author: str | None = None
    comment: str | None = None
    empty_layer: bool | None = None


class OciConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an image's configuration says of running it, and what it is."""

    env: list[str] = []
    working_dir: str = ""
    user: str = ""
    entrypoint: list[str] = []
    cmd: list[str] = []
    labels: dict[str, str] = {}
    stop_signal: str = ""
    shell: list[str] = []
    architecture: str = ""
    os: str = ""
    variant: str = ""
    diff_ids: list[str] = []
    """SHA-256 of each layer's tar, uncompressed, bottom to top."""
    history: list[History] = []
    created: str = ""


class _Run(msgspec.Struct, kw_only=True, rename="pascal", omit_defaults=True):
    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    labels: dict[str, str] | None = None
    stop_signal: str | None = None
    shell: list[str] | None = None


class _RootFs(msgspec.Struct, kw_only=True):
    type: str = ""
    diff_ids: list[str] | None = None


class _Config(msgspec.Struct, kw_only=True, omit_defaults=True):
    created: str | None = None
    architecture: str | None = None
    os: str | None = None
    variant: str | None = None
    config: _Run | None = None
    rootfs: _RootFs
    history: list[History] | None = None


class _Probe(msgspec.Struct, kw_only=True, rename="camel"):
    """What a document must show before it is taken for one kind or the other."""

    schema_version: int
    media_type: str | None = None
    manifests: msgspec.Raw = msgspec.Raw()
    layers: msgspec.Raw = msgspec.Raw()
    config: msgspec.Raw = msgspec.Raw()

    def has(self, name: str) -> bool:
        return bytes(getattr(self, name)) not in (b"", b"null")


def printable(text: str, limit: int = 100) -> str:
    """For a message: what comes from outside may hold what a terminal obeys."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def decode(data: bytes, kind: type[T], what: str) -> T:
    """Raises InvalidArgument for what is not JSON of that form."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as e:
        raise InvalidArgument(f"{what}: not as it should be: {e!s:.300}") from e


def check_document(data: bytes, digest: str, what: str) -> bytes:
    """`data` itself, when it is what its digest says. Raises LayerCorrupt."""
    if digest_of(data) != digest:
        raise LayerCorrupt(f"{what}: its content is {digest_of(data)}, not {digest}: fetch it again")
    return data


def parse_manifest(data: bytes, media_type: str, what: str) -> Manifest | Index:
    """An image's manifest, or an index of several.

    media_type: what was said about it from outside, or empty. Raises InvalidArgument, PayloadTooLarge and
    Unsupported.
    """
    if len(data) > MAX_MANIFEST:
        raise PayloadTooLarge(f"{what}: a manifest of more than {MAX_MANIFEST} bytes")
    probe = decode(data, _Probe, what)
    if probe.schema_version == 1:
        raise Unsupported(
            f"{what}: a manifest of Docker's schema 1, which is no longer in use: push it again"
        )
    # Two readers that see two images in one document are how an image is slipped in.
    if probe.has("manifests") and (probe.has("layers") or probe.has("config")):
        raise InvalidArgument(f"{what}: a manifest that is an index as well")
    kind = probe.media_type or media_type
    if probe.has("manifests") and (kind in INDEXES or not kind):
        return _checked_index(decode(data, Index, what), what)
    if probe.has("layers") and (kind in MANIFESTS or not kind):
        return _checked_manifest(decode(data, Manifest, what), what)
    raise Unsupported(f"{what}: no manifest of a container image, but {kind[:100]!r}")


def _checked_index(index: Index, what: str) -> Index:
    for entry in index.manifests:
        _check_descriptor(entry, MAX_MANIFEST, f"{what}: manifest")
    return index


def _checked_manifest(manifest: Manifest, what: str) -> Manifest:
    if len(manifest.layers) > MAX_LAYERS:
        raise PayloadTooLarge(f"{what}: {len(manifest.layers)} layers, more than {MAX_LAYERS}")
    config = manifest.config
    if config.media_type not in _CONFIGS:
        raise Unsupported(f"{what}: no container image: its configuration is {config.media_type[:100]!r}")
    _check_descriptor(config, MAX_CONFIG, f"{what}: configuration")
    for number, layer in enumerate(manifest.layers):
        _check_layer(layer, f"{what}: layer {number}")
    return manifest


def _check_layer(layer: Descriptor, what: str) -> None:
    kind = layer.media_type
    if layer.urls or "foreign" in kind or "nondistributable" in kind:
        raise Unsupported(f"{what}: a foreign layer ({kind[:100]!r}), which lies somewhere else: not fetched")
    if kind not in _LAYERS:
        raise Unsupported(f"{what}: media type {kind[:100]!r}: only tar, plain or with gzip or zstd")
    _check_descriptor(layer, MAX_BLOB, what)


def _check_descriptor(descriptor: Descriptor, limit: int, what: str) -> None:
    check_digest(descriptor.digest, what)
    if not 0 <= descriptor.size <= limit:
        raise PayloadTooLarge(f"{what}: a size of {descriptor.size} bytes: 0 to {limit}")


def parse_config(data: bytes, what: str) -> OciConfig:
    """Raises InvalidArgument and PayloadTooLarge."""
    if len(data) > MAX_CONFIG:
        raise PayloadTooLarge(f"{what}: a configuration of more than {MAX_CONFIG} bytes")
    raw = decode(data, _Config, f"{what}: configuration")
    run, diff_ids = raw.config or _Run(), raw.rootfs.diff_ids or []
    for number, diff_id in enumerate(diff_ids):
        check_digest(diff_id, f"{what}: configuration: diff_id {number}")
    given = {f: value for f in _Run.__struct_fields__ if (value := getattr(run, f))}
    return OciConfig(
        **given,
        architecture=raw.architecture or "",
        os=raw.os or "",
        variant=raw.variant or "",
        diff_ids=diff_ids,
        history=raw.history or [],
        created=raw.created or "",
    )


def format_config(config: OciConfig) -> bytes:
    """The configuration as JSON; equal ones give equal bytes."""
    run: dict[str, Any] = {f: getattr(config, f) or None for f in _Run.__struct_fields__}
    raw = _Config(
        created=config.created or None,
        architecture=config.architecture,
        os=config.os,
        variant=config.variant or None,
        config=_Run(**run),
        rootfs=_RootFs(type="layers", diff_ids=config.diff_ids),
        history=config.history or None,
    )
    return msgspec.json.encode(raw, order="deterministic")
