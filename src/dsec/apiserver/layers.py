"""Layers: pages of the catalogue, one of them, imports, removal."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec.apiserver.access import Access
from dsec.apiserver.http import Request, answer
from dsec.core.errors import InvalidArgument, PermissionDenied
from dsec.wire import api
from dsec.wire import layers as m

_import: Final = msgspec.json.Decoder(api.ImportRequest)


class Layers:
    def __init__(self, access: Access) -> None:
        self._bus = access.bus

    async def list(self, r: Request) -> None:
        query = m.LayerQuery(
            after=r.text("after"),
            prefix=r.text("prefix"),
            kind=r.text("kind"),
            limit=r.number("limit", 100, 1, m.MAX_PAGE),
        )
        await answer(r, await self._bus.request("layers.list", query))

    async def get(self, r: Request) -> None:
        await answer(r, await self._bus.request("layers.get", m.LayerName(_reference(r))))

    async def remove(self, r: Request) -> None:
        if r.principal.project is not None:
            raise PermissionDenied("removing layers, which all projects share, needs a token of no project")
        await answer(r, await self._bus.request("layers.remove", m.LayerName(_reference(r))))

    async def import_image(self, r: Request) -> None:
        body = await r.json(_import)
        message = m.ImportImage(
            source=body.source,
            name=body.name,
            kind=body.kind,
            labels=body.labels,
            platform=body.platform,
            principal=r.principal.name,
        )
        await answer(r, await self._bus.request("layers.import", message))


def _reference(r: Request) -> str:
    reference = r.text("ref")
    if not reference:
        raise InvalidArgument("ref: the layer's name or digest")
    return reference
