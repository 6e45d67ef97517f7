"""uvicorn, set up for this: many connections, large bodies, limits on what a stranger may send."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dsec.apiserver.app import ApiServer
from dsec.core.errors import InvalidArgument

log = logging.getLogger(__name__)
HEADERS_S: Final = 30.0
"""Within which a new connection must send its first request's headers."""
KEEP_ALIVE_S: Final = 120
MAX_HEADERS: Final = 100
MAX_HEADER_BYTES: Final = 64 << 10
HIGH_WATER: Final = 1 << 20
"""Bytes of a body, or of an answer, that wait before the sender is stopped."""
BACKLOG: Final = 4096
STOP_S: Final = 2
"""For answers under way, at the end. Waits for commands are cut then, and taken up by the next server."""
WS_MAX: Final = 2 << 20
PING_S: Final = 20.0


class _Parts:
    """A body's pieces. A large upload is not copied once into a bytearray and again out of it."""

    __slots__ = ("_parts", "size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self.size += len(part)

    def __bytes__(self) -> bytes:
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


class Protocol(HttpToolsProtocol):
    """uvicorn's, with limits on headers and fewer stops on large bodies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.config.app.limits.max_connections:  # type: ignore[union-attr]
            transport.abort()
            return
        transport.set_write_buffer_limits(high=HIGH_WATER, low=HIGH_WATER // 4)
        self._late = self.loop.call_later(HEADERS_S, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_time()
        super().connection_lost(exc)

    def _too_late(self) -> None:
        self.transport.abort()

    def _on_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def handle_websocket_upgrade(self) -> None:
        self._on_time()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        if self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self._too_late)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise httptools.HttpParserError("too many headers")
        super().on_header(name, value)

    def _count(self, n: int) -> None:
        self._header_bytes += n
        if self._header_bytes > MAX_HEADER_BYTES:
            raise httptools.HttpParserError("headers too large")

    def on_headers_complete(self) -> None:
        self._on_time()
        self.scope["extensions"] = {"dsec.abort": self.transport.abort}  # type: ignore[dict-item]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        cycle: RequestResponseCycle = self.cycle
        if cycle.response_complete or self.parser.should_upgrade():
            return
        parts: Any = cycle.body
        if not isinstance(parts, _Parts):  # uvicorn puts an empty bytearray there after each receive
            cycle.body = parts = _Parts()  # type: ignore[assignment]
        parts.add(body)
        if parts.size > HIGH_WATER:
            self.flow.pause_reading()
        cycle.message_event.set()


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files in PEM. With `client_ca` a client must show a certificate that it has signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Raises InvalidArgument for files that are not there or do not fit."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.set_alpn_protocols(["http/1.1"])
        try:
            made.load_cert_chain(self.certificate, self.key)
            if self.client_ca:
                made.load_verify_locations(self.client_ca)
                made.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as e:
            raise InvalidArgument(f"TLS with {self.certificate} and {self.key}: {e}") from e
        return made


class Server:
    """`url = await start(host, port)`, `await stop()`. Port 0 takes a free one."""

    def __init__(self, app: ApiServer, tls: Tls | None = None) -> None:
        # Its own messages are of clients that go away and answers that are cut: the app logs what matters.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._config = uvicorn.Config(
            app,
            http=Protocol,
            ws="websockets-sansio",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
            ws_max_size=WS_MAX,
            ws_ping_interval=PING_S,
            ws_ping_timeout=PING_S * 3,
            ws_per_message_deflate=False,
            interface="asgi3",
            proxy_headers=False,
        )
        self._server = uvicorn.Server(self._config)
        self._tls = tls.context() if tls else None
        self._socket: socket.socket | None = None

    async def start(self, host: str, port: int) -> str:
        """The URL where it can be reached. Raises OSError when it cannot listen there."""
        self._socket = _listen(host, port)
        self._config.load()
        self._config.ssl = self._tls
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.startup(sockets=[self._socket])
        bound = self._socket.getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        return f"{'https' if self._tls else 'http'}://{shown}:{bound[1]}"

    async def stop(self) -> None:
        """Answers under way may end; after a while they are cut."""
        if self._socket is None:
            return
        await self._server.shutdown(sockets=[self._socket])
        self._socket = None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
