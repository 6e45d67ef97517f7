"""Images written to a layout, an archive or a registry. Memory stays flat; equal images give equal bytes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol, cast

import msgspec

from dsec.core.errors import DiskFull, InvalidArgument
from dsec.layers.oci.layout import FULL_NAME, MARKER, NAME
from dsec.layers.oci.model import (
    MAX_LAYERS,
    MAX_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    Descriptor,
    Index,
    Manifest,
    OciConfig,
    PlatformSpec,
    decode,
    digest_of,
    format_config,
)
from dsec.layers.oci.platforms import here
from dsec.layers.oci.reference import TAG, Reference
from dsec.layers.oci.registry import Registry
from dsec.layers.oci.source import ImageSource
from dsec.layers.oci.streams import Section

LEVEL: Final = 6
"""Of gzip: 1 is fast, 9 is small."""
_CHUNK: Final = 1 << 20
_MARKER: Final = b'{"imageLayoutVersion":"1.0.0"}'
Form = Literal["oci", "docker"]


class NewLayer(msgspec.Struct, frozen=True):
    """A layer's tar, opened anew by each call; `packed` when it lies there compressed already."""

    open_tar: Callable[[], IO[bytes]]
    packed: Descriptor | None = None
    open_packed: Callable[[], IO[bytes]] | None = None
    diff_id: str = ""


class NewImage(msgspec.Struct, frozen=True):
    """An image to be written. Of `config`, `diff_ids` are filled in here."""

    config: OciConfig
    layers: list[NewLayer]
    raw_config: bytes = b""
    """The configuration's own bytes, kept when the layers are those that it names."""


def of_image(source: ImageSource) -> NewImage:
    """An image that is there, to be written elsewhere as it is. `source` must stay open."""
    layers = [
        NewLayer(
            lambda n=n: cast("IO[bytes]", source.open_tar(n)),  # type: ignore[misc]
            descriptor,
            lambda n=n: cast("IO[bytes]", source.open_layer(n)),  # type: ignore[misc]
            source.diff_ids[n],
        )
        for n, descriptor in enumerate(source.layers)
    ]
    return NewImage(source.config, layers, source.raw_config)


class Written(msgspec.Struct, frozen=True):
    """What was written."""

    manifest: Descriptor
    config: Descriptor
    layers: list[Descriptor]
    diff_ids: list[str]


class _Sink(Protocol):
    """Where blobs go."""

    def has(self, descriptor: Descriptor) -> bool: ...
    def spool(self) -> IO[bytes]:
        """An empty file, to be filled and given to `keep`."""

    def keep(self, file: IO[bytes], descriptor: Descriptor) -> None: ...


