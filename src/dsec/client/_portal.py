"""The thread on which a sync client's loop runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from typing import Any, Final, TypeVar

import uvloop

from dsec.core.errors import InvalidArgument

T = TypeVar("T")
_END: Final = object()


class Portal:
    """`call` runs a coroutine on the loop's thread and waits for it. Any thread may call."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dsec-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, work: Awaitable[T]) -> T:
        """The coroutine's value. Interrupted (Ctrl-C), the coroutine is cancelled, and ends, before this
        returns."""
        if threading.current_thread() is self._thread:
            _discard(work)
            raise InvalidArgument("a callback of the sync client must not call the client")
        future = asyncio.run_coroutine_threadsafe(_await(work), self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Left early, the async iteration is closed too."""
        try:
            while (item := self.call(_next(items))) is not _END:
                yield item
        finally:
            aclose = getattr(items, "aclose", None)
            if aclose is not None:
                self.call(aclose())

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self.call(self._loop.shutdown_asyncgens())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _await(work: Awaitable[T]) -> T:
    return await work


async def _next(items: AsyncIterator[T]) -> Any:
    return await anext(items, _END)


def _discard(work: Awaitable[Any]) -> None:
    if isinstance(work, Coroutine):
        work.close()
