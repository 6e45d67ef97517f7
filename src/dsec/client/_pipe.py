"""Bytes between the event loop and one thread, with a limit on what waits."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")
LIMIT: Final = 4 << 20


class Broken(Exception):
    """The other end has gone."""


class Pipe:
    """One direction, one end in the loop and one in a thread. Made in the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._moved = asyncio.Event()
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._broken = False

    # --- in the loop ---

    async def put(self, data: bytes) -> None:
        """Raises Broken."""
        while not self._try_put(data):
            await self._moved.wait()

    def _try_put(self, data: bytes) -> bool:
        with self._condition:
            if self._broken:
                raise Broken
            if self._size > LIMIT:
                self._moved.clear()
                return False
            self._append(data)
            return True

    async def chunks(self) -> AsyncIterator[bytes]:
        """What the thread writes, to its end. Raises Broken when it did not `end`."""
        while True:
            with self._condition:
                data = self._pop()
                if data is None and self._broken:
                    raise Broken
                if data is None and self._ended:
                    return
                if data is None:
                    self._moved.clear()
            if data is None:
                await self._moved.wait()
            else:
                yield data

    # --- in the thread ---

    def read_some(self) -> bytes:
        """Empty at the end. Raises Broken."""
        with self._condition:
            while True:
                if self._broken:
                    raise Broken
                data = self._pop()
                if data is not None or self._ended:
                    break
                self._condition.wait()
        self._wake()
        return data or b""

    def write(self, data: bytes) -> int:
        """Waits for room. Raises Broken."""
        with self._condition:
            while self._size > LIMIT and not self._broken:
                self._condition.wait()
            if self._broken:
                raise Broken
            self._append(bytes(data))
        self._wake()
        return len(data)

    # --- both ---

    def end(self) -> None:
        with self._condition:
            self._ended = True
            self._condition.notify_all()
        self._wake()

    def break_(self) -> None:
        with self._condition:
            self._broken = True
            self._condition.notify_all()
        self._wake()

    def _append(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        self._condition.notify_all()

    def _pop(self) -> bytes | None:
        if not self._chunks:
            return None
        data = self._chunks.popleft()
        self._size -= len(data)
        self._condition.notify_all()
        return data

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._moved.set)


class Reader:
    """A Pipe's end in the thread, as the file that tarfile reads."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._held = memoryview(b"")
        self._ended = False

    def read(self, size: int) -> bytes:
        parts, want = [], size
        while want > 0:
            if not self._held:
                self._held = memoryview(b"" if self._ended else self._pipe.read_some())
                if not self._held:
                    self._ended = True
                    break
            parts.append(self._held[:want])
            want -= len(parts[-1])
            self._held = self._held[len(parts[-1]) :]
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def drain(self) -> None:
        """What follows the end of an archive."""
        while not self._ended and self._pipe.read_some():
            pass


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """In a thread of its own: a pool's few threads could all wait for each other."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as e:
            error = e
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="dsec-transfer", daemon=True).start()
    return future
