"""Hosts made of network namespaces: traffic goes between them and nowhere else."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_interface
from typing import Any, TypeVar

import dns.message
import dns.rcode
import dns.rrset

from dsec.linux import netlink, netns
from dsec.linux.syscalls import CLONE_NEWNET, setns

T = TypeVar("T")
_numbers = itertools.count(1)


class Host:
    """One namespace. `run` calls a body, or runs a program, in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = netns.NamespaceThread.in_new(name)
        self.netlink = self.thread.run(netlink.Netlink)
        self.netlink.send([netlink.link_up(1)])

    @classmethod
    def of(cls, fd: int, name: str) -> Host:
        """A namespace that is there already."""
        made = cls.__new__(cls)
        made.name = name
        made.thread = netns.NamespaceThread(name, lambda: setns(fd, CLONE_NEWNET))
        made.netlink = made.thread.run(netlink.Netlink)
        return made

    def run(self, body: Callable[[], T]) -> T:
        return self.thread.run(body)

    def sh(self, script: str) -> str:
        done = self.run(
            lambda: subprocess.run(["/bin/sh", "-ec", script], capture_output=True, text=True, check=False)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def link(self, other: Host, *addresses: tuple[str, str]) -> None:
        """A veth to another host; of each address pair the first is ours."""
        number = next(_numbers)
        mine, theirs = 100 + number, 100 + number
        self.netlink.send(
            [
                netlink.veth(
                    index=mine,
                    name=f"v{number}",
                    mac=b"\x02\xaa\0\0\0" + bytes([number & 255]),
                    peer_index=theirs,
                    peer_name=f"v{number}",
                    peer_mac=b"\x02\xbb\0\0\0" + bytes([number & 255]),
                    peer_netns=other.thread.fd,
                )
            ]
        )
        other.netlink.send([netlink.link_up(theirs)])
        for near, far in addresses:
            for end, index, text in ((self, mine, near), (other, theirs, far)):
                interface = ip_interface(text)
                end.netlink.send([netlink.address(index, interface.ip, interface.network.prefixlen)])

    def default(self, via: str) -> None:
        from ipaddress import ip_address

        self.sh(f"ip {'-6' if ':' in via else ''} route add default via {ip_address(via)}")

    def forward(self) -> None:
        self.run(lambda: netns.write_sysctl("net/ipv4/ip_forward", "1"))
        self.run(lambda: netns.write_sysctl("net/ipv6/conf/all/forwarding", "1"))

    def tcp(self, address: str, port: int, timeout: float = 5.0) -> socket.socket:
        """A connection from here."""
        return self.run(lambda: socket.create_connection((address, port), timeout))

    def udp(self, address: str, port: int, data: bytes, timeout: float = 2.0) -> bytes:
        """Send one datagram, and what comes back."""

        def ask() -> bytes:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.settimeout(timeout)
                sock.connect((address, port))
                sock.send(data)
                return sock.recv(65536)

        return self.run(ask)

    def ping(self, address: str, timeout: float = 2.0) -> bool:
        """One echo request; whether it was answered."""

        def ask() -> bool:
            family, protocol, kind = (
                (socket.AF_INET6, socket.IPPROTO_ICMPV6, 128)
                if ":" in address
                else (socket.AF_INET, socket.IPPROTO_ICMP, 8)
            )
            with socket.socket(family, socket.SOCK_DGRAM, protocol) as sock:
                sock.settimeout(timeout)
                try:
                    sock.connect((address, 0))
                    sock.send(bytes([kind, 0, 0, 0, 0, 0, 0, 1]) + b"ping")
                    return sock.recv(100)[-4:] == b"ping"
                except OSError:
                    return False

        return self.run(ask)

    def listen(self, address: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        def make() -> socket.socket:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sock = socket.socket(family, kind)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address, port))
            if kind == socket.SOCK_STREAM:
                sock.listen(64)
            return sock

        return self.run(make)

    def close(self) -> None:
        self.netlink.close()
        self.thread.close()


class Servers:
    """Threads that serve sockets of any host, until `close`."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._accepted: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closing = False

    def _thread(self, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self._threads.append(thread)

    def tcp(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """`serve` has each connection on a thread of its own."""
        self._sockets.append(listener)

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                self._accepted.append(sock)

                def one(sock: socket.socket = sock) -> None:
                    with contextlib.suppress(OSError), sock:
                        serve(sock)

                self._thread(one)

        self._thread(accept)

    def udp(self, sock: socket.socket, answer: Callable[[bytes], bytes | None]) -> None:
        self._sockets.append(sock)

        def serve() -> None:
            while True:
                try:
                    data, peer = sock.recvfrom(65536)
                    if self._closing:
                        return
                    if (said := answer(data)) is not None:
                        sock.sendto(said, peer)
                except OSError:
                    if self._closing:
                        return

        self._thread(serve)

    def hang_up(self) -> None:
        """On all connections: the other end of one that was cut does not tell."""
        for sock in self._accepted:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._accepted.clear()

    def close(self) -> None:
        self._closing = True
        self.hang_up()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)


def echo(sock: socket.socket) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


class Zone:
    """A DNS server's records: name → {"A": [...], "AAAA": [...], "CNAME": name}. Counts what it was asked."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.ttl = 60

    def answer(self, wire: bytes) -> bytes:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = question.rdtype.name
        self.asked.append((name, kind))
        response = dns.message.make_response(query)
        owner = question.name
        records = self.records.get(name)
        while records is not None and "CNAME" in records:
            target = records["CNAME"]
            response.answer.append(dns.rrset.from_text(owner, self.ttl, "IN", "CNAME", f"{target}."))
            owner, records = dns.name.from_text(target), self.records.get(target)
        if records is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif records.get(kind):
            response.answer.append(dns.rrset.from_text(owner, self.ttl, "IN", kind, *records[kind]))
        return response.to_wire()


class World:
    """A host on which a server runs, and the Internet behind it.

    host 198.51.100.1, 2001:db8:1::1 ── internet 198.51.100.2, 2001:db8:1::2, and more on its lo.
    """

    def __init__(self) -> None:
        self.servers = Servers()
        self.host = Host("host")
        self.internet = Host("internet")
        self.host.link(
            self.internet, ("198.51.100.1/24", "198.51.100.2/24"), ("2001:db8:1::1/64", "2001:db8:1::2/64")
        )
        self.host.forward()
        self.host.default("198.51.100.2")
        self.host.default("2001:db8:1::2")
        for address in ("203.0.113.10/32", "203.0.113.20/32", "10.77.0.1/32", "169.254.169.254/32"):
            self.internet.sh(f"ip address add {address} dev lo")
        for address in ("2001:db8:2::10/128", "fd00:77::1/128"):
            self.internet.sh(f"ip -6 address add {address} dev lo nodad")
        self.zone = Zone()
        for family_any in ("0.0.0.0", "::"):
            self.servers.udp(self.internet.listen(family_any, 53, socket.SOCK_DGRAM), self.zone.answer)
            for port in (22, 8000, 8001):
                self.servers.tcp(self.internet.listen(family_any, port), echo)

        for address in ("203.0.113.10", "203.0.113.20", "2001:db8:2::10"):
            self.servers.udp(self.internet.listen(address, 9000, socket.SOCK_DGRAM), lambda d: d)

    def close(self) -> None:
        self.servers.close()
        self.internet.close()
        self.host.close()


@contextlib.contextmanager
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.close()


def of_this_process(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"
