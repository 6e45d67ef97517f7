"""The catalogue and its importer on the Bus: subjects `layers.*` of dsec.wire.layers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from dsec.core.errors import InvalidArgument
from dsec.layers.build import Wanted, check
from dsec.layers.importer import Importer, name_of
from dsec.layers.model import KINDS, Kind, Layer
from dsec.layers.resolver import registry_reference
from dsec.layers.store import LayerStore
from dsec.wire import layers as m
from dsec.wire.bus import Bus

T = TypeVar("T")


class LayerService:
    """What blocks runs in threads."""

    def __init__(self, store: LayerStore, importer: Importer) -> None:
        self._store = store
        self._importer = importer

    def serve(self, bus: Bus) -> None:
        bus.serve("layers.list", self.list)
        bus.serve("layers.get", self.get)
        bus.serve("layers.remove", self.remove)
        bus.serve("layers.import", self.import_image)

    async def list(self, msg: m.LayerQuery) -> m.LayerPage:
        if msg.kind and msg.kind not in KINDS:
            raise InvalidArgument(f"kind {msg.kind!r}: one of {', '.join(KINDS)}")
        limit = max(1, min(msg.limit, m.MAX_PAGE))
        found = await _away(
            lambda: self._store.page(after=msg.after, prefix=msg.prefix, kind=msg.kind, limit=limit)
        )
        last = found[-1].name if len(found) == limit else ""
        return m.LayerPage(layers=[m.info_of(layer) for layer in found], next=last)

    async def get(self, msg: m.LayerName) -> m.LayerInfo:
        return m.info_of(await _away(lambda: self._store.find(msg.reference)))

    async def remove(self, msg: m.LayerName) -> m.Removed:
        return m.Removed(await _away(lambda: self._store.remove(msg.reference)))

    async def import_image(self, msg: m.ImportImage) -> m.LayerInfo:
        """Of a registry alone: a path of the node is not for its users."""
        source = registry_reference(msg.source)
        if source is None:
            raise InvalidArgument(f"{msg.source[:200]!r}: name a registry: HOST/REPOSITORY:TAG")
        wanted = check(
            Wanted(
                name=msg.name or name_of(source),
                kind=_kind(msg.kind),
                labels=msg.labels,
                builder=msg.principal,
            )
        )
        return m.info_of(await _away(lambda: self._load(source, wanted, msg.platform)))

    def _load(self, source: str, wanted: Wanted, platform: str) -> Layer:
        return self._importer.load(source, wanted, platform=platform or None)


def _kind(given: str) -> Kind:
    for kind in KINDS:
        if kind == given:
            return kind
    raise InvalidArgument(f"kind {given[:80]!r}: one of {', '.join(KINDS)}")


async def _away(body: Callable[[], T]) -> T:
    return await asyncio.to_thread(body)
