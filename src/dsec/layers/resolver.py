"""What a creation asks for: layers by name, or an image of a registry, imported once and then shared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final

from dsec.core.errors import UnknownLayer
from dsec.layers.importer import Importer
from dsec.layers.model import ResolvedStack
from dsec.layers.store import LayerStore

NOTED_FOR_S: Final = 3600.0
"""A layer's use is noted in the catalogue this often at the most."""


class Resolver:
    """Of one node. Call from one event loop."""

    def __init__(self, store: LayerStore, importer: Importer, *, local: bool) -> None:
        """local: looking at the store's files takes microseconds, and is done on the event loop."""
        self._store = store
        self._importer = importer
        self._local = local
        self._noted: dict[str, float] = {}
        self._importing: dict[str, asyncio.Task[Any]] = {}

    def resolve(self, image: str, layers: list[str]) -> ResolvedStack | Coroutine[Any, Any, ResolvedStack]:
        """The stack, at once where that is quick. Raises UnknownLayer, LayerCorrupt, what imports raise."""
        if not self._local:
            return self._resolve(image, layers)
        try:
            stack = self._store.resolve(image, layers)
        except UnknownLayer:
            if registry_reference(image) is None:
                raise
            return self._resolve(image, layers)
        stale = self._stale(stack)
        return self._note(stack, stale) if stale else stack

    async def _resolve(self, image: str, layers: list[str]) -> ResolvedStack:
        try:
            stack = await asyncio.to_thread(self._store.resolve, image, layers)
        except UnknownLayer:
            reference = registry_reference(image)
            if reference is None or await self._is_known(image):
                raise
            stack = await self._import(image, reference, layers)
        return await self._note(stack, self._stale(stack))

    async def _is_known(self, image: str) -> bool:
        """Then it is one of the other layers that is not."""
        try:
            await asyncio.to_thread(self._store.find, image)
        except UnknownLayer:
            return False
        return True

    async def _import(self, image: str, reference: str, layers: list[str]) -> ResolvedStack:
        """Once for all who ask at the same time. It goes on when they have gone: the next finds it."""
        task = self._importing.get(reference)
        if task is None:
            task = self._importing[reference] = asyncio.create_task(
                asyncio.to_thread(self._importer.load, reference)
            )
            task.add_done_callback(lambda _: self._importing.pop(reference, None))
        layer = await asyncio.shield(task)
        return await asyncio.to_thread(self._store.resolve, layer.name or layer.digest, layers)

    def _stale(self, stack: ResolvedStack) -> list[str]:
        now = time.monotonic()
        return [
            r.digest for r in stack.layers if now - self._noted.get(r.digest, -NOTED_FOR_S) >= NOTED_FOR_S
        ]

    async def _note(self, stack: ResolvedStack, stale: list[str]) -> ResolvedStack:
        if stale:
            self._noted.update(dict.fromkeys(stale, time.monotonic()))
            await asyncio.to_thread(self._store.use, stale)
        return stack

    async def close(self) -> None:
        """Waits for imports that have begun: their threads cannot be interrupted."""
        await asyncio.gather(*self._importing.values(), return_exceptions=True)


def registry_reference(image: str) -> str | None:
    """The image as a registry is asked for it; None when it names no registry.

    A bare name is never one: a misspelt layer must not become a question to a registry outside.
    """
    if image.startswith("docker://"):
        return image
    first, slash, _ = image.partition("/")
    is_host = slash and ("." in first or ":" in first or first == "localhost")
    return image if is_host else None
