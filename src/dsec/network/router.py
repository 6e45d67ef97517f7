"""The router: a network namespace of the server's own, into which every sandbox's link leads.

    sandbox eth0 ── s<index> [eBPF] ── router: nftables, resolver, proxy ── up ── dsec-<id> ── host

Nothing of the host's is in it, so sandboxes cannot meet its services, and its connection table, links and
rules are apart from the host's. It is pinned by a bind mount and found again after a SIGKILL of the server.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
from collections.abc import Callable
from hashlib import blake2b
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address
from pathlib import Path
from typing import Final, TypeVar

from dsec.core.errors import Unsupported
from dsec.linux import netlink, netns
from dsec.network import nft
from dsec.network.addresses import Addresses

log = logging.getLogger(__name__)
T = TypeVar("T")
LINKS4: Final = int(IPv4Address("198.18.0.0"))
LINKS6: Final = int(IPv6Address("fd5e:c0de:0:1::"))
LINKS: Final = 1 << 15
"""Subnets of four addresses to choose a way out from; the range is nobody's in the Internet (RFC 2544)."""
UP_INDEX: Final = 2
HOST_MAC: Final = b"\x02\x5e\xfe\x00\x00\x01"
UP_MAC: Final = b"\x02\x5e\xfe\x00\x00\x02"
SYSCTLS: Final = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/fwmark_reflect": "1",  # a refusal carries the mark of what it refuses: the filter lets it pass
    "net/ipv4/icmp_ratelimit": "0",  # every refusal is told at once
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/accept_redirects": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/conf/all/accept_source_route": "0",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv6/conf/default/forwarding": "1",
    "net/ipv6/conf/default/accept_ra": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv6/conf/default/addr_gen_mode": "1",
    "net/ipv6/fwmark_reflect": "1",
    "net/ipv6/icmp/ratelimit": "0",
}


