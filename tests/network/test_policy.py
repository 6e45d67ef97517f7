"""What sandboxes reach, with real packets between namespaces: the kernel's part of the policy."""

from __future__ import annotations

import errno
import socket
import struct
import time

import pytest
from tests.network.conftest import Net
from tests.network.hosts import Host

pytestmark = pytest.mark.kernel
AT_ONCE_S = 1.0
"""What is refused is refused within this; what is dropped is not."""


def ask(host: Host, address: str, port: int) -> bytes:
    """One line to an echo server and back."""
    with host.tcp(address, port) as sock:
        sock.sendall(b"hello\n")
        return sock.recv(100)


def refused(host: Host, address: str, port: int) -> bool:
    began = time.monotonic()
    with pytest.raises(OSError, match=r".") as e:
        ask(host, address, port)
    assert time.monotonic() - began < AT_ONCE_S, e
    return e.value.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EACCES, errno.ECONNRESET)


@pytest.mark.parametrize(
    ("address", "other"), [("203.0.113.10", "203.0.113.20"), ("2001:db8:2::10", "2001:db8:1::2")]
)
def test_an_address_a_port_and_nothing_else(net: Net, address: str, other: str) -> None:
    index, box = net.sandbox({"allow": [{"cidr": address, "ports": [8000]}]})
    assert ask(box, address, 8000) == b"hello\n"
    assert refused(box, address, 8001)
    assert refused(box, other, 8000)
    told = [(e.address, e.port, e.protocol, e.reason) for e in net.events() if e.index == index]
    assert (address, 8001, "tcp", "not_allowed") in told and (other, 8000, "tcp", "not_allowed") in told


@pytest.mark.parametrize("address", ["203.0.113.10", "2001:db8:2::10"])
def test_udp(net: Net, address: str) -> None:
    _, box = net.sandbox({"allow": [{"cidr": address, "ports": ["8999-9001"], "protocol": "udp"}]})
    assert box.udp(address, 9000, b"ping") == b"ping"
    began = time.monotonic()
    with pytest.raises(OSError, match=r".") as e:
        box.udp(address, 9005, b"ping")
    assert e.value.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EACCES)
    assert time.monotonic() - began < AT_ONCE_S


@pytest.mark.parametrize("address", ["203.0.113.10", "2001:db8:2::10"])
def test_ping(net: Net, address: str) -> None:
    index, box = net.sandbox({"allow": [{"cidr": address, "protocol": "icmp"}]})
    assert box.ping(address)
    net.rules(index, {})
    assert not box.ping(address, timeout=0.5)


def test_nothing_is_allowed_before_rules_are(net: Net) -> None:
    pair = net.world.host.run(net.network.take)
    box = Host.of(pair.net, "bare")
    try:
        with pytest.raises(OSError, match=r"."):
            ask(box, "203.0.113.10", 8000)
    finally:
        box.close()
        pair.close()
        net.network.release(pair.index)


def test_a_change_of_rules_cuts_what_is_open_both_ways(net: Net) -> None:
    index, box = net.sandbox({"allow": [{"cidr": "203.0.113.10"}]})
    other, second = net.sandbox({"allow": [{"cidr": "203.0.113.10"}]})
    with box.tcp("203.0.113.10", 8000) as sock, second.tcp("203.0.113.10", 8000) as kept:
        sock.sendall(b"one")
        assert sock.recv(10) == b"one"
        net.rules(index, {"allow": [{"cidr": "203.0.113.20"}]})
        sock.settimeout(5)
        with pytest.raises(ConnectionResetError):
            sock.sendall(b"two")
            while sock.recv(10):
                pass
        kept.sendall(b"kept")
        assert kept.recv(10) == b"kept"
    assert ask(box, "203.0.113.20", 8000) == b"hello\n"
    assert other != index


def test_everything_does_not_mean_what_is_private(net: Net) -> None:
    _, box = net.sandbox({"allow": [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}]})
    assert ask(box, "203.0.113.10", 8000) == b"hello\n"
    assert ask(box, "2001:db8:2::10", 8000) == b"hello\n"
    for address in ("10.77.0.1", "169.254.169.254", "fd00:77::1"):
        assert refused(box, address, 8000)
    _, named = net.sandbox(
        {"allow": [{"cidr": "0.0.0.0/0"}, {"cidr": "10.77.0.0/16"}, {"cidr": "fd00:77::/64"}]}
    )
    assert ask(named, "10.77.0.1", 8000) == b"hello\n"
    assert ask(named, "fd00:77::1", 8000) == b"hello\n"
    assert refused(named, "169.254.169.254", 8000)


def test_the_node_and_its_services(net: Net) -> None:
    """The host's addresses, the router's, the gateway's other ports."""
    host = net.world.host
    net.world.servers.tcp(host.listen("0.0.0.0", 7070), lambda s: s.sendall(b"server"))
    _, box = net.sandbox({"allow": [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}]})
    link = str(net.network.router._host_side[0].ip)
    gateway = str(net.addresses.gateway4)
    for address in ("198.51.100.1", link, gateway, "127.0.0.1"):
        assert refused(box, address, 7070), address
    assert refused(box, gateway, 3129)
    _, named = net.sandbox({"allow": [{"cidr": "198.51.100.1", "ports": [7070]}]})
    with named.tcp("198.51.100.1", 7070) as sock:
        assert sock.recv(10) == b"server"


