"""Web connections of sandboxes: looked into at their beginning, then passed on both ways.

An address is not enough, for it serves half the world. So the name in TLS's first message, or in HTTP's head,
decides, and it is this name's address that is connected to, whatever address the sandbox had in mind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator
from typing import Final

import dns.exception

from dsec.network.gateway import client_hello, http_head
from dsec.network.gateway.client_hello import HelloRefused
from dsec.network.gateway.resolver import BACKLOG, NameRefused, Resolver
from dsec.network.gateway.state import Sandbox, Table, allowed

log = logging.getLogger(__name__)
SO_ORIGINAL_DST: Final = 80
HEAD_S: Final = 10.0
CONNECT_S: Final = 5.0
IDLE_S: Final = 3600.0
BUFFER: Final = 64 << 10
"""Each way; a stream holds twice that at most, and one sandbox has hundreds of them."""
KEEPALIVE_S: Final = 45
"""Below the time for which the kernel's filter remembers a flow that is silent."""
ALL_CONNECTIONS: Final = 16_384
TLS: Final = 443
ALERT: Final = bytes([21, 3, 3, 0, 2, 2, 112])
"""Fatal: unrecognized_name."""


class Proxied:
    """One connection; `cut` ends both sides at once."""

    def __init__(self, name: str, port: int, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.port = port
        self._writers = [writer]
        self.is_cut = False

    def add(self, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()


class Proxy:
    def __init__(self, table: Table, resolver: Resolver, *, connections: int = 256) -> None:
        self._table = table
        self._resolver = resolver
        self._each = connections
        self._open: dict[int, int] = {}
        self._all = 0

    async def start(self, listeners: list[socket.socket]) -> None:
        for sock in listeners:
            await asyncio.start_server(self._accepted, sock=sock, limit=BUFFER, backlog=BACKLOG)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sandbox = self._table.at(writer.get_extra_info("peername")[0])
        target = original(writer.get_extra_info("socket"))
        if sandbox is None or target is None or not self._room(sandbox):
            writer.transport.abort()
            return
        try:
            _keep_alive(writer.get_extra_info("socket"))
            await self._serve(sandbox, target, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            writer.transport.abort()
        finally:
            self._open[sandbox.index] -= 1
            self._all -= 1
            if not self._open[sandbox.index]:
                del self._open[sandbox.index]
            with contextlib.suppress(OSError):
                writer.close()

    def _room(self, sandbox: Sandbox) -> bool:
        now = self._open.get(sandbox.index, 0)
        if now >= self._each or self._all >= ALL_CONNECTIONS:
            self._table.refused(sandbox, "proxy", "", "connections")
            return False
        self._open[sandbox.index] = now + 1
        self._all += 1
        return True

    async def _serve(
        self,
        sandbox: Sandbox,
        target: tuple[str, int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        address, port = target
        what = "tls" if port == TLS else "http"
        name = ""
        try:
            async with asyncio.timeout(HEAD_S):
                if port == TLS:
                    name, first, head = *await _hello(reader), None
                else:
                    head, first = await _head(reader)
                    name = head.host
                    if head.port != port:
                        raise HelloRefused("host_mismatch")
            allow = allowed(sandbox.policy, name, port)
            if allow is None:
                raise HelloRefused("not_allowed")
            connection = Proxied(name, port, writer)
            sandbox.connections.add(connection)
            try:
                await self._pass(sandbox, connection, address, reader, writer, first, head)
            finally:
                sandbox.connections.discard(connection)
        except (HelloRefused, NameRefused) as e:
            self._table.refused(sandbox, what, name, e.reason, address, port)
            await _refuse(writer, port, name, e.reason)
        except TimeoutError:
            self._table.refused(sandbox, what, name, "timeout", address, port)
            writer.transport.abort()

    async def _pass(
        self,
        sandbox: Sandbox,
        connection: Proxied,
        address: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        first: bytes,
        head: http_head.Head | None,
    ) -> None:
        upstream = await self._connect(sandbox, connection, address)
        if upstream is None:
            if head is not None:
                writer.write(http_head.refusal("502 Bad Gateway", f"{connection.name} cannot be reached"))
                await writer.drain()
            else:
                writer.transport.abort()
            return
        far_reader, far_writer = upstream
        connection.add(far_writer)
        if connection.is_cut:  # while it was connecting
            connection.cut()
            return
        try:
            if head is None:
                far_writer.write(first)
                up = _copy(reader, far_writer)
            else:
                far_writer.write(head.data)
                up = _body(first, reader, far_writer, head.length)
            await _both(up, _copy(far_reader, writer))
        finally:
            with contextlib.suppress(OSError):
                far_writer.close()

    async def _connect(
        self, sandbox: Sandbox, connection: Proxied, address: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """To an address of the name: to the one that the sandbox had in mind, if it is one."""
        allow = allowed(sandbox.policy, connection.name, connection.port)
        if allow is None:
            raise HelloRefused("not_allowed")
        found: list[str] = []
        refused: NameRefused | None = None
        for kind in ("A", "AAAA"):
            try:
                found += (await self._resolver.addresses(connection.name, allow, kind))[0]
            except dns.exception.DNSException:
                continue
            except NameRefused as e:
                refused = e
        if not found and refused is not None:
            raise refused
        for candidate in sorted(found, key=lambda a: a != address)[:4]:
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(candidate, connection.port, limit=BUFFER)
            except (OSError, TimeoutError) as e:
                log.info("%s at %s: %s", connection.name, candidate, e)
        return None


def _keep_alive(sock: socket.socket) -> None:
    """An answer may take minutes: silence must not look like the flow's end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)


async def _hello(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The name, and all that was read."""
    data = b""
    while (name := client_hello.server_name(data)) is None:
        part = await reader.read(client_hello.MAX_HELLO)
        if not part:
            raise HelloRefused("not_tls" if data else "closed")
        data += part
    return name, data


async def _head(reader: asyncio.StreamReader) -> tuple[http_head.Head, bytes]:
    data = b""
    while (found := http_head.read(data)) is None:
        part = await reader.read(http_head.MAX_HEAD)
        if not part:
            raise HelloRefused("not_http" if data else "closed")
        data += part
    return found


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """To the end, which is passed on."""
    async with asyncio.timeout(IDLE_S) as idle:
        loop = asyncio.get_running_loop()
        while data := await reader.read(BUFFER):
            writer.write(data)
            await writer.drain()
            idle.reschedule(loop.time() + IDLE_S)
    await _end(writer)


async def _end(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()
            await writer.drain()


async def _body(
    first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int
) -> None:
    """One request's body and not a byte more: what follows it would be another request."""
    parts = _chunked(first, reader) if length < 0 else _counted(first, reader, length)
    async for part in parts:
        writer.write(part)
        await writer.drain()


async def _counted(first: bytes, reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    part = first[:length]
    while part:
        yield part
        length -= len(part)
        part = await reader.read(min(length, BUFFER)) if length else b""
    if length:
        raise asyncio.IncompleteReadError(b"", length)


async def _chunked(first: bytes, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Chunks, each read and written anew; trailers are left out (RFC 9112, section 7.1)."""
    held = first

    async def line() -> bytes:
        nonlocal held
        while b"\r\n" not in held:
            if len(held) > 4096:
                raise OSError("a chunk's head without end")
            more = await reader.read(BUFFER)
            if not more:
                raise asyncio.IncompleteReadError(held, None)
            held += more
        found, _, held = held.partition(b"\r\n")
        return found

    while True:
        size = (await line()).partition(b";")[0].strip()
        if not size or len(size) > 12 or not all(c in b"0123456789abcdefABCDEF" for c in size):
            raise OSError("a chunk's head that is none")
        left = int(size, 16)
        if not left:
            while await line():
                pass
            yield b"0\r\n\r\n"
            return
        yield size + b"\r\n"
        while left:
            part, held = held[:left], held[left:]
            part = part or await reader.read(min(left, BUFFER))
            if not part:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(part)
            yield part
        if await line():
            raise OSError("a chunk longer than it said")
        yield b"\r\n"


async def _both(up: object, down: object) -> None:
    """The answer's end is the end: a request that is still being sent is not wanted any more."""
    sending = asyncio.ensure_future(up)  # type: ignore[call-overload]
    receiving = asyncio.ensure_future(down)  # type: ignore[call-overload]
    try:
        await receiving
        if not sending.done():
            await asyncio.wait({sending}, timeout=IDLE_S if not receiving.exception() else 0)
    finally:
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)


async def _refuse(writer: asyncio.StreamWriter, port: int, name: str, reason: str) -> None:
    if port == TLS:
        writer.write(ALERT)
    else:
        text = f"dsec: this sandbox's network_rules do not allow {name or 'this'} ({reason})"
        writer.write(http_head.refusal("403 Forbidden", text))
    with contextlib.suppress(OSError):
        await writer.drain()


def original(sock: socket.socket) -> tuple[str, int] | None:
    """Where a redirected connection was going (linux/netfilter_ipv4.h); None: it was not redirected."""
    try:
        if sock.family == socket.AF_INET:
            raw = sock.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
            return socket.inet_ntop(socket.AF_INET, raw[4:8]), struct.unpack_from("!H", raw, 2)[0]
        raw = sock.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, 28)
        return socket.inet_ntop(socket.AF_INET6, raw[8:24]), struct.unpack_from("!H", raw, 2)[0]
    except OSError:
        return None
