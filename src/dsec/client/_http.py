"""Requests with their token, their retries, and errors as dsec.core.errors."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from dsec.client._transport import Body, Chunks, Response, Socket, Transport, TransportError
from dsec.core.errors import (
    BY_CODE,
    DeadlineExceeded,
    DSecError,
    Internal,
    OutcomeUnknown,
    ProtocolError,
    Unavailable,
    from_code,
)
from dsec.wire import api

T = TypeVar("T")
log = logging.getLogger(__name__)
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 2.0
RETRIES: Final = 8
UNDO_S: Final = 10.0
_errors = msgspec.json.Decoder(api.ErrorAnswer)
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_encode = msgspec.json.Encoder().encode


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """One decoder for each type."""
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found


class Connection:
    """One server and one token. A request is repeated on a broken connection only where a repeat joins the
    first."""

    def __init__(self, transport: Transport, token: str, retries: int) -> None:
        self.transport = transport
        self._retries = retries
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._undoing: set[asyncio.Task[None]] = set()
        self._json = {**self._headers, "Content-Type": "application/json"}

    async def call(
        self,
        kind: type[T],
        method: str,
        target: str,
        body: Any = None,
        *,
        repeatable: bool = True,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
        outcome: str = "",
    ) -> T:
        """One exchange of JSON. `outcome` names what may have happened when no answer came."""
        data = None if body is None else _encode(body)
        head = self._headers if data is None else self._json
        if headers:
            head = {**head, **headers}
        return await self._repeat(kind, method, target, data, head, repeatable, timeout, outcome)

    async def call_bytes(
        self,
        kind: type[T],
        method: str,
        target: str,
        body: bytes,
        headers: dict[str, str],
        *,
        repeatable: bool,
        outcome: str,
    ) -> T:
        """Bytes up, JSON down."""
        head = {**self._headers, **headers}
        return await self._repeat(kind, method, target, body, head, repeatable, None, outcome)

    async def _repeat(
        self,
        kind: type[T],
        method: str,
        target: str,
        data: bytes | None,
        head: dict[str, str],
        repeatable: bool,
        timeout: float | None,
        outcome: str,
    ) -> T:
        tries = self._retries if repeatable else 0
        sent = False
        for attempt in range(tries + 1):
            try:
                return self._decode(kind, await self._exchange(method, target, head, data, timeout))
            except TransportError as e:
                sent = sent or e.sent
                if attempt == tries:
                    raise unanswered(e, sent, outcome) from e
            await pause(attempt)
        raise AssertionError("not reached")

    async def _exchange(
        self, method: str, target: str, head: dict[str, str], data: Body, timeout: float | None
    ) -> Response:
        if timeout is None:
            return await self.transport.request(method, target, head, data)
        try:
            async with asyncio.timeout(timeout):
                return await self.transport.request(method, target, head, data)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{method} {target.partition('?')[0]}: no answer within {timeout:g} s"
            ) from None

    def _decode(self, kind: type[T], response: Response) -> T:
        if response.status >= 300:
            raise error_of(response.status, response.body)
        try:
            return decoder(kind).decode(response.body)
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"the server's answer was not understood: {e}") from e

    async def send(self, kind: type[T], method: str, target: str, body: Body, headers: dict[str, str]) -> T:
        """Bytes up, JSON down; once. Raises TransportError."""
        response = await self.transport.request(method, target, {**self._headers, **headers}, body)
        return self._decode(kind, response)

    @asynccontextmanager
    async def stream(self, method: str, target: str, body: Any = None) -> AsyncIterator[Chunks]:
        """An answer as it comes; once. Raises TransportError."""
        data = None if body is None else _encode(body)
        async with self.transport.stream(
            method, target, self._json if data else self._headers, data
        ) as chunks:
            if chunks.status >= 300:
                raise error_of(chunks.status, b"".join([c async for c in chunks]))
            yield chunks

    async def websocket(self, target: str) -> Socket:
        """Raises TransportError when the server cannot be reached."""
        socket = await self.transport.websocket(target, self._headers)
        if isinstance(socket, Response):
            raise error_of(socket.status, socket.body)
        return socket

    @property
    def retries(self) -> int:
        return self._retries

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Undo something without keeping a cancelled caller waiting; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def close(self) -> None:
        if self._undoing:
            await asyncio.wait(self._undoing, timeout=UNDO_S)
        await self.transport.close()


async def _quietly(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except DSecError as e:
        log.info("undoing a cancelled call: %s: %s", e.code, e.message)


async def pause(attempt: int) -> None:
    """Before a repeat: longer each time, and not the same for all clients."""
    await asyncio.sleep(min(FIRST_PAUSE_S * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.0))


def unanswered(e: TransportError, sent: bool, outcome: str) -> DSecError:
    if sent and outcome:
        return OutcomeUnknown(f"{outcome}: the connection was lost before its answer came ({e})")
    return Unavailable(f"the server cannot be reached: {e}")


def error_of(status: int, body: bytes) -> DSecError:
    """The error that an answer says; `operation` is set when an operation failed."""
    try:
        answer = _errors.decode(body)
    except msgspec.MsgspecError:
        return _by_status(status, body)
    error = from_code(answer.error.code, answer.error.message, **answer.error.details)
    error.operation = answer.operation  # type: ignore[attr-defined]
    return error


def _by_status(status: int, body: bytes) -> DSecError:
    text = body[:200].decode(errors="replace") or f"HTTP {status}"
    code = {400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found"}.get(
        status, "unavailable" if status in (429, 502, 503, 504) else "internal"
    )
    return BY_CODE[code](f"the server answered {status}: {text}") if code else Internal(text)


def query(**values: str | bytes | int | float | bool | None) -> str:
    """A query string; None and False are left out."""
    parts = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        if value is True:
            value = "true"
        elif isinstance(value, int | float):
            value = repr(value)
        parts.append(f"{name}={quote(value, safe='/')}")
    return "?" + "&".join(parts) if parts else ""
