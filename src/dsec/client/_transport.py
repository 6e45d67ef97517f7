"""How bytes get to the server: the seam that tests put something else into."""

from __future__ import annotations

import asyncio
import io
import resource
import ssl
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

import aiohttp
import msgspec
from yarl import URL

from dsec.core.errors import InvalidArgument

Body = bytes | AsyncIterable[bytes] | None
CONNECT_S: Final = 10.0
KEEP_ALIVE_S: Final = 60.0
"""Below the server's, so that no request goes out on a connection that is being closed."""
MAX_CONNECTIONS: Final = 4096
READ_BUFFER: Final = 1 << 20
MAX_MESSAGE: Final = 4 << 20


class TransportError(Exception):
    """No answer came. `sent`: the request may have reached the server."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Response(msgspec.Struct, frozen=True):
    status: int
    body: bytes


class Chunks(Protocol):
    """An answer that is read as it comes. Iterating raises TransportError when it is cut off."""

    status: int

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class Socket(Protocol):
    async def send(self, message: str | bytes) -> None: ...

    async def receive(self) -> str | bytes | None:
        """None once the other side has closed it."""

    async def close(self) -> None: ...


class Transport(Protocol):
    """Raises TransportError; an HTTP error is an answer like another."""

    async def request(self, method: str, target: str, headers: dict[str, str], body: Body) -> Response: ...

    def stream(
        self, method: str, target: str, headers: dict[str, str], body: Body
    ) -> AbstractAsyncContextManager[Chunks]: ...

    async def websocket(self, target: str, headers: dict[str, str]) -> Socket | Response:
        """A Response when the server refuses."""

    async def close(self) -> None: ...


class AiohttpTransport:
    """One connection pool. Made inside a running loop."""

    def __init__(self, url: str, ca: str = "") -> None:
        """ca: a file of certificates to trust instead of the system's; empty: the system's."""
        self._base = url.rstrip("/")
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = MAX_CONNECTIONS if soft < 0 else max(64, min(MAX_CONNECTIONS, soft - 128))
        connector = aiohttp.TCPConnector(
            ssl=_trusting(ca) if ca else True,
            limit=limit,
            keepalive_timeout=KEEP_ALIVE_S,
            ttl_dns_cache=300,
            enable_cleanup_closed=False,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BUFFER,
            trust_env=False,
        )

    async def request(self, method: str, target: str, headers: dict[str, str], body: Body) -> Response:
        try:
            async with self._send(method, target, headers, body) as answer:
                return Response(answer.status, await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise _failed(e) from e

    def _send(self, method: str, target: str, headers: dict[str, str], body: Body) -> Any:
        url = URL(self._base + target, encoded=True)
        data = io.BytesIO(body) if isinstance(body, bytes) and len(body) > READ_BUFFER // 4 else body
        return self._session.request(method, url, data=data, headers=headers, allow_redirects=False)

    @asynccontextmanager
    async def stream(
        self, method: str, target: str, headers: dict[str, str], body: Body
    ) -> AsyncIterator[Chunks]:
        try:
            answer = await self._send(method, target, headers, body)
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise _failed(e) from e
        chunks = _AiohttpChunks(answer)
        try:
            yield chunks
        finally:
            if not chunks.whole:
                answer.close()  # the rest is not wanted
            answer.release()

    async def websocket(self, target: str, headers: dict[str, str]) -> Socket | Response:
        url = URL(self._base + target, encoded=True)
        try:
            ws = await self._session.ws_connect(
                url, headers=headers, max_msg_size=MAX_MESSAGE, compress=0, autoping=True
            )
        except aiohttp.WSServerHandshakeError as e:
            return Response(e.status, b"")
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise _failed(e) from e
        return _AiohttpSocket(ws)

    async def close(self) -> None:
        await self._session.close()


class _AiohttpChunks:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.status = answer.status
        self.whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._answer.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise _failed(e) from e
        self.whole = True


class _AiohttpSocket:
    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws

    async def send(self, message: str | bytes) -> None:
        try:
            if isinstance(message, str):
                await self._ws.send_str(message)
            else:
                await self._ws.send_bytes(message)
        except (aiohttp.ClientError, OSError) as e:
            raise _failed(e) from e

    async def receive(self) -> str | bytes | None:
        message = await self._ws.receive()
        if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            data: str | bytes = message.data
            return data
        return None

    async def close(self) -> None:
        await asyncio.shield(self._ws.close())


def _trusting(ca: str) -> ssl.SSLContext:
    """Raises InvalidArgument."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as e:
        raise InvalidArgument(f"DSEC_CA {ca!r}: {e}") from e


def _failed(e: BaseException) -> TransportError:
    sent = not isinstance(e, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return TransportError(str(e) or type(e).__name__, sent=sent)
