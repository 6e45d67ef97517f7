"""Networks that a rule must name itself: what is allowed for everything is not allowed for these."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Final

SPECIAL: Final = (
    # IANA's special-purpose registries of IPv4 and IPv6, without documentation's networks: nobody is there.
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",  # link-local, and the metadata services of clouds
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/3",  # multicast, reserved, broadcast
    "::/96",
    "64:ff9b::/96",  # NAT64: an IPv4 address in disguise
    "64:ff9b:1::/48",
    "100::/64",
    "2001::/23",  # Teredo among them
    "2002::/16",  # 6to4
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
)
_NETWORKS: Final = tuple(ip_network(n) for n in SPECIAL)


def is_special(address: str) -> bool:
    """Raises ValueError for what is no address. An IPv4 address in IPv6 clothes counts as itself."""
    found = ip_address(address)
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found.version == n.version and found in n for n in _NETWORKS)
