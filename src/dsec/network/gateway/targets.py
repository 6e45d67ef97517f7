"""Which addresses a name may lead to. The gateway lives on the node, whose own services it must not reach."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address, ip_network
from typing import Final

from dsec.network.special import is_special

NEVER: Final = tuple(
    ip_network(n)
    for n in (
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "224.0.0.0/3",
        "::/96",  # unspecified, loopback, and IPv4 in disguise
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2001::/32",
        "2002::/16",
        "fe80::/10",
        "ff00::/8",
        # Metadata services of clouds that lie elsewhere than link-local.
        "100.100.100.200/32",
        "168.63.129.16/32",
        "192.0.0.192/32",
        "fd00:ec2::254/128",
        "fd20:ce::254/128",
    )
)
"""Not for an operator's mirror either."""


def may_be_reached(address: str, *, private: bool) -> bool:
    """private: the operator says that the name is one of the site's own. Raises ValueError."""
    found = ip_address(address)
    if found.version == 6 and (found.ipv4_mapped is not None or found.scope_id is not None):
        return False  # no server has a reason to answer so
    if any(found.version == n.version and found in n for n in NEVER):
        return False
    return private or not (is_special(address) or is_own(address))


def is_own(address: str) -> bool:
    """Whether this host has it: only then can a socket be bound to it. So it is never out of date."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError as e:
        return e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