class Router:
    """Calls block: make them in a thread."""

    def __init__(
        self, run: Path, edge_id: str, addresses: Addresses, *, flows: int = 4096, drop: bool = False
    ) -> None:
        self.path = run / "router"
        self.addresses = addresses
        digest = blake2b(edge_id.encode(), digest_size=8)
        self._number = int.from_bytes(digest.digest(), "big")
        self.link = f"dsec-{digest.hexdigest()[:8]}"
        self.table = f"dsec_{digest.hexdigest()[:8]}"
        self._flows = flows
        self._drop = drop
        self.thread: netns.NamespaceThread | None = None
        self.netlink: netlink.Netlink | None = None

    def open(self, *, proxy_port: int) -> None:
        """Make it, or find the one of an earlier life. Raises Unsupported that says what is missing."""
        if why := missing():
            raise Unsupported(why)
        host = netlink.Netlink()
        try:
            self.thread = self._found_or_made()
            self.netlink = self.run(netlink.Netlink)
            self.run(self._sysctls)
            self._uplink(host)
            table = nft.router_table(
                gateway4=self.addresses.gateway4,
                gateway6=self.addresses.gateway6,
                proxy_port=proxy_port,
                flows=self._flows,
                drop=self._drop,
            )
            self.run(lambda: nft.load(table))
            nft.load(nft.host_table(self.table, self.link, *self._host_side))
        except OSError as e:
            self.close(keep=False)
            raise Unsupported(f"the sandboxes' network: {e}") from e
        except BaseException:
            self.close(keep=False)
            raise
        finally:
            host.close()

    def _found_or_made(self) -> netns.NamespaceThread:
        if netns.is_pinned(self.path):
            return netns.NamespaceThread.in_file("router", self.path)
        thread = netns.NamespaceThread.in_new("router")
        netns.pin(thread, self.path)
        return thread

    def _sysctls(self) -> None:
        for key, value in SYSCTLS.items():
            try:
                netns.write_sysctl(key, value)
            except OSError as e:
                if "ipv6" not in key:
                    raise
                log.info("no IPv6 for sandboxes: %s: %s", key, e)
        assert self.netlink
        self.netlink.send([netlink.link_up(1)])

    def _uplink(self, host: netlink.Netlink) -> None:
        """Both ends and their addresses, where they are not there already."""
        names = {name: number for number, name in host.links().items()}
        assert self.netlink and self.thread
        taken = host.addresses()
        number = self._subnet({a for i, a in taken if i != names.get(self.link)})
        self._host_side = (
            IPv4Interface((LINKS4 + 4 * number + 1, 30)),
            IPv6Interface((LINKS6 + 4 * number + 1, 126)),
        )
        if self.link not in names or UP_INDEX not in self.netlink.links():
            if self.link in names:
                host.send([netlink.link_gone(names[self.link])])
            made = netlink.veth(
                index=0,
                name=self.link,
                mac=HOST_MAC,
                peer_index=UP_INDEX,
                peer_name=nft.UPLINK,
                peer_mac=UP_MAC,
                peer_netns=self.thread.fd,
            )
            host.send([made])
        mine = socket.if_nametoindex(self.link)
        with contextlib.suppress(OSError):  # no IPv6: the address below says so
            netns.write_sysctl(f"net/ipv6/conf/{self.link}/accept_dad", "0")
        netns.write_sysctl(f"net/ipv4/conf/{self.link}/forwarding", "1")
        self._address(host, self.netlink, mine)

    def _address(self, host: netlink.Netlink, router: netlink.Netlink, mine: int) -> None:
        host4, host6 = self._host_side
        router.send([netlink.link_up(UP_INDEX)])
        host.send([netlink.address(mine, host4.ip, 30)])
        near = host4.ip + 1
        router.send([netlink.address(UP_INDEX, near, 30), netlink.route(UP_INDEX, None, via=host4.ip)])
        gateways = [netlink.address(1, self.addresses.gateway4, 32)]
        router.send(gateways)
        try:
            host.send([netlink.address(mine, host6.ip, 126)])
            router.send(
                [
                    netlink.address(UP_INDEX, host6.ip + 1, 126),
                    netlink.route(UP_INDEX, None, via=host6.ip),
                    netlink.address(1, self.addresses.gateway6, 128),
                ]
            )
        except OSError as e:
            log.info("sandboxes have no way out by IPv6: %s", e)

    def _subnet(self, taken: set[str]) -> int:
        """One in which the host has no address."""
        numbers = {int(ip_address(a)) for a in taken if ip_address(a).version == 4}
        for i in range(LINKS):
            number = (self._number + i) % LINKS
            if not numbers & set(range(LINKS4 + 4 * number, LINKS4 + 4 * number + 4)):
                return number
        raise Unsupported("all of 198.18.0.0/15 is in use on this host")

    def run(self, body: Callable[[], T]) -> T:
        """In the router's namespace."""
        assert self.thread
        return self.thread.run(body)

    def listen(self, port: int, kind: socket.SocketKind, where: list[str]) -> list[socket.socket]:
        """On these addresses; what is of IPv6 is left out where there is none."""
        return self.run(lambda: [s for w in where if (s := _bound(w, port, kind)) is not None])

    def node_addresses(self) -> list[str]:
        """Of the host and of the router itself."""
        host = netlink.Netlink()
        try:
            found = [a for _, a in host.addresses()]
        finally:
            host.close()
        assert self.netlink
        return found + [a for _, a in self.netlink.addresses()]

    def close(self, *, keep: bool) -> None:
        """keep: sandboxes live on, and their network with them."""
        if self.netlink:
            self.netlink.close()
            self.netlink = None
        if self.thread:
            self.thread.close()
            self.thread = None
        if not keep:
            self.remove()

    def remove(self) -> None:
        """Whatever an earlier life left. Idempotent."""
        netns.unpin(self.path)
        host = netlink.Netlink()
        try:
            for number, name in host.links().items():
                if name == self.link:
                    with contextlib.suppress(OSError):  # it went with the namespace
                        host.send([netlink.link_gone(number)])
        finally:
            host.close()
        if shutil.which("nft"):
            nft.remove(self.table)


def _bound(where: str, port: int, kind: socket.SocketKind) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    try:
        sock = socket.socket(family, kind)
    except OSError as e:
        log.info("sandboxes have no IPv6: %s", e)
        return None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((where, port))
        if kind == socket.SOCK_STREAM:
            sock.listen(1024)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        if family == socket.AF_INET:
            raise
        log.info("sandboxes have no IPv6: %s", e)
        return None
    return sock


def missing() -> str:
    """Empty, or what this host lacks for sandboxes with a network."""
    if not shutil.which("nft"):
        return "sandboxes with a network need nft: install nftables"
    return ""


def forwarding() -> str:
    """Empty, or why what sandboxes send leaves this host by the proxy alone, which needs no forwarding."""
    if netns.read_sysctl("net/ipv4/ip_forward") != "1":
        return "net.ipv4.ip_forward is 0: `dsec doctor --fix` sets it"
    return ""
