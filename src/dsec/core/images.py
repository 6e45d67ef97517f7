"""Layers as everybody speaks of them: a resolved layer, and what images ask of a container."""

from __future__ import annotations

import msgspec


class LayerRef(msgspec.Struct, frozen=True):
    """A resolved layer, as the layer store knows it."""

    digest: str
    path: str
    """Its EROFS image on this node or on the shared store."""
    blobs: tuple[str, ...] = ()
    """Where the blobs lie that the image refers to, in the order of its device slots."""


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an image asks of a container, merged over the stack of layers."""

    env: dict[str, str] = {}
    user: str = ""
    workdir: str = ""
    shell: list[str] = []
    entrypoint: list[str] = []
    """Kept for whoever asks; a sandbox runs what it is told to."""
    cmd: list[str] = []
    stop_signal: str = ""
    labels: dict[str, str] = {}
