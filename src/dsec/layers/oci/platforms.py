"""Platforms, and which manifest of an index is for one."""

from __future__ import annotations

import platform as machine
import re
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument, NotFound
from dsec.layers.oci.model import Descriptor, printable

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
_FORM: Final = re.compile(r"[a-z0-9_.-]{1,32}/[a-z0-9_.-]{1,32}(?:/[a-z0-9_.-]{1,32})?\Z")
_STEPS: Final = {"arm": ["v8", "v7", "v6", "v5"], "amd64": ["v4", "v3", "v2", "v1"]}
_USUAL: Final = {"arm": "v7", "arm64": "v8", "amd64": "v1"}


class Platform(msgspec.Struct, frozen=True):
    """An operating system, an architecture and, where it matters, a variant (`v8`)."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(p for p in (self.os, self.architecture, self.variant) if p)

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Of `linux/arm64` or `linux/arm/v7`. Raises InvalidArgument."""
        if not _FORM.match(text):
            raise InvalidArgument(f"platform {text[:80]!r}: such as linux/amd64 or linux/arm/v7")
        return cls(*text.split("/"))


def here() -> Platform:
    """Linux on this machine's architecture."""
    name = machine.machine().lower()
    return Platform("linux", _ARCHITECTURES.get(name, name))


def choose(entries: list[Descriptor], wanted: Platform, what: str) -> Descriptor:
    """The entry that suits best. Raises NotFound, which lists the platforms there are."""
    suited = [e for e in entries if _suits(e, wanted)]
    for variant in _acceptable(wanted):
        for entry in suited:
            if _variant(entry) == variant:
                return entry
    if suited and not wanted.variant:
        return suited[0]
    there = sorted({_shown(e) for e in entries})[:20]
    raise NotFound(f"{what}: nothing for {wanted}; there is {', '.join(there) or 'nothing at all'}")


def _suits(entry: Descriptor, wanted: Platform) -> bool:
    p = entry.platform
    return p is not None and p.os == wanted.os and p.architecture == wanted.architecture


def _variant(entry: Descriptor) -> str:
    assert entry.platform
    return entry.platform.variant or _USUAL.get(entry.platform.architecture, "")


def _acceptable(wanted: Platform) -> list[str]:
    """Variants that run there, the best first: a processor also runs what is for an older one."""
    best = wanted.variant or _USUAL.get(wanted.architecture, "")
    steps = _STEPS.get(wanted.architecture, [])
    return steps[steps.index(best) :] if best in steps else [best]


def _shown(entry: Descriptor) -> str:
    p = entry.platform
    return printable(str(Platform(p.os, p.architecture, p.variant or ""))) if p else "one without a platform"
