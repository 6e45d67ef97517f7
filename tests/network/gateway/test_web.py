"""A sandbox, the kernel's filter, the gateway's own process and a web server, with real packets."""

from __future__ import annotations

import os
import signal
import socket

import dns.message
import pytest
from tests.network.conftest import Net
from tests.network.hosts import Host

pytestmark = pytest.mark.kernel
WEB = "203.0.113.10"
RULES = {"allow": [{"domain": "a.example.org"}]}


def serve(sock: socket.socket) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        if not (part := sock.recv(65536)):
            return
        head += part
    sock.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head)


@pytest.fixture
def web(net: Net) -> Net:
    net.world.servers.tcp(net.world.internet.listen(WEB, 80), serve)
    for name in ("a.example.org", "b.example.org"):
        net.world.zone.records[name] = {"A": [WEB]}
    return net


def resolve(net: Net, box: Host, name: str) -> list[str]:
    said = box.udp(str(net.addresses.gateway4), 53, dns.message.make_query(name, "A").to_wire())
    return [r.address for rrset in dns.message.from_wire(said).answer for r in rrset]


def get(box: Host, host: str) -> bytes:
    """By the address that the first name led to, whatever the host."""
    with box.tcp(WEB, 80) as sock:
        sock.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive\r\n\r\n".encode())
        said = b""
        while part := sock.recv(65536):
            said += part
        return said


def test_the_host_decides_not_the_address(web: Net) -> None:
    index, box = web.sandbox(RULES)
    assert resolve(web, box, "a.example.org") == [WEB]
    assert resolve(web, box, "b.example.org") == []
    said = get(box, "a.example.org")
    assert said.startswith(b"HTTP/1.1 200") and b"Connection: close" in said
    assert get(box, "b.example.org").startswith(b"HTTP/1.1 403")
    web.rules(index, {})
    assert resolve(web, box, "a.example.org") == []
    with pytest.raises(OSError, match=r"."):
        get(box, "a.example.org")


def test_a_gateway_that_is_killed_is_replaced(web: Net) -> None:
    _, box = web.sandbox(RULES)
    assert resolve(web, box, "a.example.org") == [WEB]
    gateway = web.network.gateway
    pid = gateway.pid
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    for _ in range(20):  # each waits for an answer up to its own deadline
        try:
            found = resolve(web, box, "a.example.org")
        except OSError:
            continue
        if found:
            break
    assert found == [WEB] and gateway.pid != pid
    assert get(box, "a.example.org").startswith(b"HTTP/1.1 200")
