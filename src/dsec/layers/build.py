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
from dsec.layers import mkfs, suite, tarball, tree
from dsec.layers.model import KINDS, Kind, Layer, Provenance
from dsec.layers.reference import canonical
from dsec.layers.store import LayerStore, hash_file

MAX_LABEL: Final = 255


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of the layer, and how it is packed."""

    name: str
    """A reference; empty for a layer that is known by its digest alone."""
    kind: Kind
    labels: dict[str, str] = {}
    config: ImageConfig = ImageConfig()
    compress: str = ""
    """Such as `lz4hc` or `lz4hc,12`: smaller and slower to build. Empty: as it is."""
    command: list[str] = []
    """For the provenance."""


class Progress:
    """Told how a build goes. Subclass what you want to see."""

    def stage(self, name: str) -> None:
        """One of unpack, suite, survey, pack, digest, publish, done."""

    def bytes(self, done: int) -> None:
        """Within unpack and digest."""

    def said(self, line: str) -> None:
        """A line of the tool that works now."""


class Builder:
    """Builds into one store. Each method blocks, and raises typed errors with nothing left behind."""

    def __init__(self, store: LayerStore, progress: Progress | None = None) -> None:
        self._store = store
        self._progress = progress or Progress()

    def from_directory(self, source: Path, wanted: Wanted) -> Layer:
        """Of the tree as it stands: whiteouts and opaque directories are those of an overlay's upper."""
        source = _existing(source)
        if not source.is_dir():
            raise InvalidArgument(f"{source} is no directory")
        if self._store.path.resolve().is_relative_to(source):
            raise InvalidArgument(f"{source} holds the layer store itself")
        return self._build(wanted, f"directory {source}", lambda staged, fd: source)

    def from_tar(self, archive: Path, wanted: Wanted) -> Layer:
        """Of a tar archive, plain or compressed (gzip, bzip2, xz, zstd). Needs root, for owners."""
        archive = _existing(archive)
        if not stat.S_ISREG(archive.stat().st_mode):
            raise InvalidArgument(f"{archive} is no regular file")
        _need_root("a layer from a tar archive")

        def unpack(staged: Path, fd: int) -> Path:
            self._progress.stage("unpack")
            root = staged / "root"
            root.mkdir(mode=0o755)
            tarball.unpack(archive, root, whiteouts=wanted.kind != "base", progress=self._progress.bytes)
            return root

        return self._build(wanted, f"tar {archive}", unpack)

    def from_suite(
        self, name: str, include: Sequence[str], wanted: Wanted, mirrors: Sequence[str] = ()
    ) -> Layer:
        """Of a Debian or Ubuntu suite and packages of it."""
        suite.command("ROOT", name, include, mirrors)  # refuses bad names before any work
        _need_root("a layer from a suite")

        def make(staged: Path, fd: int) -> Path:
            self._progress.stage("suite")
            root = staged / "root"
            root.mkdir(mode=0o755)
            suite.make(root, name, include, mirrors, lock_fd=fd, said=self._progress.said)
            return root

        return self._build(wanted, f"mmdebstrap {name}", make)

    def _build(self, wanted: Wanted, source: str, prepare: Callable[[Path, int], Path]) -> Layer:
        wanted = check(wanted)
        packer = mkfs.find()
        step = self._progress.stage
        with self._store.stage() as (staged, fd):
            root = prepare(staged, fd)
            step("survey")
            survey = tree.survey(root)
            step("pack")
            image = staged / "image"
            mkfs.pack(packer, root, image, survey, compress=wanted.compress, lock_fd=fd)
            step("digest")
            layer = Layer(
                digest=hash_file(image, self._progress.bytes),
                size=image.stat().st_size,
                kind=wanted.kind,
                created=time.time(),
                name=wanted.name,
                labels=wanted.labels,
                provenance=Provenance(
                    source=source, command=wanted.command, tool=f"mkfs.erofs {packer.version}".strip()
                ),
                config=wanted.config,
            )
            step("publish")
            self._store.publish(image, layer)
        step("done")
        return layer


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
