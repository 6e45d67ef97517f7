"""What a sandbox may reach: the rules of its owner, compiled to what the node enforces. Pure."""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True):
    """Ports `low` to `high`, both included, of an IP protocol: 6, 17, 1 (ICMP of both versions), 0 for any.

    `proxied`: the connection goes through the node's proxy, which looks at Host or SNI.
    """

    protocol: int
    low: int
    high: int
    proxied: bool = False


class AddressAllow(msgspec.Struct, frozen=True):
    """A network in text, IPv4 or IPv6, and all that is allowed in it: shorter prefixes are merged in."""

    network: str
    spans: tuple[Span, ...]


class NameAllow(msgspec.Struct, frozen=True):
    """A domain, exact or `*.example.org`. `private`: it may resolve to private addresses."""

    pattern: str
    spans: tuple[Span, ...]
    private: bool
    rule: str


class Policy(msgspec.Struct, frozen=True):
    """`drop`: what is denied is dropped, not refused."""

    addresses: tuple[AddressAllow, ...] = ()
    names: tuple[NameAllow, ...] = ()
    drop: bool = False
