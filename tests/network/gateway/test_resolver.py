"""The resolver, by its own sockets and a real upstream on loopback."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterable
from typing import cast

import dns.asyncquery
import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from dsec.core.network import Span, compile_rules, rules_from
from dsec.network.gateway.protocol import Refused, SetPolicy
from dsec.network.gateway.resolver import Resolver
from dsec.network.gateway.state import Table

ZONE = {
    "a.example.org.": ["203.0.113.10"],
    "twin.example.org.": ["203.0.113.10"],
    "inside.example.org.": ["10.1.2.3"],
    "mixed.example.org.": ["10.1.2.3", "203.0.113.11"],
    "meta.example.org.": ["169.254.169.254"],
    "many.example.org.": [f"203.0.113.{n}" for n in range(1, 33)],
}


class Upstream(asyncio.DatagramProtocol):
    """Authoritative for ZONE, and for anything below *.wild.org."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text().lower()
        self.asked.append(name)
        response = dns.message.make_response(query)
        found = ["203.0.113.99"] if name.endswith(".wild.org.") else ZONE.get(name)
        if found is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype == 1:
            response.answer.append(dns.rrset.from_text(question.name, 5, "IN", "A", *found))
        self.transport.sendto(response.to_wire(), addr)


class Bench:
    """A sandbox at 127.0.0.1, what is pinned for it, and what it was refused."""

    def __init__(self) -> None:
        self.pins: dict[str, tuple[float, list[Span]]] = {}
        self.refused: list[Refused] = []
        self.table = Table(self, self.refused.append)
        self.table.queries_per_second = 1000

    def pin(self, index: int, address: str, expires_s: float, spans: Iterable[Span]) -> None:
        self.pins[address] = (expires_s, list(spans))

    def unpin(self, index: int, address: str) -> None:
        self.pins.pop(address, None)

    def rules(self, *domains: str) -> None:
        policy = compile_rules(rules_from({"allow": [{"domain": d} for d in domains]}), drop=False)
        self.table.set(SetPolicy(1, 1, "127.0.0.1", "::1", policy.names, False))

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        transport, self.upstream = await loop.create_datagram_endpoint(Upstream, local_addr=("127.0.0.1", 0))
        self._transport = transport
        port = transport.get_extra_info("sockname")[1]
        self.resolver = Resolver(self.table, [f"127.0.0.1#{port}"])
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.tcp.setblocking(False)
        await self.resolver.start([self.udp], [self.tcp])

    async def ask(self, name: str, kind: str = "A", *, payload: int = 1232) -> dns.message.Message:
        query = dns.message.make_query(name, kind, use_edns=0 if payload else -1, payload=payload)
        port = self.udp.getsockname()[1]
        return await dns.asyncquery.udp(query, "127.0.0.1", 5, port)

    def reasons(self) -> list[str]:
        return [r.reason for r in self.refused]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.open()
    yield made
    made.resolver.close()
    made._transport.close()
    await asyncio.sleep(0)  # transports close in the next round of the loop


async def test_an_allowed_name_is_pinned_before_it_is_answered(bench: Bench) -> None:
    bench.rules("a.example.org")
    answer = await bench.ask("A.Example.ORG")
    assert [r.address for r in answer.answer[0]] == ["203.0.113.10"]
    assert answer.answer[0].ttl == 30
    assert bench.pins["203.0.113.10"][0] >= 30
    assert all(s.proxied for s in bench.pins["203.0.113.10"][1])


async def test_what_no_rule_names_never_leaves(bench: Bench) -> None:
    bench.rules("a.example.org")
    answer = await bench.ask("secret.evil.example")
    assert answer.rcode() == dns.rcode.NXDOMAIN
    assert [o.code for o in answer.options if isinstance(o, dns.edns.EDEOption)] == [dns.edns.EDECode.BLOCKED]
    assert not bench.upstream.asked and bench.reasons() == ["not_allowed"]


async def test_names_lead_to_no_private_address(bench: Bench) -> None:
    bench.rules("*.example.org")
    for name in ("inside.example.org", "meta.example.org"):
        assert (await bench.ask(name)).rcode() == dns.rcode.NXDOMAIN
    answer = await bench.ask("mixed.example.org")
    assert [r.address for r in answer.answer[0]] == ["203.0.113.11"]
    assert set(bench.pins) == {"203.0.113.11"}
    assert bench.reasons() == ["rebinding", "rebinding"]


