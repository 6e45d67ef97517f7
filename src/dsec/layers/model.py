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
    builder: str = ""
    """The account that built it."""
    sandbox: str = ""
    """The sandbox whose writable layer it was."""
    manifest: str = ""
    """Digest of the image's manifest, where it came from a registry or an archive."""


class BlobRef(msgspec.Struct, frozen=True):
    """A file of the store that holds bodies of files, for one layer or for several."""

    digest: str
    size: int
    """Bytes."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer under one name. Two names may share a digest and differ in all the rest."""

    digest: str
    """SHA-256 of the image, which names its blobs by theirs."""
    size: int
    """Bytes of the image: the metadata alone when the layer has blobs."""
    blobs: list[BlobRef] = []
    """In the order of the image's device slots."""
    below: list[str] = []
    """Digests of the layers that it stands on, bottom to top; they come along wherever it is named."""
    parts: list[str] = []
    """Digests of the layers that were merged into it; they are kept to be shared with other images."""
    kind: Kind
    created: float
    """Unix seconds."""
    name: str = ""
    """Canonical; empty when the layer has none."""
    files: int = 0
    """Inodes in it; 0: not known."""
    labels: dict[str, str] = {}
    provenance: Provenance = Provenance()
    config: ImageConfig = ImageConfig()

    @property
    def total(self) -> int:
        """Bytes of the image and its blobs."""
        return self.size + sum(blob.size for blob in self.blobs)


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
        entrypoint=next((c.entrypoint for c in top_down if c.entrypoint or c.cmd), []),
        cmd=next((c.cmd for c in top_down if c.entrypoint or c.cmd), []),
        stop_signal=next((c.stop_signal for c in top_down if c.stop_signal), ""),
        labels={k: v for c in configs for k, v in c.labels.items()},
    )
