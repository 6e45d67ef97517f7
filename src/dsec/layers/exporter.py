"""Layers as an image of others: a layout, an archive that Docker loads, or a push to a registry."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Literal, cast

from dsec.core.errors import InvalidArgument
from dsec.core.images import ImageConfig
from dsec.layers.archive_out import write_tar
from dsec.layers.model import Layer, merge
from dsec.layers.oci import (
    NewImage,
    NewLayer,
    OciConfig,
    Reference,
    Registry,
    push,
    write_archive,
    write_layout,
)
from dsec.layers.oci.export import LEVEL, Written
from dsec.layers.oci.model import History
from dsec.layers.oci.platforms import here
from dsec.layers.stack import open_blob, read_layer
from dsec.layers.store import LayerStore

PIPE: Final = 1 << 20


class Exporter:
    """Of one store. Blocks; memory does not grow with the layers."""

    def __init__(self, store: LayerStore) -> None:
        self._store = store

    def to_layout(
        self, references: Sequence[str], path: Path, *, tag: str = "latest", level: int = LEVEL
    ) -> Written:
        """Into an OCI layout, which is made or gets another tag."""
        return write_layout(path, self.image(references), tag=tag, level=level)

    def to_archive(
        self,
        references: Sequence[str],
        path: Path,
        form: Literal["oci", "docker"] = "oci",
        *,
        name: str = "",
        level: int = LEVEL,
    ) -> Written:
        """One file, which `docker load` takes too."""
        return write_archive(path, self.image(references), form, name=name, level=level)

    def to_registry(
        self, references: Sequence[str], target: str, *, level: int = LEVEL, **how: Any
    ) -> Written:
        """how: options of `Registry`. What the registry has already is not sent again."""
        reference = Reference.parse(target)
        registry = Registry(reference.host, **how)
        try:
            return push(registry, reference, self.image(references), level=level)
        finally:
            registry.close()

    def image(self, references: Sequence[str]) -> NewImage:
        """The stack of these layers, bottom to top, with what they stand on.

        Raises UnknownLayer, LayerCorrupt, and Unsupported for a compressed layer, which is not read here.
        """
        if not references:
            raise InvalidArgument("name the layers to export, bottom to top")
        named = [self._store.find(reference) for reference in references]
        stack = self._store.expand(named)
        layers = [NewLayer(lambda one=one: cast("IO[bytes]", self.tar(one))) for one in stack]  # type: ignore[misc]
        return NewImage(_config(merge([n.config for n in named]), stack), layers)

    def tar(self, layer: Layer) -> io.BufferedReader:
        """The layer as a tar stream with OCI's whiteouts; closing it early is no harm."""
        return io.BufferedReader(_TarStream(self._store, layer), PIPE)


class _TarStream(io.RawIOBase):
    """What a thread writes into a pipe."""

    def __init__(self, store: LayerStore, layer: Layer) -> None:
        self._store = store
        self._layer = layer
        self._failed: BaseException | None = None
        self._read, write = os.pipe()
        self._thread = threading.Thread(target=self._write, args=(write,), name="export", daemon=True)
        self._thread.start()

    def _write(self, fd: int) -> None:
        try:
            with contextlib.ExitStack() as held, open(fd, "wb", buffering=PIPE) as out:
                tree = read_layer(self._store, self._layer, held)
                blobs: dict[int, BinaryIO] = {}

                def blob(number: int) -> BinaryIO:
                    if number not in blobs:
                        blobs[number] = open_blob(self._store, self._layer, tree.blobs[number].digest, held)
                    return blobs[number]

                write_tar(tree, out, blob)
        except BrokenPipeError:
            pass  # nobody reads on
        except BaseException as e:
            self._failed = e

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.read(self._read, len(buffer))
        if not data:
            self._thread.join()
            if self._failed is not None:
                raise self._failed
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            os.close(self._read)
            self._thread.join()
        super().close()


def _config(config: ImageConfig, stack: Sequence[Layer]) -> OciConfig:
    platform = here()
    return OciConfig(
        env=[f"{k}={v}" for k, v in config.env.items()],
        working_dir=config.workdir,
        user=config.user,
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        labels=config.labels,
        stop_signal=config.stop_signal,
        shell=config.shell,
        architecture=platform.architecture,
        os=platform.os,
        history=[History(created_by=layer.provenance.source, comment="dsec") for layer in stack],
    )