@pytest.mark.parametrize("kind", ["HTTPS", "SVCB", "TXT", "ANY", "NS"])
async def test_other_types_are_empty_and_never_asked_for(bench: Bench, kind: str) -> None:
    bench.rules("a.example.org")
    answer = await bench.ask("a.example.org", kind)
    assert not answer.answer and answer.rcode() == dns.rcode.NOERROR
    assert not bench.upstream.asked


async def test_a_large_answer_is_cut_and_whole_by_tcp(bench: Bench) -> None:
    bench.rules("many.example.org")
    cut = await bench.ask("many.example.org", payload=0)
    assert cut.flags & dns.flags.TC
    query = dns.message.make_query("many.example.org", "A")
    whole = await dns.asyncquery.tcp(query, "127.0.0.1", 5, bench.tcp.getsockname()[1])
    assert len(whole.answer[0]) == 32


async def test_names_below_a_wildcard_are_counted(bench: Bench) -> None:
    bench.table.new_names = 5
    bench.rules("*.wild.org")
    codes = [(await bench.ask(f"n{i}.wild.org")).rcode() for i in range(7)]
    assert codes == [dns.rcode.NOERROR] * 5 + [dns.rcode.NXDOMAIN] * 2
    assert len(bench.upstream.asked) == 5 and bench.reasons() == ["new_names"] * 2
    assert (await bench.ask("a" * 50 + ".wild.org")).rcode() == dns.rcode.NXDOMAIN
    assert bench.reasons()[-1] == "label"


async def test_a_rule_taken_away_takes_its_pins(bench: Bench) -> None:
    bench.rules("a.example.org", "many.example.org")
    await bench.ask("a.example.org")
    bench.rules("many.example.org")
    assert not bench.pins
    assert (await bench.ask("a.example.org")).rcode() == dns.rcode.NXDOMAIN


async def test_an_address_that_two_names_share(bench: Bench) -> None:
    """As behind a CDN: the name that is left keeps it, and neither takes the other's ports away."""
    bench.rules("a.example.org", "twin.example.org")
    one = compile_rules(
        rules_from({"allow": [{"domain": "a.example.org"}, {"domain": "twin.example.org", "ports": [8443]}]}),
        drop=False,
    )
    bench.table.set(SetPolicy(2, 1, "127.0.0.1", "::1", one.names, False))
    for name in ("a.example.org", "twin.example.org"):
        await bench.ask(name)
    assert {s.low for s in bench.pins["203.0.113.10"][1]} == {80, 443, 8443}
    bench.rules("a.example.org")
    assert {s.low for s in bench.pins["203.0.113.10"][1]} == {80, 443}


async def test_queries_are_limited(bench: Bench) -> None:
    bench.table.queries_per_second = 1
    bench.rules("a.example.org")
    codes = [(await bench.ask("a.example.org")).rcode() for _ in range(4)]
    assert dns.rcode.REFUSED in codes and "rate" in bench.reasons()


async def test_a_stranger_gets_no_answer(bench: Bench) -> None:
    wire = dns.message.make_query("a.example.org", "A").to_wire()
    assert await bench.resolver.answer(wire, "127.0.0.1", datagram=True) is None


async def test_damaged_queries(bench: Bench) -> None:
    """Nothing is raised, and nothing that no rule names goes upstream."""
    bench.rules("a.example.org")
    bench.table.queries_per_second = 1e9
    bench.table.remove(1)
    bench.rules("a.example.org")
    good = dns.message.make_query("a.example.org", "A", use_edns=0).to_wire()
    dice = random.Random(4)
    for _ in range(3000):
        wire = bytearray(good)
        for _ in range(dice.randint(1, 6)):
            wire[dice.randrange(len(wire))] = dice.randrange(256)
        said = await bench.resolver.answer(
            bytes(wire[: dice.randint(0, len(wire))]), "127.0.0.1", datagram=True
        )
        assert said is None or len(said) <= 1232
    assert set(bench.upstream.asked) <= {"a.example.org."}
