"""The node, the document, health."""

from __future__ import annotations

import dsec
from dsec.apiserver.access import Access
from dsec.apiserver.http import Request, answer, answer_bytes
from dsec.wire import api
from dsec.wire import edge as m


class NodeApi:
    def __init__(self, access: Access) -> None:
        self._access = access
        self.document = b"{}"

    async def node(self, r: Request) -> None:
        edge = self._access.placement.edges[0]
        await answer(r, await self._access.bus.request(f"edge.{edge}.node", m.NodeQuery()))

    async def openapi(self, r: Request) -> None:
        await answer_bytes(r, self.document)

    async def health(self, r: Request) -> None:
        await answer(r, api.Health(status="ok", version=dsec.__version__))
