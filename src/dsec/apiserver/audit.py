"""Who did what: an entry for each request that changes something or takes content out, refused ones too."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from dsec.apiserver.access import Access, scoped
from dsec.apiserver.http import Request, answer, answer_bytes
from dsec.apiserver.router import Route
from dsec.core.errors import InvalidArgument, PermissionDenied
from dsec.wire import audit as m

REFUSED_A_SECOND: Final = 10.0
REFUSED_BURST: Final = 50.0
_line = msgspec.json.Encoder().encode


class Audit:
    """`sink` takes the entries; the Bus answers questions."""

    def __init__(self, access: Access, sink: m.Sink | None) -> None:
        self._access = access
        self._sink = sink
        self._allowance = REFUSED_BURST
        self._at = time.monotonic()
        self._left_out = 0

    def acted(self, r: Request, route: Route, outcome: str) -> None:
        """A request has been answered. `outcome`: ok, or the error's code."""
        if self._sink is None or not route.audited:
            return
        noted = dict(r.noted or {})
        if path := r.query.get("path"):
            noted["path"] = path[-1].decode(errors="replace")
        box = noted.pop("sandbox", "") or (r.params[0] if "/sandboxes/{id}" in route.path else "")
        project = noted.pop("project", "") or self._access.known_project(box) or r.principal.project or ""
        self._sink(
            m.AuditEntry(
                kind="action",
                what=route.action,
                sandbox=m.short(box),
                project=project,
                who=r.principal.id,
                name=r.principal.name,
                peer=peer(r),
                outcome=outcome,
                detail={k: _value(v) for k, v in noted.items()},
            )
        )

    def refused(self, r: Request, why: str) -> None:
        """A request with no token, or one that is not known. A flood of them is counted, not written."""
        if self._sink is None:
            return
        now = time.monotonic()
        self._allowance = min(REFUSED_BURST, self._allowance + (now - self._at) * REFUSED_A_SECOND)
        self._at = now
        if self._allowance < 1:
            self._left_out += 1
            return
        self._allowance -= 1
        detail: dict[str, m.Value] = {"path": m.short(r.scope["path"]), "why": m.short(why)}
        if self._left_out:
            detail["left_out_before"], self._left_out = self._left_out, 0
        self._sink(
            m.AuditEntry(
                kind="action", what="auth.refused", peer=peer(r), outcome="unauthenticated", detail=detail
            )
        )

    async def query(self, r: Request) -> None:
        """A page; with `format=ndjson` one entry a line."""
        page: m.AuditPage = await self._access.bus.request("audit.query", _asked(r))
        if r.text("format", "json") == "ndjson":
            lines = b"".join(_line(entry) + b"\n" for entry in page.entries)
            headers = ((b"x-next", b"%d" % page.next),)
            await answer_bytes(r, lines, headers=headers, content_type=b"application/x-ndjson")
        else:
            await answer(r, page)


def _asked(r: Request) -> m.AuditQuery:
    if r.text("format", "json") not in ("json", "ndjson"):
        raise InvalidArgument("format: json or ndjson")
    project = scoped(r.principal, r.text("project") or None)
    if r.principal.project is not None and r.text("kind") == "record":
        raise PermissionDenied("the record's own entries need a token of no project")
    return m.AuditQuery(
        after=r.number("after", 0, 0, 1 << 62),
        sandbox=r.text("sandbox"),
        project=project or "",
        who=r.text("who"),
        kind=r.text("kind"),
        what=r.text("what"),
        since=r.seconds("since", 0.0, 1e12) or 0.0,
        limit=r.number("limit", 100, 1, m.MAX_PAGE),
    )


def peer(r: Request) -> str:
    client = r.scope.get("client")
    return f"{client[0]}:{client[1]}" if client else ""


def _value(value: Any) -> m.Value:
    return value if isinstance(value, int | float | bool) or value is None else m.short(str(value))
