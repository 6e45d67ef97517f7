"""Layers are built beside the store and appear in it at once, or not at all."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsec.core import specs
from dsec.core.errors import InvalidArgument, PermissionDenied
from dsec.core.images import ImageConfig
from dsec.layers import directory_in, mkfs, suite, tarball, tree
from dsec.layers.archive_in import read_tar
from dsec.layers.assemble import Assembled, Assembly, collapse
from dsec.layers.decompress import plain
from dsec.layers.model import KINDS, BlobRef, Kind, Layer, Provenance
from dsec.layers.reference import canonical
from dsec.layers.store import LayerStore, hash_file

MAX_LABEL: Final = 255
TOOL: Final = "dsec erofs 1"
"""Who wrote the metadata, and in which form: another form gives other digests for the same input."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of the layer, and how it is packed."""

    name: str
    """A reference; empty for a layer that is known by its digest alone."""
    kind: Kind
    labels: dict[str, str] = {}
    config: ImageConfig = ImageConfig()
    compress: str = ""
    """Such as `lz4hc` or `lz4hc,12`: one compressed image by mkfs.erofs, which shares nothing with others.
    Empty: metadata and a blob."""
    command: list[str] = []
    """For the provenance, as what follows."""
    builder: str = ""
    sandbox: str = ""
    manifest: str = ""


class Progress:
    """Told how a build goes. Subclass what you want to see."""

    def stage(self, name: str) -> None:
        """One of fetch, unpack, suite, survey, pack, digest, publish, done."""

    def bytes(self, done: int) -> None:
        """Within fetch, unpack and digest."""

    def said(self, line: str) -> None:
        """A line of the tool that works now."""


class Builder:
    """Builds into one store. Each method blocks, and raises typed errors with nothing left behind."""

    def __init__(self, store: LayerStore, progress: Progress | None = None) -> None:
        self.store = store
        self.progress = progress or Progress()

    def from_directory(self, source: Path, wanted: Wanted) -> Layer:
        """Of the tree as it stands: whiteouts and opaque directories are those of an overlay's upper."""
        source = _existing(source)
        if not source.is_dir():
            raise InvalidArgument(f"{source} is no directory")
        if self.store.path.resolve().is_relative_to(source):
            raise InvalidArgument(f"{source} holds the layer store itself")
        if wanted.compress:
            return self._compressed(wanted, f"directory {source}", lambda staged, fd: source)
        return self.fill(wanted, f"directory {source}", lambda into: self.read_directory(source, into))

    def from_tar(self, archive: Path, wanted: Wanted) -> Layer:
        """Of a tar archive, plain or compressed (gzip, bzip2, xz, zstd)."""
        archive = _existing(archive)
        if not stat.S_ISREG(archive.stat().st_mode):
            raise InvalidArgument(f"{archive} is no regular file")
        whiteouts = wanted.kind != "base"
        if not wanted.compress:
            return self.fill(wanted, f"tar {archive}", lambda into: self._read_tar(archive, into, whiteouts))
        _need_root("a compressed layer from a tar archive")

        def unpack(staged: Path, fd: int) -> Path:
            self.progress.stage("unpack")
            root = staged / "root"
            root.mkdir(mode=0o755)
            tarball.unpack(archive, root, whiteouts=whiteouts, progress=self.progress.bytes)
            return root

        return self._compressed(wanted, f"tar {archive}", unpack)

    def from_suite(
        self, name: str, include: Sequence[str], wanted: Wanted, mirrors: Sequence[str] = ()
    ) -> Layer:
        """Of a Debian or Ubuntu suite and packages of it."""
        suite.command("ROOT", name, include, mirrors)  # refuses bad names before any work
        _need_root("a layer from a suite")

        def make(staged: Path, fd: int) -> Path:
            self.progress.stage("suite")
            root = staged / "root"
            root.mkdir(mode=0o755)
            suite.make(root, name, include, mirrors, lock_fd=fd, said=self.progress.said)
            return root

        if wanted.compress:
            return self._compressed(wanted, f"mmdebstrap {name}", make)
        wanted = check(wanted)
        with self.store.stage() as (staged, fd):
            root = make(staged, fd)
            with Assembly(staged) as into:
                self.read_directory(root, into)
                return self.publish(into.finish(), wanted, f"mmdebstrap {name}")

    # What all of them, the importer and pack_diff are made of

    def fill(
        self,
        wanted: Wanted,
        source: str,
        fill: Callable[[Assembly], object],
        *,
        below: Sequence[str] = (),
        sources: Sequence[str] = (),
    ) -> Layer:
        """A layer of what `fill` puts into it.

        below: digests of what it is to stand on. sources: keys for `LayerStore.made_of`.
        """
        wanted = check(wanted)
        with self.store.stage() as (staged, _), Assembly(staged) as into:
            fill(into)
            self.progress.stage("pack")
            return self.publish(into.finish(below), wanted, source, below=below, sources=sources)

    def collapse(
        self,
        layers: Sequence[Layer],
        wanted: Wanted,
        source: str,
        *,
        base: bool,
        below: Sequence[str] = (),
        sources: Sequence[str] = (),
    ) -> Layer:
        """Several layers, bottom to top, as one that refers to the blobs of all. No data is copied."""
        wanted = check(wanted)
        with self.store.stage() as (staged, _):
            self.progress.stage("pack")
            images = [self.store.file(layer.digest) for layer in layers]
            done = collapse(images, staged, base=base, below=below)
            parts = [layer.digest for layer in layers]
            return self.publish(done, wanted, source, below=below, parts=parts, sources=sources)

    def read_directory(
        self, source: Path, into: Assembly, exclude: Callable[[bytes], bool] | None = None
    ) -> None:
        self.progress.stage("survey")
        directory_in.read_directory(
            source, into.tree, into.blob, exclude=exclude, progress=self.progress.bytes
        )

    def _read_tar(self, archive: Path, into: Assembly, whiteouts: bool) -> None:
        self.progress.stage("unpack")
        with plain(archive) as stream:
            read_tar(stream, into.tree, into.blob, whiteouts=whiteouts, progress=self.progress.bytes)

    def publish(
        self,
        made: Assembled,
        wanted: Wanted,
        source: str,
        *,
        below: Sequence[str] = (),
        parts: Sequence[str] = (),
        sources: Sequence[str] = (),
    ) -> Layer:
        """Puts finished files into the store, under a checked name."""
        self.progress.stage("publish")
        layer = _layer(
            wanted,
            source,
            TOOL,
            digest=made.digest,
            size=made.image.stat().st_size,
            blobs=made.blobs,
            below=below,
            parts=[digest for digest in parts if digest != made.digest],
            files=made.inodes,
        )
        self.store.publish(made.image, layer, made.new, sources=sources)
        self.progress.stage("done")
        return layer

    def _compressed(self, wanted: Wanted, source: str, prepare: Callable[[Path, int], Path]) -> Layer:
        wanted = check(wanted)
        packer = mkfs.find()
        step = self.progress.stage
        with self.store.stage() as (staged, fd):
            root = prepare(staged, fd)
            step("survey")
            survey = tree.survey(root)
            step("pack")
            image = staged / "image"
            mkfs.pack(packer, root, image, survey, compress=wanted.compress, lock_fd=fd)
            step("digest")
            layer = _layer(
                wanted,
                source,
                f"mkfs.erofs {packer.version}".strip(),
                digest=hash_file(image, self.progress.bytes),
                size=image.stat().st_size,
                files=survey.entries,
            )
            step("publish")
            self.store.publish(image, layer)
        step("done")
        return layer


