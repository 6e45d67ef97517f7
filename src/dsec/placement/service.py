"""What placement knows of the edges: their last report, and what it has sent there since."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from dsec.core.errors import AdmissionRefused, DSecError
from dsec.core.specs import SandboxSpec
from dsec.placement.choose import choose
from dsec.wire.bus import Bus
from dsec.wire.edge import NodeInfo, NodeQuery

log = logging.getLogger(__name__)
POLL_S: Final = 2.0


class Placement:
    """Soft state: after a restart it polls again. A creation costs no request to an edge."""

    def __init__(self, bus: Bus, edges: Sequence[str], rng: random.Random | None = None) -> None:
        self._bus = bus
        self.edges = tuple(edges)
        self._rng = rng or random.Random()
        self._nodes: dict[str, NodeInfo] = {}
        self._recent: dict[str, int] = {}
        self._poller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """With one edge there is nothing to choose, so nothing is polled."""
        if len(self.edges) > 1:
            await self._poll()
            self._poller = asyncio.create_task(self._poll_for_ever())

    async def stop(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)

    def place(self, spec: SandboxSpec, without: frozenset[str] = frozenset()) -> str:
        """Raises AdmissionRefused when no node qualifies."""
        if len(self.edges) == 1 and not without:
            return self.edges[0]
        edge = choose(self._nodes.values(), spec, self._recent, self._rng, without=without)
        if edge is None:
            raise AdmissionRefused(f"no node has room for a sandbox of backend {spec.backend!r} now")
        self._recent[edge] = self._recent.get(edge, 0) + 1
        return edge

    def place_by_key(self, key: str) -> str:
        """The same edge for the same key, whichever instance is asked: a repeat finds what the first made."""
        return max(self.edges, key=lambda e: blake2b(f"{e}\0{key}".encode(), digest_size=8).digest())

    async def _poll(self) -> None:
        for edge in self.edges:
            try:
                self._nodes[edge] = await self._bus.request(f"edge.{edge}.node", NodeQuery())
                self._recent[edge] = 0
            except DSecError as e:
                self._nodes.pop(edge, None)
                log.warning("edge %s gives no report: %s", edge, e.message)

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._poll()
