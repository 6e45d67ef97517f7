"""What is asked of the layer service over the Bus: subjects `layers.*`."""

from __future__ import annotations

from typing import Any

import msgspec

from dsec.core.images import ImageConfig

MAX_PAGE = 1000


class LayerQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`layers.list`: names in their order. Answered by a LayerPage."""

    after: str = ""
    prefix: str = ""
    kind: str = ""
    limit: int = 100
    """1 to 1000."""


class LayerName(msgspec.Struct, frozen=True):
    """`layers.get`, `layers.remove`: a name, a digest, or the beginning of one."""

    reference: str


class ImportImage(msgspec.Struct, frozen=True, kw_only=True):
    """`layers.import`: an image of a registry. Answered by a LayerInfo when it is there."""

    source: str
    name: str = ""
    """Empty: as in its registry."""
    kind: str = "base"
    labels: dict[str, str] = {}
    platform: str = ""
    principal: str = ""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    source: str = ""
    command: list[str] = []
    tool: str = ""
    builder: str = ""
    sandbox: str = ""
    manifest: str = ""


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer under one of its names."""

    digest: str
    name: str = ""
    kind: str = ""
    size: int = 0
    """Bytes of its image: the metadata alone, when it has blobs."""
    total: int = 0
    """Bytes with its blobs, which other layers may share."""
    files: int = 0
    created: float = 0.0
    """Unix seconds."""
    labels: dict[str, str] = {}
    below: list[str] = []
    """Digests of what it stands on, bottom to top."""
    config: ImageConfig = ImageConfig()
    provenance: Provenance = Provenance()


class LayerPage(msgspec.Struct, frozen=True, kw_only=True):
    layers: list[LayerInfo]
    next: str = ""
    """Ask with it as `after` for the next page; empty at the end."""


class PackDiff(msgspec.Struct, frozen=True, kw_only=True):
    """`edge.ID.pack`: a running sandbox's writable layer, as a layer on those that it stands on."""

    sandbox_id: str
    name: str = ""
    """Empty: known by its digest alone, which keeps it for a day."""
    labels: dict[str, str] = {}
    defaults: bool = True
    """Leave out what nobody wants in an environment: see dsec.layers.scrub."""
    remove: list[str] = []
    """Globs of what to leave out besides."""
    keep: list[str] = []
    """Globs of what stays whatever the rules say."""
    refuse: bool = True
    """Nothing is kept of a layer with findings such as secrets. False: they are only told."""
    smoke: str = ""
    """A shell command that must end with 0 in a fresh sandbox of the layer, before it gets its name."""
    smoke_timeout_s: float = 60.0
    principal: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What the check of a packed layer has seen."""

    kind: str
    severity: str
    """note, warning, refuse."""
    path: str = ""
    message: str = ""


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    layer: LayerInfo
    findings: list[Finding] = []
    frozen_s: float = 0.0
    """How long the sandbox stood still."""
    how: str = ""
    """`snapshot`, `reflink` or `copy`."""
    left_out: int = 0
    """Entries that the rules left out."""
    smoke_output: str = ""


class Removed(msgspec.Struct, frozen=True):
    removed: list[str]
    """Names and digests that are gone."""


def info_of(layer: Any) -> LayerInfo:
    """Of a `dsec.layers.model.Layer`."""
    return msgspec.convert(layer, LayerInfo, from_attributes=True)