def _layer(
    wanted: Wanted,
    source: str,
    tool: str,
    *,
    digest: str,
    size: int,
    files: int,
    blobs: Sequence[BlobRef] = (),
    below: Sequence[str] = (),
    parts: Sequence[str] = (),
) -> Layer:
    return Layer(
        digest=digest,
        size=size,
        blobs=list(blobs),
        below=list(below),
        parts=list(parts),
        kind=wanted.kind,
        created=time.time(),
        name=wanted.name,
        files=files,
        labels=wanted.labels,
        config=wanted.config,
        provenance=Provenance(
            source=source,
            command=wanted.command,
            tool=tool,
            builder=wanted.builder,
            sandbox=wanted.sandbox,
            manifest=wanted.manifest,
        ),
    )


def check(wanted: Wanted) -> Wanted:
    """With its name made canonical. Raises InvalidArgument."""
    if wanted.kind not in KINDS:
        raise InvalidArgument(f"kind {wanted.kind!r}: one of {', '.join(KINDS)}")
    for key, value in wanted.labels.items():
        if not specs.LABEL_KEY.match(key) or len(value) > MAX_LABEL:
            raise InvalidArgument(f"labels: {key[:80]!r}")
    config = wanted.config
    specs.check_env(config.env)
    if config.user and not specs.USER.match(config.user):
        raise InvalidArgument(f"user {config.user[:80]!r}: a name or number, or two with a colon between")
    for what, path in (("workdir", config.workdir), *(("shell", s) for s in config.shell[:1])):
        if path and (not path.startswith("/") or "\0" in path or len(path) > 4095):
            raise InvalidArgument(f"{what} {path[:80]!r}: an absolute path")
    return msgspec.structs.replace(wanted, name=canonical(wanted.name) if wanted.name else "")


def _existing(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except FileNotFoundError:
        raise InvalidArgument(f"{path}: there is no such file or directory") from None
    except (OSError, RuntimeError, ValueError) as e:
        raise InvalidArgument(f"{path!s:.200}: {e}") from e


def _need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise PermissionDenied(f"{what} needs root: it keeps owners and devices")
