"""rtnetlink: messages by hand, sent many at a time. One sandbox's links are a dozen messages.

A general library spends over a millisecond on them, which is what a creation may cost altogether.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Final

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18
RTM_NEWADDR: Final = 20
RTM_GETADDR: Final = 22
RTM_NEWROUTE: Final = 24
RTM_NEWNEIGH: Final = 28
NLM_F_REQUEST: Final = 1
NLM_F_ACK: Final = 4
NLM_F_DUMP: Final = 0x300
NLM_F_REPLACE: Final = 0x100
NLM_F_CREATE: Final = 0x400
NLM_F_EXCL: Final = 0x200
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
IFF_UP: Final = 1
IFLA_ADDRESS: Final = 1
IFLA_IFNAME: Final = 3
IFLA_MTU: Final = 4
IFLA_LINKINFO: Final = 18
IFLA_NET_NS_FD: Final = 28
IFLA_INFO_KIND: Final = 1
IFLA_INFO_DATA: Final = 2
VETH_INFO_PEER: Final = 1
IFA_ADDRESS: Final = 1
IFA_LOCAL: Final = 2
IFA_F_NODAD: Final = 2
RTA_DST: Final = 1
RTA_OIF: Final = 4
RTA_GATEWAY: Final = 5
RTNH_F_ONLINK: Final = 4
RT_TABLE_MAIN: Final = 254
RTPROT_STATIC: Final = 4
RT_SCOPE_LINK: Final = 253
RT_SCOPE_UNIVERSE: Final = 0
RTN_UNICAST: Final = 1
NUD_PERMANENT: Final = 0x80
NDA_DST: Final = 1
NDA_LLADDR: Final = 2
HEAD: Final = struct.Struct("=IHHII")
IFINFO: Final = struct.Struct("=BxHiII")
IFADDR: Final = struct.Struct("=BBBBi")
RTMSG: Final = struct.Struct("=BBBBBBBBI")
NDMSG: Final = struct.Struct("=BxxxiHBB")
ERROR: Final = struct.Struct("=i")
BUFFER: Final = 1 << 16

Address = IPv4Address | IPv6Address


def attribute(kind: int, data: bytes) -> bytes:
    size = 4 + len(data)
    return struct.pack("=HH", size, kind) + data + bytes(-size % 4)


def _family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def link_up(index: int) -> tuple[int, int, bytes]:
    return RTM_NEWLINK, 0, IFINFO.pack(0, 0, index, IFF_UP, IFF_UP)


def veth(
    *,
    index: int,
    name: str,
    mac: bytes,
    peer_index: int,
    peer_name: str,
    peer_mac: bytes,
    peer_netns: int,
    mtu: int = 1500,
) -> tuple[int, int, bytes]:
    """Both ends, the near one up, the far one in another namespace. Index 0: the kernel's choice."""
    size = attribute(IFLA_MTU, struct.pack("=I", mtu))
    peer = (
        IFINFO.pack(0, 0, peer_index, 0, 0)
        + attribute(IFLA_IFNAME, peer_name.encode() + b"\0")
        + attribute(IFLA_ADDRESS, peer_mac)
        + size
        + attribute(IFLA_NET_NS_FD, struct.pack("=I", peer_netns))
    )
    info = attribute(IFLA_INFO_KIND, b"veth\0") + attribute(IFLA_INFO_DATA, attribute(VETH_INFO_PEER, peer))
    body = (
        IFINFO.pack(0, 0, index, IFF_UP, IFF_UP)
        + attribute(IFLA_IFNAME, name.encode() + b"\0")
        + attribute(IFLA_ADDRESS, mac)
        + size
        + attribute(IFLA_LINKINFO, info)
    )
    return RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body


def link_gone(index: int) -> tuple[int, int, bytes]:
    return RTM_DELLINK, 0, IFINFO.pack(0, 0, index, 0, 0)


def address(index: int, of: Address, prefix: int) -> tuple[int, int, bytes]:
    """Usable at once: nobody is asked whether it is taken."""
    body = IFADDR.pack(_family(of), prefix, IFA_F_NODAD, 0, index)
    return (
        RTM_NEWADDR,
        NLM_F_CREATE | NLM_F_REPLACE,
        body + attribute(IFA_LOCAL, of.packed) + attribute(IFA_ADDRESS, of.packed),
    )


