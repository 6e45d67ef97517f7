"""Ends a handler whose client has gone away."""

from __future__ import annotations

import asyncio
from types import TracebackType

from dsec.apiserver.http import ClientGone, Request


class WhileConnected:
    """`async with WhileConnected(request):` the body is cancelled, and ClientGone raised, once the client
    has gone.

    The request's body must have been read. It starts to look only after `delay_s`, so that an answer that
    comes quickly does not pay for it.
    """

    def __init__(self, r: Request, delay_s: float = 0.2) -> None:
        self._r = r
        self._delay = delay_s
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.gone = False

    async def __aenter__(self) -> WhileConnected:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._timer = loop.call_later(self._delay, self._look, task)
        return self

    def _look(self, task: asyncio.Task[None]) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch(task))

    async def _watch(self, task: asyncio.Task[None]) -> None:
        while (await self._r.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self.gone:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            if kind is asyncio.CancelledError:
                raise ClientGone from None
