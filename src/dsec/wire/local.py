"""The Bus in one process: a request is a function call, a stream two bounded queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from dsec.core.errors import DSecError, Internal, Unavailable
from dsec.wire.bus import Handler, StreamHandler

CREDIT = 8
"""Frames that may wait unread in each direction of a stream."""


class _End:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Pipe:
    """One direction of a stream."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[msgspec.Struct | _End] = asyncio.Queue(CREDIT)
        self.closed = asyncio.Event()
        self.ending: _End | None = None

    async def put(self, item: msgspec.Struct | _End) -> None:
        if not self.closed.is_set():
            try:
                self.queue.put_nowait(item)
                return
            except asyncio.QueueFull:
                await self._first(self.queue.put(item))
        if self.closed.is_set() and not isinstance(item, _End):
            raise Unavailable("the other end of the stream has gone")

    async def get(self) -> msgspec.Struct | None:
        if self.ending is None:
            try:
                item = self.queue.get_nowait()
            except asyncio.QueueEmpty:
                got = None if self.closed.is_set() else await self._first(self.queue.get())
                item = got if got is not None else _End()
            if not isinstance(item, _End):
                return item
            self.ending = item
        if self.ending.error is not None:
            raise self.ending.error
        return None

    async def _first(self, coro: Any) -> Any:
        """The coroutine's value, or None once the pipe is closed."""
        task, closed = asyncio.ensure_future(coro), asyncio.ensure_future(self.closed.wait())
        try:
            await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            closed.cancel()


class LocalStream:
    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._in = incoming
        self._out = outgoing

    async def send(self, frame: msgspec.Struct) -> None:
        await self._out.put(frame)

    async def receive(self) -> msgspec.Struct | None:
        return await self._in.get()

    async def end(self, error: BaseException | None = None) -> None:
        await self._out.put(_End(error))

    async def close(self) -> None:
        self._in.closed.set()
        self._out.closed.set()

    async def __aiter__(self) -> AsyncIterator[msgspec.Struct]:
        while (frame := await self.receive()) is not None:
            yield frame


class LocalBus:
    """Messages are passed as they are; receivers must not change them (they are frozen structs)."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._stream_handlers: dict[str, StreamHandler] = {}
        self._subscribers: dict[str, set[asyncio.Queue[Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, subject: str, handler: Handler) -> None:
        self._handlers[subject] = handler

    def serve_stream(self, subject: str, handler: StreamHandler) -> None:
        self._stream_handlers[subject] = handler

    async def request(self, subject: str, message: Any) -> Any:
        handler = self._handlers.get(subject)
        if handler is None:
            raise Unavailable(f"nothing serves {subject}")
        return await handler(message)

    async def stream(self, subject: str, message: Any) -> LocalStream:
        handler = self._stream_handlers.get(subject)
        if handler is None:
            raise Unavailable(f"nothing serves {subject}")
        a, b = _Pipe(), _Pipe()
        near, far = LocalStream(a, b), LocalStream(b, a)
        task = asyncio.create_task(self._run(handler, message, far))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return near

    async def _run(self, handler: StreamHandler, message: Any, stream: LocalStream) -> None:
        try:
            await handler(message, stream)
            await stream.end()
        except DSecError as e:
            await stream.end(e)
        except Exception as e:
            await stream.end(Internal(f"stream handler: {e!r}"))

    async def publish(self, subject: str, message: Any) -> None:
        for queue in self._subscribers.get(subject, ()):
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(message)

    async def subscribe(self, subject: str) -> AsyncIterator[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue(1024)
        self._subscribers.setdefault(subject, set()).add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers[subject].discard(queue)

    async def close(self) -> None:
        """Cancel the stream handlers that still run, and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
