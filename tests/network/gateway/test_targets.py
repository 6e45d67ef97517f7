"""Addresses that a name may not lead to."""

from __future__ import annotations

import pytest

from dsec.network.gateway.targets import is_own, may_be_reached

NEVER = ["127.0.0.1", "0.0.0.0", "169.254.169.254", "224.0.0.1", "255.255.255.255", "100.100.100.200"]
NEVER6 = [
    "::1",
    "::",
    "::ffff:8.8.8.8",
    "::7f00:1",
    "64:ff9b::a00:1",
    "2002:a00:1::1",
    "fe80::1%lo",
    "ff02::1",
]
PRIVATE = ["10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "198.18.0.1", "fd00::1"]


@pytest.mark.parametrize("address", [*NEVER, *NEVER6, "168.63.129.16", "fd00:ec2::254", "ff02::1"])
def test_never(address: str) -> None:
    assert not may_be_reached(address, private=False)
    assert not may_be_reached(address, private=True)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_only_where_the_operator_says_so(address: str) -> None:
    assert not may_be_reached(address, private=False)
    assert may_be_reached(address, private=True)


@pytest.mark.parametrize("address", ["203.0.113.10", "2001:db8:2::10", "1.1.1.1"])
def test_public(address: str) -> None:
    assert may_be_reached(address, private=False)


def test_the_hosts_own() -> None:
    assert is_own("127.0.0.1") and is_own("127.9.9.9")
    assert not is_own("203.0.113.99")
