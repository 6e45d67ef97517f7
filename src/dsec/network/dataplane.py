"""What the node enforces, as maps of the eBPF program (agent/bpf/policy.bpf.c says what each means).

Calls that attach are made in the router's network namespace; all others may be made anywhere, from one thread
at a time.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument, Unavailable
from dsec.core.network import AddressAllow, Policy, Span
from dsec.linux import bpf
from dsec.network.addresses import Addresses, ifindex, mac, packed
from dsec.network.special import SPECIAL

log = logging.getLogger(__name__)
SANDBOX: Final = struct.Struct("=4s16s6s2xIIII")
USAGE: Final = struct.Struct("=8Q")
RULE_KEY: Final = struct.Struct("=II16s")
RULE_HEAD: Final = struct.Struct("=I")
SPAN: Final = struct.Struct("=BBBxHH")
SPECIAL_KEY: Final = struct.Struct("=I16s")
PREFIX: Final = struct.Struct("=I")
PIN_KEY: Final = struct.Struct("=I16s")
PIN_HEAD: Final = struct.Struct("=QQI4x")
NEIGHBOUR: Final = struct.Struct("=II")
NODE: Final = struct.Struct("=16s16s")
EVENT: Final = struct.Struct("=QII16sHHBBBx")
SPANS: Final = 16
PIN_SPANS: Final = 4
DROP_DENIED: Final = 1
PROXIED: Final = 1
REASONS: Final = {
    1: "not_allowed",
    2: "spoofed",
    3: "not_ip",
    4: "fragment",
    5: "ip_options",
    6: "extension_header",
    7: "malformed",
    8: "node",
    9: "neighbour",
    10: "inbound",
}
PROTOCOLS: Final = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp"}


class Denied(msgspec.Struct, frozen=True):
    """A packet that was not let through. `left_out`: how many more since the start are in no event."""

    index: int
    address: str
    port: int
    protocol: str
    reason: str
    inbound: bool
    left_out: int


class Counters(msgspec.Struct, frozen=True):
    """Of one pair, since it was assigned."""

    out_packets: int
    out_bytes: int
    in_packets: int
    in_bytes: int
    denied: int


def program_file() -> Path:
    """As `make agent` built it, or as the package carries it; DSEC_POLICY names another build."""
    if named := os.environ.get("DSEC_POLICY"):
        return Path(named)
    here = Path(__file__)
    for path in (here.parents[1] / "data" / "policy.bpf.o", here.parents[3] / "build" / "policy.bpf.o"):
        if path.is_file():
            return path
    raise Unavailable("the network's program is not built: make agent")


class Dataplane:
    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._object: bpf.Object | None = None
        self._denied: list[Denied] = []
        self._prefixes: dict[int, list[bytes]] = {}
        """Keys of each policy in the map of rules."""
        self._node: set[bytes] = set()

    def open(self) -> None:
        """Load it, with every flow denied. Raises OSError, Unavailable."""
        self._object = found = bpf.Object(program_file())
        self._sandboxes = found.map("sandboxes", SANDBOX.size)
        self._usages = found.map("usages", USAGE.size)
        self._neighbours = found.map("neighbours", NEIGHBOUR.size)
        self._rules = found.map("rules", RULE_HEAD.size + SPANS * SPAN.size)
        self._special = found.map("special", PREFIX.size)
        self._pins = found.map("pins", PIN_HEAD.size + PIN_SPANS * SPAN.size)
        self._nodes = found.map("nodes", NODE.size)
        self._ingress, self._egress = found.program("from_sandbox"), found.program("to_sandbox")
        self._ring = bpf.RingBuffer(found.map("events", 0), self._take)
        gateways = (packed(self._addresses.gateway4), packed(self._addresses.gateway6))
        self._nodes.set(bytes(4), NODE.pack(*gateways))
        for network in (*SPECIAL, str(self._addresses.pool4), str(self._addresses.pool6)):
            self._mark_special(network)

    def _mark_special(self, network: str) -> bytes:
        prefix, address = _prefix(network)
        key = SPECIAL_KEY.pack(prefix, address)
        self._special.set(key, PREFIX.pack(prefix))
        return key

    @property
    def pins_fd(self) -> int:
        """For the resolver's process."""
        return self._pins.fd

    @property
    def events_fd(self) -> int:
        return self._ring.fd

    def close(self) -> None:
        """What is attached stays in force until its interface goes, or another life replaces it."""
        if self._object:
            self._ring.close()
            self._object.close()
            self._object = None

    # --- interfaces ---

    def attach(self, number: int) -> None:
        """In the router's namespace. Until `assign` nothing gets through."""
        bpf.attach(number, ingress=self._ingress, egress=self._egress)

    def assign(self, index: int, *, policy: int, group: int, drop: bool) -> None:
        """Let a pair have what a policy allows. 0 is a policy that allows nothing, and no group."""
        key = ifindex(index).to_bytes(4, "little")
        a4, a6 = self._addresses.address4(index), self._addresses.address6(index)
        if self._usages.get(key) is None:
            self._usages.set(key, USAGE.pack(*(0,) * 7, 0))
        neighbour = NEIGHBOUR.pack(index, group)
        for address in (a4, a6):
            self._neighbours.set(packed(address), neighbour)
        flags = DROP_DENIED if drop else 0
        value = SANDBOX.pack(a4.packed, a6.packed, mac(index), index, policy, group, flags)
        self._sandboxes.set(key, value)

    def unassign(self, index: int) -> None:
        """Nothing gets through any more. Its pins are the resolver's to take away."""
        key = ifindex(index).to_bytes(4, "little")
        self._sandboxes.delete(key)
        self._usages.delete(key)
        for address in (self._addresses.address4(index), self._addresses.address6(index)):
            self._neighbours.delete(packed(address))

    def counters(self, index: int) -> Counters:
        found = self._usages.get(ifindex(index).to_bytes(4, "little"))
        return Counters(*(USAGE.unpack(found)[:5] if found else (0,) * 5))

    # --- policies ---

    def set_policy(self, policy: int, rules: Policy) -> None:
        """Replace in place; a prefix that stays is never absent. Raises InvalidArgument past a limit."""
        wanted = {}
        for allow in rules.addresses:
            prefix, address = _prefix(allow.network)
            wanted[RULE_KEY.pack(32 + prefix, policy, address)] = _rule(allow)
        for key, value in wanted.items():
            self._rules.set(key, value)
        for key in self._prefixes.get(policy, ()):
            if key not in wanted:
                self._rules.delete(key)
        self._prefixes[policy] = list(wanted)

    def drop_policy(self, policy: int) -> None:
        for key in self._prefixes.pop(policy, ()):
            self._rules.delete(key)

    def set_node_addresses(self, addresses: Iterable[str]) -> None:
        """The node's own: a rule opens one only by naming it alone."""
        wanted = set()
        for address in addresses:
            found = ip_address(address)
            network = f"{found.compressed.partition('%')[0]}/{found.max_prefixlen}"
            wanted.add(self._mark_special(network))
        for key in self._node - wanted:
            self._special.delete(key)
        self._node = wanted

    # --- names ---

    def pin(self, index: int, address: str, expires_s: float, spans: Iterable[Span]) -> None:
        """Allow an address for some seconds from now."""
        self._pins.set(*pin_entry(index, address, expires_s, spans))

    def unpin_all(self, index: int) -> None:
        mine = index.to_bytes(4, "little")
        for key in [k for k in self._pins.keys(PIN_KEY.size) if k[:4] == mine]:
            self._pins.delete(key)

    # --- events ---

    def read_events(self) -> list[Denied]:
        """What was denied since the last call."""
        self._ring.consume()
        found, self._denied = self._denied, []
        return found

    def _take(self, data: bytes) -> None:
        _, index, left_out, remote, _, port, protocol, inbound, reason = EVENT.unpack(data)
        self._denied.append(
            Denied(
                index=index,
                address=text_of(remote),
                port=port,
                protocol=PROTOCOLS.get(protocol, str(protocol)),
                reason=REASONS.get(reason, str(reason)),
                inbound=bool(inbound),
                left_out=left_out,
            )
        )