def route(
    index: int, to: Address | None, prefix: int = 0, via: Address | None = None
) -> tuple[int, int, bytes]:
    """To an address or network by an interface, or by a neighbour on it; `to` None: to everything."""
    near = to or via
    assert near is not None
    scope = RT_SCOPE_UNIVERSE if via or near.version == 6 else RT_SCOPE_LINK
    flags = RTNH_F_ONLINK if via else 0
    body = RTMSG.pack(_family(near), prefix, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST, flags)
    if to is not None:
        body += attribute(RTA_DST, to.packed)
    if via is not None:
        body += attribute(RTA_GATEWAY, via.packed)
    body += attribute(RTA_OIF, struct.pack("=I", index))
    return RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, body


def neighbour(index: int, of: Address, mac: bytes) -> tuple[int, int, bytes]:
    """For ever: neither side asks."""
    body = NDMSG.pack(_family(of), index, NUD_PERMANENT, 0, 0)
    return (
        RTM_NEWNEIGH,
        NLM_F_CREATE | NLM_F_REPLACE,
        body + attribute(NDA_DST, of.packed) + attribute(NDA_LLADDR, mac),
    )


class Netlink:
    """A socket of the network namespace in which this thread made it; usable from any thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._socket.bind((0, 0))
        self._sequence = 0
        self._lock = threading.Lock()

    def send(self, messages: Sequence[tuple[int, int, bytes]]) -> None:
        """All of them, in order. Raises OSError of the first that fails; later ones may be done too."""
        with self._lock:
            first = self._sequence + 1
            parts = []
            for kind, flags, body in messages:
                self._sequence += 1
                size = HEAD.size + len(body)
                all_flags = NLM_F_REQUEST | NLM_F_ACK | flags
                parts.append(HEAD.pack(size, kind, all_flags, self._sequence, 0) + body + bytes(-size % 4))
            self._socket.send(b"".join(parts))
            self._answers(first, self._sequence)

    def _answers(self, first: int, last: int) -> None:
        problem: OSError | None = None
        waiting = last - first + 1
        while waiting:
            for kind, sequence, body in _messages(self._socket.recv(BUFFER)):
                if kind != NLMSG_ERROR or not first <= sequence <= last:
                    continue
                waiting -= 1
                (error,) = ERROR.unpack_from(body)
                if error and problem is None:
                    problem = OSError(-error, f"rtnetlink message {sequence - first}: {os.strerror(-error)}")
        if problem:
            raise problem

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Bodies of all that there is."""
        with self._lock:
            self._sequence += 1
            size = HEAD.size + len(body)
            head = HEAD.pack(size, kind, NLM_F_REQUEST | NLM_F_DUMP, self._sequence, 0)
            self._socket.send(head + body + bytes(-size % 4))
            found: list[bytes] = []
            while True:
                for got, sequence, data in _messages(self._socket.recv(BUFFER)):
                    if sequence != self._sequence:
                        continue
                    if got == NLMSG_DONE:
                        return found
                    if got == NLMSG_ERROR:
                        (error,) = ERROR.unpack_from(data)
                        raise OSError(-error, f"rtnetlink dump: {os.strerror(-error)}")
                    found.append(data)

    def links(self) -> dict[int, str]:
        """Number → name."""
        found = {}
        for data in self.dump(RTM_GETLINK, IFINFO.pack(0, 0, 0, 0, 0)):
            _, _, index, _, _ = IFINFO.unpack_from(data)
            name = _attributes(data[IFINFO.size :]).get(IFLA_IFNAME, b"")
            found[index] = name.rstrip(b"\0").decode(errors="replace")
        return found

    def addresses(self) -> list[tuple[int, str]]:
        """Of each: number of its interface, text."""
        found = []
        for data in self.dump(RTM_GETADDR, IFADDR.pack(0, 0, 0, 0, 0)):
            family, _, _, _, index = IFADDR.unpack_from(data)
            known = _attributes(data[IFADDR.size :])
            raw = known.get(IFA_LOCAL, known.get(IFA_ADDRESS))
            if raw and family in (socket.AF_INET, socket.AF_INET6):
                found.append((index, socket.inet_ntop(family, raw)))
        return found

    def close(self) -> None:
        self._socket.close()


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    while len(data) >= HEAD.size:
        size, kind, _, sequence, _ = HEAD.unpack_from(data)
        yield kind, sequence, data[HEAD.size : size]
        data = data[size + -size % 4 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        found[kind & 0x3FFF] = data[4:size]
        data = data[size + -size % 4 :]
    return found
