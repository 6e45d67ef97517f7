"""Prepared pairs of user and network namespace, linked to the router: what a sandbox with a network enters.

Some are kept ready, so that making them is not on a creation's path. A pair that is taken belongs to its
sandbox: with the namespace's last process its link goes, whoever is alive to see it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from dsec.core.errors import DSecError, LaunchFailed
from dsec.linux import netlink, netns
from dsec.network.addresses import ROUTER_MAC, Addresses, Indexes, ifindex, index_of, link_name, mac
from dsec.network.router import Router

log = logging.getLogger(__name__)
ETH0: Final = 2
LO: Final = 1
MTU: Final = 1500
SYSCTLS: Final = {  # as Docker has them
    "net/ipv4/ping_group_range": "0 2147483647",
    "net/ipv4/ip_unprivileged_port_start": "0",
    "net/ipv6/conf/eth0/accept_ra": "0",
}


class Pair(msgspec.Struct, frozen=True):
    """The descriptors belong to whoever took it."""

    index: int
    user: int
    net: int

    def close(self) -> None:
        """Both descriptors. The namespaces go with their last process."""
        os.close(self.user)
        os.close(self.net)


class Pairs:
    """`take` from any thread; `release` when its sandbox is gone."""

    def __init__(
        self,
        router: Router,
        *,
        make: Callable[[], tuple[int, int]],
        prepare: Callable[[int], None],
        ready: int,
    ) -> None:
        """make: a new user namespace and the network namespace that it owns. prepare: given the number of the
        router's end, in the router's namespace, before the link can be used."""
        self._router = router
        self._make = make
        self._prepare = prepare
        self._wanted = ready
        self._lock = threading.Lock()
        self._ready: deque[Pair] = deque()
        self._filling = False
        self._closed = False
        self._indexes = Indexes(router.addresses.last)

    def take(self) -> Pair:
        """One that is ready, or a new one. Raises LaunchFailed, ResourceExhausted."""
        with self._lock:
            pair = self._ready.popleft() if self._ready else None
        self.fill()
        return pair or self._new()

    def fill(self) -> None:
        """Make what is missing, in the background."""
        with self._lock:
            if self._filling or self._closed or len(self._ready) >= self._wanted or not self._router.thread:
                return
            self._filling = True
            self._router.thread.submit(self._fill_one)

    def _fill_one(self) -> None:
        """One at a time, so that launches on the same thread have their turn."""
        try:
            user, net = self._make()
            pair: Pair | None = self._linked(user, net)
        except (OSError, DSecError) as e:
            log.warning("no pair of namespaces ahead of time: %s", e)
            pair = None
        with self._lock:
            self._filling = False
            if pair and not self._closed:
                self._ready.append(pair)
                pair = None
        if pair:
            self._discard(pair)
        else:
            self.fill()

    def _new(self) -> Pair:
        try:
            user, net = self._make()
            return self._router.run(lambda: self._linked(user, net))
        except OSError as e:
            raise LaunchFailed(f"a sandbox's network: {e}") from e

    def _linked(self, user: int, net: int) -> Pair:
        """In the router's thread. The descriptors are the pair's, or closed."""
        with self._lock:
            index = self._indexes.take()
        try:
            assert self._router.netlink and self._router.thread
            self._router.netlink.send(near_end(self._router.addresses, index, net))
            self._prepare(ifindex(index))
            with self._router.thread.within(net):
                _far_end(self._router.addresses, index)
        except BaseException:
            os.close(user)
            os.close(net)
            self.release(index)
            raise
        return Pair(index, user, net)

    def hold(self, index: int) -> None:
        """A sandbox of an earlier life has it."""
        with self._lock:
            self._indexes.hold(index)

    def release(self, index: int) -> None:
        """Its sandbox is gone, and the link with it; the address is used again as late as can be."""
        with self._lock:
            self._indexes.give_back(index)

    def reclaim(self, claimed: frozenset[int]) -> list[str]:
        """Remove links that neither a sandbox nor the stock has; their names."""
        assert self._router.netlink
        with self._lock:
            known = claimed | {p.index for p in self._ready} | self._indexes.held
        told = []
        for number, name in self._router.netlink.links().items():
            index = index_of(number)
            if index > 0 and index not in known:
                try:
                    self._router.netlink.send([netlink.link_gone(number)])
                    told.append(f"link {name}")
                except OSError as e:
                    log.info("link %s is gone: %s", name, e)
        return told

    def close(self) -> None:
        """The stock goes."""
        with self._lock:
            self._closed = True
            left, self._ready = self._ready, deque()
        for pair in left:
            self._discard(pair)

    def _discard(self, pair: Pair) -> None:
        pair.close()
        self.release(pair.index)


def near_end(addresses: Addresses, index: int, net: int) -> list[tuple[int, int, bytes]]:
    """The link and the way to its sandbox, for the router's namespace."""
    number, hardware = ifindex(index), mac(index)
    a4, a6 = addresses.address4(index), addresses.address6(index)
    link = netlink.veth(
        index=number,
        name=link_name(index),
        mac=ROUTER_MAC,
        peer_index=ETH0,
        peer_name="eth0",
        peer_mac=hardware,
        peer_netns=net,
        mtu=MTU,
    )
    ways = [netlink.route(number, a, a.max_prefixlen) for a in (a4, a6)]
    return [link, *ways, *(netlink.neighbour(number, a, hardware) for a in (a4, a6))]


def _far_end(addresses: Addresses, index: int) -> None:
    """In the sandbox's namespace."""
    a4, a6 = addresses.address4(index), addresses.address6(index)
    g4, g6 = addresses.gateway4, addresses.gateway6
    for key, value in SYSCTLS.items():
        if netns.read_sysctl(key) is not None:
            netns.write_sysctl(key, value)
    inside = netlink.Netlink()
    try:
        inside.send(
            [
                netlink.link_up(LO),
                netlink.address(ETH0, a4, 32),
                netlink.address(ETH0, a6, 128),
                netlink.link_up(ETH0),
                netlink.neighbour(ETH0, g4, ROUTER_MAC),
                netlink.neighbour(ETH0, g6, ROUTER_MAC),
                netlink.route(ETH0, g4, 32),
                netlink.route(ETH0, g6, 128),
                netlink.route(ETH0, None, via=g4),
                netlink.route(ETH0, None, via=g6),
            ]
        )
    finally:
        inside.close()