def write_layout(path: Path, image: NewImage, *, tag: str = "latest", level: int = LEVEL) -> Written:
    """Into a directory, which is made, or is a layout already: there the tag is added or set anew.

    Raises InvalidArgument, DiskFull, and what opening and reading the layers raises.
    """
    _check_tag(tag)
    with _disk(path):
        (path / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        index = _existing_index(path)
        written, manifest = _write(image, _LayoutSink(path), level, plain=False)
        _replace(path / "blobs/sha256" / written.manifest.hex, manifest)
        _replace(path / MARKER, _MARKER)
        kept = [e for e in index if (e.annotations or {}).get(NAME) != tag]
        _replace(path / "index.json", _index([*kept, _entry(written, image.config, {NAME: tag})]))
    return written


def write_archive(
    path: Path, image: NewImage, form: Form = "oci", *, name: str = "", level: int = LEVEL
) -> Written:
    """A tar archive that `docker load`, skopeo and others read, as `docker-archive:` and as `oci-archive:`.

    form: `oci` packs layers with gzip, `docker` leaves them plain, as `docker save` does. name: a reference
    for the image. Replaces the file by rename. Raises as `write_layout` does.
    """
    reference = Reference.parse(name) if name else None
    if reference and not reference.tag:
        raise InvalidArgument(f"an archive's image has a name with a tag, not {name!r}")
    with _disk(path), tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as out:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            sink = _TarSink(tar, path.parent)
            written, manifest = _write(image, sink, level, plain=form == "docker")
            sink.add(_blob(written.manifest), manifest)
            sink.add(MARKER, _MARKER)
            notes = {NAME: reference.tag, FULL_NAME: str(reference)} if reference else {}
            sink.add("index.json", _index([_entry(written, image.config, notes)]))
            sink.add("manifest.json", _docker_manifest(written, reference))
        _publish(out, path)
    return written


def push(
    registry: Registry,
    reference: Reference,
    image: NewImage,
    *,
    level: int = LEVEL,
    chunk: int = 0,
    mount_from: str = "",
) -> Written:
    """To a registry, under the reference's tag, or its own digest when it has none.

    chunk: bytes of each piece of an upload; 0 for one piece. mount_from: a repository of the same registry
    that has some of the layers. Layers are packed into a temporary file first, one at a time.
    """
    sink = _PushSink(registry, reference.repository, chunk, mount_from)
    with _disk(Path(tempfile.gettempdir())):
        written, manifest = _write(image, sink, level, plain=False)
    if reference.digest and reference.digest != written.manifest.digest:
        raise InvalidArgument(f"pushing {reference}: the image is {written.manifest.digest}")
    wanted = reference.tag or written.manifest.digest
    registry.put_manifest(reference.repository, wanted, manifest, OCI_MANIFEST)
    return written


def _write(image: NewImage, sink: _Sink, level: int, *, plain: bool) -> tuple[Written, bytes]:
    """Layers and configuration into the sink; the manifest is the caller's to place."""
    if len(image.layers) > MAX_LAYERS:
        raise InvalidArgument(f"an image of {len(image.layers)} layers: at most {MAX_LAYERS}")
    if not 0 <= level <= 9:
        raise InvalidArgument(f"level {level}: 0 to 9")
    done = [_write_layer(layer, sink, level, plain) for layer in image.layers]
    layers, diff_ids = [d for d, _ in done], [i for _, i in done]
    data = image.raw_config if image.raw_config and diff_ids == image.config.diff_ids else b""
    data = data or format_config(_completed(image.config, diff_ids))
    config = Descriptor(OCI_CONFIG, digest_of(data), len(data))
    _put(sink, config, data)
    document = Manifest(schema_version=2, media_type=OCI_MANIFEST, config=config, layers=layers)
    manifest = msgspec.json.encode(document, order="deterministic")
    head = Descriptor(OCI_MANIFEST, digest_of(manifest), len(manifest))
    return Written(head, config, layers, diff_ids), manifest


def _completed(config: OciConfig, diff_ids: list[str]) -> OciConfig:
    platform = here()
    full = [h for h in config.history if not h.empty_layer]
    return msgspec.structs.replace(
        config,
        diff_ids=diff_ids,
        # Readers refuse a history that speaks of another number of layers.
        history=config.history if len(full) == len(diff_ids) else [],
        architecture=config.architecture or platform.architecture,
        os=config.os or platform.os,
    )


def _write_layer(layer: NewLayer, sink: _Sink, level: int, plain: bool) -> tuple[Descriptor, str]:
    if layer.packed and layer.open_packed and not plain:
        descriptor = _as_oci(layer.packed)
        if not sink.has(descriptor):
            with sink.spool() as file:
                with layer.open_packed() as source:
                    while piece := source.read(_CHUNK):
                        file.write(piece)
                sink.keep(file, descriptor)
        return descriptor, layer.diff_id
    with sink.spool() as file:
        with layer.open_tar() as source:
            descriptor, diff_id = _pack(source, file, None if plain else level)
        if not sink.has(descriptor):
            sink.keep(file, descriptor)
    return descriptor, diff_id


def _as_oci(packed: Descriptor) -> Descriptor:
    """The same blob by OCI's name for it."""
    kind = packed.media_type
    suffix = next((f"+{s}" for s in ("gzip", "zstd") if kind.endswith((f".{s}", f"+{s}"))), "")
    return Descriptor(f"{OCI_LAYER}{suffix}", packed.digest, packed.size)


def _pack(source: IO[bytes], out: IO[bytes], level: int | None) -> tuple[Descriptor, str]:
    """The tar into `out`, in gzip without name or time (level None: as it is), and both of its digests."""
    diff_id, digest, size = hashlib.sha256(), hashlib.sha256(), 0
    packer: Any = None if level is None else zlib.compressobj(level, zlib.DEFLATED, 31)
    while True:
        piece = source.read(_CHUNK)
        diff_id.update(piece)
        packed = piece
        if packer is not None:
            packed = packer.compress(piece) if piece else packer.flush()
        digest.update(packed)
        size += out.write(packed)
        if not piece:
            break
    kind = OCI_LAYER if level is None else OCI_LAYER_GZIP
    return Descriptor(kind, f"sha256:{digest.hexdigest()}", size), f"sha256:{diff_id.hexdigest()}"


def _put(sink: _Sink, descriptor: Descriptor, data: bytes) -> None:
    if not sink.has(descriptor):
        with sink.spool() as file:
            file.write(data)
            sink.keep(file, descriptor)


def _blob(descriptor: Descriptor) -> str:
    return f"blobs/sha256/{descriptor.hex}"


class _LayoutSink:
    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, descriptor: Descriptor) -> bool:
        """Looked at whole: writing again mends what was damaged."""
        try:
            with (self._path / _blob(descriptor)).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == descriptor.hex
        except FileNotFoundError:
            return False

    def spool(self) -> IO[bytes]:
        return tempfile.NamedTemporaryFile(dir=self._path / "blobs", prefix=".new-")

    def keep(self, file: IO[bytes], descriptor: Descriptor) -> None:
        _publish(file, self._path / _blob(descriptor))


