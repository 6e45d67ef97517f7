"""What was seen of each sandbox from outside, kept for a while: the newest of each, in order, by position."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from dsec.backends.base import Seen
from dsec.wire.edge import EventPage, EventsQuery, SandboxEvent

KEPT: Final = 1000
"""Of each sandbox."""
MAX_WAIT_S: Final = 60.0


class _Kept:
    def __init__(self) -> None:
        self.events: deque[SandboxEvent] = deque(maxlen=KEPT)
        self.position = 0
        self.waiting: list[asyncio.Future[None]] = []


class Events:
    """In memory: a new life of the edge begins anew, at position 1."""

    def __init__(self) -> None:
        self._of: dict[str, _Kept] = {}

    def seen(self, sandbox_id: str, seen: Seen) -> None:
        kept = self._of.setdefault(sandbox_id, _Kept())
        kept.position += 1
        kept.events.append(
            SandboxEvent(
                position=kept.position,
                time=time.time(),
                kind="network_denied",
                what=seen.what,
                reason=seen.reason,
                address=seen.address,
                port=seen.port,
                protocol=seen.protocol,
                name=seen.name,
                inbound=seen.inbound,
                left_out=seen.left_out,
            )
        )
        for future in kept.waiting:
            if not future.done():
                future.set_result(None)
        kept.waiting.clear()

    async def query(self, msg: EventsQuery) -> EventPage:
        kept = self._of.get(msg.sandbox_id)
        if msg.wait_s > 0 and (kept is None or kept.position <= msg.after):
            kept = self._of.setdefault(msg.sandbox_id, _Kept())
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            kept.waiting.append(future)
            await asyncio.wait({future}, timeout=min(msg.wait_s, MAX_WAIT_S))
            if future in kept.waiting:
                kept.waiting.remove(future)
        if kept is None:
            return EventPage(events=[], next=msg.after)
        found = [e for e in kept.events if e.position > msg.after][: msg.limit]
        first = kept.events[0].position if kept.events else kept.position + 1
        last = found[-1].position if found else max(msg.after, 0)
        return EventPage(events=found, next=last, lost=max(0, first - msg.after - 1))

    def forget(self, sandbox_id: str) -> None:
        kept = self._of.pop(sandbox_id, None)
        for future in kept.waiting if kept else ():
            if not future.done():
                future.set_result(None)
