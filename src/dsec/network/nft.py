"""The two nftables tables of one server: the router's, and one in the host's namespace. Text for `nft -f`."""

from __future__ import annotations

import subprocess
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface
from typing import Final

from dsec.core.errors import Unsupported

MARK_PROXY: Final = 0xD5EC0001
MARK_REFUSED: Final = 0xD5EC0002
"""Set by the eBPF program (agent/bpf/policy.bpf.c)."""
UPLINK: Final = "up"
"""The router's end of the way out."""


def router_table(
    *, gateway4: IPv4Address, gateway6: IPv6Address, proxy_port: int, flows: int, drop: bool
) -> str:
    """flows: open at once, of one sandbox and IP version.

    The proxy is reached by dnat: a redirect needs an address on the link that a packet came by, and the links
    of sandboxes have none.
    """
    over4 = f"add @flows4 {{ ip saddr ct count over {flows} }}"
    over6 = f"add @flows6 {{ ip6 saddr ct count over {flows} }}"
    no = "drop" if drop else "reject with icmpx admin-prohibited"
    return f"""
add table inet dsec
delete table inet dsec
table inet dsec {{
  set flows4 {{ type ipv4_addr; flags dynamic; size 65535; }}
  set flows6 {{ type ipv6_addr; flags dynamic; size 65535; }}
  chain refuse {{
    type filter hook prerouting priority raw; policy accept;
    meta mark {MARK_REFUSED:#x} meta l4proto tcp reject with tcp reset
    meta mark {MARK_REFUSED:#x} reject with icmpx admin-prohibited
    iifname "s*" udp dport 53 fib daddr type local notrack
  }}
  chain answers {{
    type filter hook output priority raw; policy accept;
    oifname "s*" udp sport 53 notrack
  }}
  chain proxied {{
    type nat hook prerouting priority dstnat; policy accept;
    meta mark {MARK_PROXY:#x} meta l4proto tcp dnat ip to {gateway4}:{proxy_port}
    meta mark {MARK_PROXY:#x} meta l4proto tcp dnat ip6 to [{gateway6}]:{proxy_port}
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    iif lo accept
    iifname "{UPLINK}" icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
    iifname "s*" ct status dnat ct state new {over4} reject with tcp reset
    iifname "s*" ct status dnat ct state new {over6} reject with tcp reset
    iifname "s*" ct status dnat tcp dport {proxy_port} accept
    iifname "s*" udp dport 53 accept
    iifname "s*" tcp dport 53 ct state new {over4} reject with tcp reset
    iifname "s*" tcp dport 53 ct state new {over6} reject with tcp reset
    iifname "s*" tcp dport 53 accept
    ct state established,related accept
    {no}
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    ct state invalid drop
    ct state established,related accept
    iifname "s*" oifname "{UPLINK}" {over4} {no}
    iifname "s*" oifname "{UPLINK}" {over6} {no}
    iifname "s*" oifname {{ "{UPLINK}", "s*" }} accept
    {no}
  }}
  chain nat {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{UPLINK}" masquerade
  }}
}}
"""


def host_table(name: str, link: str, link4: IPv4Interface, link6: IPv6Interface) -> str:
    """Out of the host by whatever way its routes say; in only what answers."""
    return f"""
add table inet {name}
delete table inet {name}
table inet {name} {{
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname "{link}" accept
    oifname "{link}" ct state established,related accept
    oifname "{link}" drop
  }}
  chain nat {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {link4.network} oifname != "{link}" masquerade
    ip6 saddr {link6.network} oifname != "{link}" masquerade
  }}
}}
"""


def load(text: str) -> None:
    """Replace a table, all at once, in this thread's network namespace. Raises Unsupported."""
    _nft("-f", "-", text=text)


def remove(name: str) -> None:
    """Idempotent."""
    _nft("-f", "-", text=f"add table inet {name}\ndelete table inet {name}\n")


def _nft(*argv: str, text: str) -> None:
    # A child of this thread: it is born in this thread's namespace.
    try:
        done = subprocess.run(
            ("nft", *argv), input=text, capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        raise Unsupported("sandboxes with a network need nft: install nftables") from None
    if done.returncode:
        raise Unsupported(f"nft refused the network's rules: {done.stderr.strip()[:500]}")
