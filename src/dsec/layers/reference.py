"""How a layer is named: `name`, `name:tag`, `name@version`, or its digest."""

from __future__ import annotations

import re
from typing import Final

from dsec.core.errors import InvalidArgument
from dsec.core.specs import LAYER_REF

DEFAULT_TAG: Final = "latest"
DIGEST: Final = re.compile(r"^(?:sha256:)?([0-9a-f]{64})\Z")
PREFIX: Final = re.compile(r"^[0-9a-f]{12,63}\Z")
"""Enough of a digest, as `dsec layer ls` shows it."""
_TAG: Final = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}\Z")


def digest_of(reference: str) -> str | None:
    """The hexadecimal digest that `reference` is, or (after an `@`) ends in; None when it is a name."""
    if "@" in reference:
        reference = reference.rpartition("@")[2]
        if not reference.startswith("sha256:"):
            return None
    match = DIGEST.match(reference)
    return match[1] if match else None


def canonical(reference: str) -> str:
    """The name as the catalogue keeps it: a name with neither tag nor version gets `:latest`.

    A colon before the last slash is a registry's port (`registry.example:5000/tool`), no tag.
    Raises InvalidArgument for what is no reference.
    """
    if not LAYER_REF.match(reference):
        raise InvalidArgument(
            f"{reference[:80]!r} is no layer reference: letters, digits and . _ / : @ + - alone"
        )
    if reference.endswith("/") or "//" in reference:
        raise InvalidArgument(f"{reference[:80]!r} is no layer reference: a part between slashes is empty")
    last = reference.rpartition("/")[2]
    for separator in "@:":
        name, found, tag = last.partition(separator)
        if found:
            if not name or not _TAG.match(tag):
                raise InvalidArgument(
                    f"{reference[:80]!r} is no layer reference: see what follows {separator!r}"
                )
            return reference
    return f"{reference}:{DEFAULT_TAG}"
