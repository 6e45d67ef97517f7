"""The Bus: how services talk to each other. In-process on one machine (local.py), NATS on many (later).

A handler raises DSecError; the caller of `request` gets the same error. Streams go both ways with credit: a
`send` waits while the other side has not taken what was sent, so that a slow reader stops the writer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import msgspec

Handler = Callable[[Any], Awaitable[Any]]
StreamHandler = Callable[[Any, "Stream"], Awaitable[None]]


class Stream(Protocol):
    """One end of a two-way stream of structs."""

    async def send(self, frame: msgspec.Struct) -> None:
        """Waits for credit. Raises Unavailable when the other end has gone."""

    async def receive(self) -> msgspec.Struct | None:
        """The next frame; None at the end. Raises the DSecError with which the other side ended."""

    async def end(self) -> None:
        """No more frames from this end."""

    async def close(self) -> None:
        """Drop the stream, both ways. Idempotent."""

    def __aiter__(self) -> AsyncIterator[msgspec.Struct]: ...


class Bus(Protocol):
    def serve(self, subject: str, handler: Handler) -> None: ...

    def serve_stream(self, subject: str, handler: StreamHandler) -> None: ...

    async def request(self, subject: str, message: Any) -> Any:
        """Raises Unavailable when nothing serves the subject."""

    async def stream(self, subject: str, message: Any) -> Stream: ...

    async def publish(self, subject: str, message: Any) -> None: ...

    def subscribe(self, subject: str) -> AsyncIterator[Any]: ...