def text_of(address: bytes) -> str:
    """Of 16 bytes."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if found.version == 6 else None
    return str(mapped or found)


def _prefix(network: str) -> tuple[int, bytes]:
    """Length and bytes, both as of IPv6."""
    found = ip_network(network)
    return found.prefixlen + (96 if found.version == 4 else 0), packed(found.network_address)


def _spans(spans: Iterable[Span], most: int) -> tuple[int, bytes]:
    found = list(spans)
    if len(found) > most:
        raise InvalidArgument(f"network rules: {len(found)} spans of ports for one address; at most {most}")
    data = b"".join(
        SPAN.pack(s.protocol, PROXIED if s.proxied else 0, s.prefix, s.low, s.high) for s in found
    )
    return len(found), data.ljust(most * SPAN.size, b"\0")


def _rule(allow: AddressAllow) -> bytes:
    count, spans = _spans(allow.spans, SPANS)
    return RULE_HEAD.pack(count) + spans


def pin_entry(index: int, address: str, expires_s: float, spans: Iterable[Span]) -> tuple[bytes, bytes]:
    """Key and value of the map of pins. `expires_s` from now."""
    count, data = _spans(spans, PIN_SPANS)
    now = time.monotonic_ns()
    value = PIN_HEAD.pack(now + int(expires_s * 1e9), now, count) + data
    return PIN_KEY.pack(index, packed(address)), value
