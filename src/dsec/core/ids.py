"""Identifiers. A sandbox id names its edge, so that any apiserver can route it without a lookup.

sbx-<edge>-<12 base32 characters>      edge: 1 to 24 of [a-z0-9]
"""

from __future__ import annotations

import base64
import os
import re

from dsec.core.errors import InvalidArgument

EDGE_ID = re.compile(r"^[a-z0-9]{1,24}\Z")
SANDBOX_ID = re.compile(r"^sbx-([a-z0-9]{1,24})-([a-z2-7]{12})\Z")
OPERATION_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}\Z")
SESSION_NAME = re.compile(r"^[A-Za-z0-9._-]{1,64}\Z")


def _random32(n_bytes: int) -> str:
    return base64.b32encode(os.urandom(n_bytes)).decode().rstrip("=").lower()


def new_edge_id() -> str:
    return _random32(5)


def new_sandbox_id(edge_id: str) -> str:
    return f"sbx-{edge_id}-{_random32(8)[:12]}"


def new_operation_id() -> str:
    return f"op-{_random32(10)}"


def edge_of(sandbox_id: str) -> str:
    """The edge that holds a sandbox. Raises InvalidArgument for what is no sandbox id."""
    if m := SANDBOX_ID.match(sandbox_id):
        return m[1]
    raise InvalidArgument(f"{sandbox_id[:80]!r} is no sandbox id (sbx-<edge>-<12 characters>)")


def check_operation_id(op_id: str) -> str:
    if OPERATION_ID.match(op_id):
        return op_id
    raise InvalidArgument(f"operation id {op_id[:80]!r}: 1 to 64 of letters, digits, '.', '_', '-'")


def check_session_name(name: str) -> str:
    if SESSION_NAME.match(name):
        return name
    raise InvalidArgument(f"session name {name[:80]!r}: 1 to 64 of letters, digits, '.', '_', '-'")
