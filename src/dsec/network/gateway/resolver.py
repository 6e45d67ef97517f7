"""DNS for sandboxes: answers names that their rules allow, pins the answers, and nothing else leaves.

Queries are never passed on as they came: the resolver asks upstream itself, for A and AAAA alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final, cast

import dns.asyncresolver
import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.nameserver
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset

from dsec.core.network import NameAllow
from dsec.network.gateway.state import Sandbox, Table
from dsec.network.gateway.targets import may_be_reached

log = logging.getLogger(__name__)
TTL_FLOOR_S: Final = 30
TTL_CEILING_S: Final = 3600
LIFETIME_S: Final = 5.0
CACHE: Final = 10_000
AT_ONCE: Final = 512
AT_ONCE_EACH: Final = 32
MAX_ADDRESSES: Final = 32
"""Of one answer."""
WILD_LABEL: Final = 40
WILD_NAME: Final = 120
"""Longest label and name below a wildcard: names are no way to carry data out."""
TCP_IDLE_S: Final = 10.0
TCP_EACH: Final = 8
TCP_AT_ONCE: Final = 16
"""Connections of one sandbox."""
MAX_QUERY: Final = 4096
BACKLOG: Final = 1024
MIN_DATAGRAM: Final = 512
MAX_DATAGRAM: Final = 1232
"""What fits through everywhere; beyond it the asker comes again by TCP."""
MAX_ANSWER: Final = 65535


class NameRefused(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Resolver:
    """`start` with sockets that are bound already."""

    def __init__(self, table: Table, upstreams: list[str]) -> None:
        self._table = table
        self._asking = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[asyncio.BaseTransport | asyncio.Server] = []
        self._upstream = dns.asyncresolver.Resolver(configure=not upstreams)
        if upstreams:
            self._upstream.nameservers = [_nameserver(u) for u in upstreams]
        self._upstream.cache = dns.resolver.LRUCache(CACHE)
        self._upstream.lifetime = LIFETIME_S
        self._upstream.search = []

    # --- for the proxy as well ---

    async def addresses(self, name: str, allow: NameAllow, kind: str) -> tuple[list[str], int]:
        """Addresses and time to live in seconds. kind: A or AAAA. Raises NameRefused, DNSException."""
        answer = await self._upstream.resolve(f"{name}.", kind, raise_on_no_answer=False)
        found = [r.address for r in answer.rrset or ()][:MAX_ADDRESSES]
        public = [a for a in found if may_be_reached(a, private=allow.private)]
        if found and not public:
            raise NameRefused("rebinding")
        ttl = answer.rrset.ttl if answer.rrset else TTL_FLOOR_S
        return public, max(TTL_FLOOR_S, min(TTL_CEILING_S, ttl))

    def check(self, sandbox: Sandbox, name: str) -> NameAllow:
        """The entry that allows a name. Raises NameRefused."""
        allow = sandbox.policy.allows_name(name)
        if allow is None:
            raise NameRefused("not_allowed")
        if allow.pattern.startswith("*."):
            if len(name) > WILD_NAME or any(len(label) > WILD_LABEL for label in name.split(".")):
                raise NameRefused("label")
            if not sandbox.new_name(name):
                raise NameRefused("new_names")
        return allow

    # --- queries ---

    async def answer(self, wire: bytes, source: str, *, datagram: bool) -> bytes | None:
        """An answer to a query, or None for what deserves none."""
        sandbox = self._table.at(source)
        if sandbox is None or len(wire) > MAX_QUERY:
            return None
        try:
            query = dns.message.from_wire(wire, ignore_trailing=False)
            asked = query.question[0]
        except (dns.exception.DNSException, IndexError, ValueError):
            return None
        if query.flags & dns.flags.QR or query.opcode() != 0 or len(query.question) != 1:
            return None
        name = asked.name.to_text(omit_final_dot=True).lower()
        if not sandbox.queries.take() or sandbox.asking >= AT_ONCE_EACH or self._asking >= AT_ONCE:
            self._table.refused(sandbox, "dns", name, "rate")
            return _said(query, dns.rcode.REFUSED)
        sandbox.asking += 1
        self._asking += 1
        try:
            return await self._resolved(query, sandbox, name, asked.rdtype, datagram=datagram)
        finally:
            sandbox.asking -= 1
            self._asking -= 1

    async def _resolved(self, query: Any, sandbox: Sandbox, name: str, kind: int, *, datagram: bool) -> bytes:
        try:
            allow = self.check(sandbox, name)
            if kind not in (dns.rdatatype.A, dns.rdatatype.AAAA):
                return _said(query, dns.rcode.NOERROR)  # HTTPS records would tell keys of hidden hellos
            text = dns.rdatatype.to_text(dns.rdatatype.RdataType.make(kind))
            found, ttl = await self.addresses(name, allow, text)
        except NameRefused as e:
            self._table.refused(sandbox, "dns", name, e.reason)
            return _said(query, dns.rcode.NXDOMAIN, blocked=e.reason)
        except dns.resolver.NXDOMAIN:
            return _said(query, dns.rcode.NXDOMAIN)
        except dns.exception.DNSException as e:
            log.info("upstream, of %s: %s", name, e)
            return _said(query, dns.rcode.SERVFAIL)
        for address in found:
            self._table.pin(sandbox, address, allow, ttl)
        response = dns.message.make_response(query, recursion_available=True)
        if found:
            response.answer.append(dns.rrset.from_text(query.question[0].name, ttl, "IN", text, *found))
        most = max(MIN_DATAGRAM, min(query.payload, MAX_DATAGRAM)) if datagram else MAX_ANSWER
        return response.to_wire(max_size=most, prefer_truncation=True)

    # --- sockets ---

    async def start(self, udp: list[socket.socket], tcp: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for sock in udp:
            transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=sock)
            self._listening.append(transport)
        for sock in tcp:
            self._listening.append(await asyncio.start_server(self._stream, sock=sock, backlog=BACKLOG))

    def close(self) -> None:
        for listening in self._listening:
            listening.close()

    def spawn(self, wire: bytes, source: Any, send: Callable[[bytes, Any], None]) -> None:
        async def go() -> None:
            said = await self.answer(wire, source[0], datagram=True)
            if said is not None:
                send(said, source)

        task = asyncio.get_running_loop().create_task(go())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (e := task.exception()) is not None:
            log.error("a query failed: %r", e)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = writer.get_extra_info("peername")[0]
        sandbox = self._table.at(source)
        if sandbox is None or sandbox.streams >= TCP_AT_ONCE:
            writer.transport.abort()
            return
        sandbox.streams += 1
        try:
            for _ in range(TCP_EACH):
                async with asyncio.timeout(TCP_IDLE_S):
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    wire = await reader.readexactly(size)
                said = await self.answer(wire, source, datagram=False)
                if said is None:
                    break
                writer.write(len(said).to_bytes(2, "big") + said)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            sandbox.streams -= 1
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # uvloop's is no subclass of it

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._resolver.spawn(data, addr, self._transport.sendto)


def _said(query: Any, rcode: dns.rcode.Rcode, blocked: str = "") -> bytes:
    response = dns.message.make_response(query, recursion_available=True)
    response.set_rcode(rcode)
    if blocked and query.edns >= 0:
        option = dns.edns.EDEOption(dns.edns.EDECode.BLOCKED, blocked)
        response.use_edns(0, options=[option])
    return response.to_wire()


def _nameserver(text: str) -> dns.nameserver.Nameserver:
    address, _, port = text.partition("#")
    return dns.nameserver.Do53Nameserver(address, int(port or 53))
