"""What the store knows of a layer."""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from dsec.core.images import ImageConfig, LayerRef

Kind = Literal["base", "workspace", "toolkit", "snapshot"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a layer came from."""

    source: str = ""
    """Such as `directory /srv/tree`, `tar image.tar.gz`, `mmdebstrap bookworm`."""
    command: list[str] = []
    """What made it, to be repeated."""
    tool: str = ""
    """The packer and its version."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer under one name. Two names may share a digest and differ in all the rest."""

    digest: str
    size: int
    """Bytes of the image."""
    kind: Kind
    created: float
    """Unix seconds."""
    name: str = ""
    """Canonical; empty when the layer has none."""
    labels: dict[str, str] = {}
    provenance: Provenance = Provenance()
    config: ImageConfig = ImageConfig()


class ResolvedStack(msgspec.Struct, frozen=True):
    """What a sandbox stands on: its layers, bottom to top, and what their images ask for together."""

    layers: list[LayerRef]
    config: ImageConfig


def merge(configs: list[ImageConfig]) -> ImageConfig:
    """The stack's configuration: higher layers win, variable by variable.

    `${NAME}` in a layer's own NAME stands for the value below it, so that a toolkit can put itself
    before PATH.
    """
    env: dict[str, str] = {}
    for config in configs:
        for name, value in config.env.items():
            below = env.get(name, DEFAULT_PATH if name == "PATH" else "")
            env[name] = value.replace("${" + name + "}", below)
    top_down = configs[::-1]
    return ImageConfig(
        env=env,
        user=next((c.user for c in top_down if c.user), ""),
        workdir=next((c.workdir for c in top_down if c.workdir), ""),
        shell=next((c.shell for c in top_down if c.shell), []),
    )
