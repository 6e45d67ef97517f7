"""What everything of a pair is called, by its index alone: names, numbers, hardware and IP addresses."""

from __future__ import annotations

from collections import deque
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument, ResourceExhausted

DEFAULT_POOL4: Final = "100.96.0.0/12"
DEFAULT_POOL6: Final = "fd5e:c0de::/64"
FIRST_IFINDEX: Final = 0x10000
MAX_INDEX: Final = (1 << 18) - 1
GATEWAY6: Final = 0xFFFF_FFFF


class Addresses(msgspec.Struct, frozen=True):
    """The pools of one node. An index is 1 to `last`."""

    pool4: IPv4Network
    pool6: IPv6Network

    @classmethod
    def of(cls, pool4: str = DEFAULT_POOL4, pool6: str = DEFAULT_POOL6) -> Addresses:
        """Raises InvalidArgument for a pool that is none, or that holds too few."""
        try:
            made = cls(IPv4Network(pool4), IPv6Network(pool6))
        except ValueError as e:
            raise InvalidArgument(f"network pools {pool4!r}, {pool6!r}: {e}") from None
        if made.pool4.prefixlen > 22 or made.pool6.prefixlen > 64:
            raise InvalidArgument(f"network pools {pool4}, {pool6}: /22 and /64, or wider")
        return made

    @property
    def last(self) -> int:
        return min(MAX_INDEX, self.pool4.num_addresses - 4)

    @property
    def gateway4(self) -> IPv4Address:
        """Resolver and next hop: the last address but the broadcast one."""
        return self.pool4[-2]

    @property
    def gateway6(self) -> IPv6Address:
        return self.pool6.network_address + GATEWAY6

    def number(self, index: int) -> int:
        """Of the router's end of the link."""
        return ifindex(index)

    def address4(self, index: int) -> IPv4Address:
        return self.pool4.network_address + index

    def address6(self, index: int) -> IPv6Address:
        return self.pool6.network_address + index


def ifindex(index: int) -> int:
    """Of the router's end."""
    return FIRST_IFINDEX + index


def index_of(number: int) -> int:
    """The index whose router's end has this interface number."""
    return number - FIRST_IFINDEX


def link_name(index: int) -> str:
    return f"s{index}"


def mac(index: int) -> bytes:
    """Of the sandbox's end; locally administered."""
    return b"\x02\x5e" + index.to_bytes(4, "big")


ROUTER_MAC: Final = b"\x02\x5e\xff\xff\xff\xff"
"""Of all router's ends: each is a link of its own."""


def packed(address: str | IPv4Address | IPv6Address) -> bytes:
    """16 bytes; an IPv4 address mapped into IPv6."""
    found = ip_address(address)
    return found.packed if found.version == 6 else bytes(10) + b"\xff\xff" + found.packed


class Indexes:
    """Free indexes; the one freed longest ago comes first, so that an address is seldom seen again soon."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._next = 1
        self._freed: deque[int] = deque()
        self._held: set[int] = set()

    def take(self) -> int:
        """Raises ResourceExhausted when all are held."""
        while self._next <= self._last:
            index, self._next = self._next, self._next + 1
            if index not in self._held:
                self._held.add(index)
                return index
        if not self._freed:
            raise ResourceExhausted(f"all {self._last} addresses of the sandboxes' network are held")
        index = self._freed.popleft()
        self._held.add(index)
        return index

    def hold(self, index: int) -> None:
        """An earlier life gave it out."""
        self._held.add(index)

    def give_back(self, index: int) -> None:
        if index in self._held:
            self._held.discard(index)
            self._freed.append(index)

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self._held)
