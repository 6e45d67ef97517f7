"""Entries of the audit record; over the Bus, subject `audit.query`: AuditQuery → AuditPage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import msgspec

MAX_PAGE: Final = 1000
MAX_TEXT: Final = 512
"""Characters of any text in an entry: what comes from inside a sandbox fills no record."""
Value = str | int | float | bool | None


class AuditEntry(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One line of the record."""

    position: int = 0
    """Given by the record: 1, 2, 3, ... with no gap."""
    time: float = 0.0
    """Unix seconds."""
    kind: Literal["action", "misbehaviour", "record"]
    """What a caller did; what was seen of a sandbox; what befell the record itself."""
    what: str
    """Such as `sandboxes.create`, `operations.exec`, `auth.refused`; `oom`, `output_limit`."""
    sandbox: str = ""
    project: str = ""
    who: str = ""
    """Id of the caller's token."""
    name: str = ""
    """The token's name."""
    peer: str = ""
    """Address that the request came from."""
    outcome: str = ""
    """Of an action: `ok`, or the error's code."""
    detail: dict[str, Value] = {}
    """Never a secret, an environment or the content of a file."""
    chain: str = ""
    """SHA-256 over the chain of the entry before and this entry without its chain, in hex."""


Sink = Callable[[AuditEntry], None]
"""Takes an entry without position and chain. Quick, raises nothing."""


class AuditQuery(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Entries in their order; every field that is set must match."""

    after: int = 0
    sandbox: str = ""
    project: str = ""
    who: str = ""
    kind: str = ""
    what: str = ""
    """Equal, or with a `.` or `*` at its end the beginning."""
    since: float = 0.0
    limit: int = 100


class AuditPage(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    entries: list[AuditEntry]
    next: int = 0
    """Ask again with `after` of this: all entries up to it were looked at, and there may be more by then."""


def short(text: str) -> str:
    """At most MAX_TEXT characters, none of them a control character."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text[: MAX_TEXT + 1])[:MAX_TEXT]