def test_sandboxes_meet_in_their_group_alone(net: Net) -> None:
    everything = {"allow": [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}, {"cidr": str(net.addresses.pool4)}]}
    one, a = net.sandbox(everything, group=5)
    two, b = net.sandbox({}, group=5)
    three, c = net.sandbox(everything, group=6)
    for address in (str(net.addresses.address4(two)), str(net.addresses.address6(two))):
        net.world.servers.tcp(b.listen(address, 5000), lambda s: s.sendall(b"in"))
        with a.tcp(address, 5000) as sock:
            assert sock.recv(10) == b"in"
        assert refused(c, address, 5000)
    assert any(e.reason == "neighbour" and e.index == three for e in net.events())
    assert one != three


def raw(host: Host, frame: bytes) -> None:
    """Past the sandbox's own IP layer: a frame as root inside can send it."""

    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
            sock.bind(("eth0", 0))
            sock.send(frame)

    host.run(send)


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(net: Net, index: int, **fields: object) -> bytes:
    """A UDP datagram in an IPv4 packet in a frame, any of it forged."""
    from dsec.network.addresses import ROUTER_MAC, mac

    f = {
        "mac": mac(index), "source": net.addresses.address4(index).packed, "target": bytes([203, 0, 113, 10]),
        "fragment": 0, "options": b"", "port": 9000, "type": 0x0800, "protocol": 17,
    } | fields  # fmt: skip
    udp = struct.pack("!HHHH", 4444, f["port"], 12, 0) + b"ping"
    options = bytes(f["options"])  # type: ignore[call-overload]
    head = struct.pack(
        "!BBHHHBBH4s4s",
        0x40 | (5 + len(options) // 4), 0, 20 + len(options) + len(udp), 1,
        f["fragment"], 64, f["protocol"], 0,
        f["source"], f["target"],
    ) + options  # fmt: skip
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return ROUTER_MAC + bytes(f["mac"]) + struct.pack("!H", f["type"]) + head + udp  # type: ignore[call-overload]


FORGED = {
    "source": ({"source": bytes([203, 0, 113, 99])}, "spoofed"),
    "hardware address": ({"mac": b"\x02\0\0\0\0\1"}, "spoofed"),
    "fragment": ({"fragment": 0x2000}, "fragment"),
    "later fragment": ({"fragment": 0x0010}, "fragment"),
    "source routing": ({"options": bytes([131, 7, 4, 10, 77, 0, 1, 0])}, "ip_options"),
}


@pytest.mark.parametrize("name", FORGED)
def test_raw_frames_do_not_pass_by_the_filter(net: Net, name: str) -> None:
    index, box = net.sandbox({"allow": [{"cidr": "203.0.113.10", "protocol": "any"}]})
    heard: list[bytes] = []
    net.world.servers.udp(net.world.internet.listen("203.0.113.10", 9100, socket.SOCK_DGRAM), heard.append)
    raw(box, frame(net, index, port=9100))
    assert box.udp("203.0.113.10", 9000, b"first") == b"first"  # in order behind the frame
    assert heard == [b"ping"], "an honest frame arrives"
    fields, reason = FORGED[name]
    raw(box, frame(net, index, port=9100, **fields))
    assert box.udp("203.0.113.10", 9000, b"second") == b"second"
    assert heard == [b"ping"]
    assert reason in [e.reason for e in net.events() if e.index == index]


@pytest.mark.parametrize("kind", [0x0806, 0x8847, 0x88CC, 0x8100, 0x0003])
def test_what_is_no_ip_is_dropped(net: Net, kind: int) -> None:
    index, box = net.sandbox({"allow": [{"cidr": "0.0.0.0/0"}]})
    before = net.network.counters(index)
    raw(box, frame(net, index, type=kind))
    after = net.network.counters(index)
    assert after.denied == before.denied + 1 and after.out_packets == before.out_packets


def test_truncated_and_random_frames(net: Net) -> None:
    import random

    index, box = net.sandbox({"allow": [{"cidr": "203.0.113.10"}]})
    whole = frame(net, index)
    dice = random.Random(7)
    for n in range(14, len(whole)):
        raw(box, whole[:n])
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 6)):
            data[dice.randrange(12, len(data))] = dice.randrange(256)
        raw(box, bytes(data))
    assert ask(box, "203.0.113.10", 8000) == b"hello\n"


def test_events_are_bounded_and_counted(net: Net) -> None:
    index, box = net.sandbox({})
    for _ in range(300):
        with pytest.raises(OSError, match=r"."):
            box.udp("203.0.113.10", 9999, b"x", timeout=0.5)
    told = [e for e in net.events() if e.index == index]
    assert 20 <= len(told) < 250
    assert net.network.counters(index).denied >= 300


def test_dropped_where_the_operator_says_so(world: object, tmp_path: object, maker: object) -> None:
    net = Net(world, tmp_path, maker, drop=True)  # type: ignore[arg-type]
    net.open()
    try:
        _, box = net.sandbox({"allow": [{"cidr": "203.0.113.10", "ports": [8000]}]})
        assert ask(box, "203.0.113.10", 8000) == b"hello\n"
        with pytest.raises(TimeoutError):
            box.tcp("203.0.113.10", 8001, timeout=0.7)
    finally:
        net.close()


def test_many_pairs_come_and_go(net: Net) -> None:
    for _ in range(3):
        made = [net.sandbox({"allow": [{"cidr": "203.0.113.10"}]}) for _ in range(20)]
        assert ask(made[-1][1], "203.0.113.10", 8000) == b"hello\n"
        for index, _ in made:
            net.end(index)
    assert net.network._of == {} and len(net.network._policies) == 0