class _TarSink:
    def __init__(self, tar: tarfile.TarFile, near: Path) -> None:
        self._tar, self._near = tar, near
        self._kept: set[str] = set()

    def has(self, descriptor: Descriptor) -> bool:
        return descriptor.digest in self._kept

    def spool(self) -> IO[bytes]:
        return cast("IO[bytes]", tempfile.TemporaryFile(dir=self._near))

    def keep(self, file: IO[bytes], descriptor: Descriptor) -> None:
        self._kept.add(descriptor.digest)
        file.seek(0)
        self._add(_blob(descriptor), descriptor.size, file)

    def add(self, name: str, data: bytes) -> None:
        self._add(name, len(data), io.BytesIO(data))

    def _add(self, name: str, size: int, file: IO[bytes]) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o644
        self._tar.addfile(info, file)
        self._tar.members.clear()  # type: ignore[attr-defined]


class _PushSink:
    def __init__(self, registry: Registry, repository: str, chunk: int, mount_from: str) -> None:
        self._registry, self._repository = registry, repository
        self._chunk, self._mount_from = chunk, mount_from

    def has(self, descriptor: Descriptor) -> bool:
        return self._registry.has_blob(self._repository, descriptor.digest)

    def spool(self) -> IO[bytes]:
        return cast("IO[bytes]", tempfile.TemporaryFile())

    def keep(self, file: IO[bytes], descriptor: Descriptor) -> None:
        file.flush()

        def opened() -> IO[bytes]:
            return cast("IO[bytes]", io.BufferedReader(Section(file, 0, descriptor.size), _CHUNK))

        self._registry.push_blob(
            self._repository, descriptor, opened, mount_from=self._mount_from, chunk=self._chunk
        )


def _check_tag(tag: str) -> None:
    if not TAG.match(tag):
        raise InvalidArgument(f"tag {tag[:80]!r}: up to 128 letters, digits and . _ -")


def _existing_index(path: Path) -> list[Descriptor]:
    try:
        data = (path / "index.json").read_bytes()
    except FileNotFoundError:
        return []
    if len(data) > MAX_MANIFEST:
        raise InvalidArgument(f"{path}/index.json has more than {MAX_MANIFEST} bytes")
    return decode(data, Index, f"{path}/index.json").manifests


def _entry(written: Written, config: OciConfig, notes: dict[str, str]) -> Descriptor:
    full = _completed(config, written.diff_ids)
    platform = PlatformSpec(full.os, full.architecture, full.variant or None)
    return msgspec.structs.replace(written.manifest, annotations=notes or None, platform=platform)


def _index(entries: list[Descriptor]) -> bytes:
    index = Index(schema_version=2, media_type=OCI_INDEX, manifests=entries)
    return msgspec.json.encode(index, order="deterministic")


def _docker_manifest(written: Written, reference: Reference | None) -> bytes:
    entry = {
        "Config": _blob(written.config),
        "RepoTags": [_docker_name(reference)] if reference else [],
        "Layers": [_blob(layer) for layer in written.layers],
    }
    return msgspec.json.encode([entry])


def _docker_name(reference: Reference) -> str:
    """As Docker prints it, without its own hub's name."""
    return f"{reference.host}/{reference.repository}:{reference.tag}".removeprefix("docker.io/").removeprefix(
        "library/"
    )


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-") as file:
        file.write(data)
        _publish(cast("IO[bytes]", file), path)


def _publish(file: Any, path: Path) -> None:
    """The named temporary file becomes `path`, whole or not at all."""
    file.flush()
    os.fchmod(file.fileno(), 0o644)
    os.fsync(file.fileno())
    second = f"{file.name}.done"
    os.link(file.name, second)
    os.replace(second, path)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (28, 122):
            raise DiskFull(f"writing an image to {path}: {e.strerror}: free some space") from e
        if e.errno is None:
            raise
        where = f"{e.filename}: " if e.filename else ""
        raise InvalidArgument(f"writing an image to {path}: {where}{e.strerror}") from e
