"""What a sandbox may reach: the rules of its owner, compiled to what the node enforces. Pure.

    {"pypi": True, "npm": False, "allow": [{"domain": "*.example.org"}, {"cidr": "10.1.0.0/16"}]}

None: loopback alone. {}: a network in which nothing is allowed yet. All that no rule names is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final, Literal

import msgspec

from dsec.core.errors import InvalidArgument

ALLOW: Final = "allow"
"""The key of `network_rules` that holds rules; the others are names of services."""
SERVICES: Final = ("pypi", "npm", "apt", "go", "cargo", "git")
"""Names that exist everywhere. Which hosts they mean, the operator says."""
MAX_RULES: Final = 512
MAX_PORTS: Final = 8
"""Of one rule."""
MAX_SPANS: Final = 16
"""Of one network, all rules that cover it together."""
MAX_NAME_SPANS: Final = 4
MAX_PREFIXES: Final = 1024
MAX_NAMES: Final = 256
SERVICE_NAME: Final = re.compile(r"^[a-z][a-z0-9_-]{0,31}\Z")
LABEL: Final = re.compile(r"^(?!-)[a-z0-9_-]{1,63}(?<!-)\Z")
TCP: Final = 6
UDP: Final = 17
ICMP: Final = 1
ANY: Final = 0
PROTOCOLS: Final = {"tcp": TCP, "udp": UDP, "icmp": ICMP, "any": ANY}
PROXIED_PORTS: Final = (80, 443)
"""Of TCP, for names: the node's proxy looks at Host or SNI there."""


class NetworkRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that is allowed: a domain or a network."""

    domain: str = ""
    """`example.org`, or `*.example.org`: any name below it, not itself."""
    cidr: str = ""
    """An IPv4 or IPv6 network, or a single address."""
    ports: list[int | str] = []
    """Numbers, or `8000-8100`. Empty: 80 and 443 of a domain, all of a network."""
    protocol: Literal["tcp", "udp", "icmp", "any"] | None = None
    """None: TCP of a domain; of a network TCP where ports are named, else any."""


NetworkRules = dict[str, bool | list[NetworkRule]]
"""Service → allowed or not; `allow` → rules."""


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a name like `pypi` means on one server."""

    domains: list[str] = []
    cidrs: list[str] = []
    ports: list[int | str] = []
    private: bool = False
    """Its names may resolve to private addresses: a mirror of the operator's."""
    env: dict[str, str] = {}
    """Set in sandboxes that allow it, below what their owner sets."""


class Span(msgspec.Struct, frozen=True, order=True):
    """Ports `low` to `high`, both included, of an IP protocol: 6, 17, 1 (both versions of ICMP), 0: any."""

    protocol: int
    low: int
    high: int
    proxied: bool = False
    """The connection goes through the node's proxy, which looks at Host or SNI."""
    prefix: int = 128
    """Length, as of IPv6, of the network whose rule gave it: a wide one opens no special network within."""


class AddressAllow(msgspec.Struct, frozen=True):
    """A network in text, IPv4 or IPv6, and all that is allowed in it: what wider ones allow is merged in."""

    network: str
    spans: tuple[Span, ...]


class NameAllow(msgspec.Struct, frozen=True):
    """A domain, exact or `*.example.org`."""

    pattern: str
    spans: tuple[Span, ...]
    private: bool
    """It may resolve to private addresses."""
    rule: str
    """Name of the service, or the rule's own text, for events."""


class Policy(msgspec.Struct, frozen=True):
    """All that one sandbox may reach."""

    addresses: tuple[AddressAllow, ...] = ()
    names: tuple[NameAllow, ...] = ()
    drop: bool = False
    """What is denied is dropped, not refused."""

    def allows_name(self, name: str) -> NameAllow | None:
        """The entry that covers a name in lower case, the most exact one first."""
        exact = wide = None
        for allow in self.names:
            if allow.pattern == name:
                exact = allow
            elif (
                allow.pattern.startswith("*.")
                and name.endswith(allow.pattern[1:])
                and (wide is None or len(allow.pattern) > len(wide.pattern))
            ):
                wide = allow
        return exact or wide


def check_rules(rules: NetworkRules | None) -> None:
    """What can be told without a server's configuration. Raises InvalidArgument that names the rule."""
    for name, value in (rules or {}).items():
        if name == ALLOW:
            if not isinstance(value, list):
                raise InvalidArgument("network_rules: `allow` is a list of rules")
            if len(value) > MAX_RULES:
                raise InvalidArgument(f"network_rules: at most {MAX_RULES} rules")
            for rule in value:
                _checked(rule)
        elif not SERVICE_NAME.match(name):
            raise InvalidArgument(f"network_rules: {name[:80]!r} is no name of a service")
        elif not isinstance(value, bool):
            raise InvalidArgument(f"network_rules: {name}: true or false")


def compile_rules(
    rules: NetworkRules, services: Mapping[str, Service] | None = None, *, drop: bool = False
) -> Policy:
    """What the node enforces. Raises InvalidArgument for a service that is unknown or has no hosts here."""
    check_rules(rules)
    networks: dict[IPv4Network | IPv6Network, list[Span]] = {}
    names: dict[str, NameAllow] = {}
    for rule, text, private in _all(rules, services or {}):
        pattern, network, spans = _checked(rule)
        if network is not None:
            networks.setdefault(network, []).extend(spans)
        else:
            before = names.get(pattern)
            joined = _united([*(before.spans if before else ()), *spans])
            if len(joined) > MAX_NAME_SPANS:
                raise InvalidArgument(f"network_rules: {pattern}: at most {MAX_NAME_SPANS} spans of ports")
            private = private or (before is not None and before.private)
            names[pattern] = NameAllow(pattern, joined, private, before.rule if before else text)
    if len(names) > MAX_NAMES:
        raise InvalidArgument(f"network_rules: {len(names)} domains; at most {MAX_NAMES}")
    return Policy(addresses=_merged(networks), names=tuple(names.values()), drop=drop)


def environment(rules: NetworkRules | None, services: Mapping[str, Service]) -> dict[str, str]:
    """What the allowed services set."""
    allowed = [services[n] for n, on in (rules or {}).items() if on is True and n in services]
    return {k: v for service in allowed for k, v in service.env.items()}


def text_of(rule: NetworkRule) -> str:
    """Such as `*.example.org:443/tcp`."""
    ports = ",".join(str(p) for p in rule.ports)
    where = rule.domain or rule.cidr
    return where + (f":{ports}" if ports else "") + (f"/{rule.protocol}" if rule.protocol else "")


def parse_rule(text: str) -> NetworkRule:
    """`example.org`, `*.example.org:443`, `10.0.0.0/8:5432/tcp`, `[2001:db8::/32]:53/udp`.

    Raises InvalidArgument.
    """
    body, protocol = text, None
    if (found := re.match(r"^(.*)/(tcp|udp|icmp|any)$", text)) is not None:
        body, protocol = found[1], found[2]
    where, ports = body, ""
    if (found := re.match(r"^\[([0-9a-fA-F:./]+)\](?::([0-9,-]+))?$", body)) is not None:
        where, ports = found[1], found[2] or ""
    elif body.count(":") == 1:
        where, _, ports = body.partition(":")
    listed = [int(p) if p.isdigit() else p for p in ports.split(",")] if ports else []
    kind = "cidr" if _is_network(where) else "domain"
    rule = msgspec.convert({kind: where, "ports": listed, "protocol": protocol}, NetworkRule)
    _checked(rule)
    return rule


def _is_network(text: str) -> bool:
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _all(rules: NetworkRules, services: Mapping[str, Service]) -> Iterable[tuple[NetworkRule, str, bool]]:
    """Each rule, what to call it, and whether its names may be private."""
    for name, value in rules.items():
        if isinstance(value, list):
            for rule in value:
                yield rule, text_of(rule), False
        elif value:
            service = _service(name, services)
            for domain in service.domains:
                yield NetworkRule(domain=domain, ports=service.ports), name, service.private
            for cidr in service.cidrs:
                yield NetworkRule(cidr=cidr, ports=service.ports), name, service.private


def _service(name: str, services: Mapping[str, Service]) -> Service:
    service = services.get(name)
    if service is None and name not in SERVICES:
        known = ", ".join(sorted({*SERVICES, *services}))
        raise InvalidArgument(f"network_rules: no service {name!r}; there are {known}")
    if service is None or not (service.domains or service.cidrs):
        key = f"[network.services.{name}]"
        raise InvalidArgument(
            f"network_rules: this server has no hosts for {name!r}: set domains or cidrs of {key} in its "
            "configuration"
        )
    return service


def _checked(rule: NetworkRule) -> tuple[str, IPv4Network | IPv6Network | None, tuple[Span, ...]]:
    """Pattern or network, and spans. Raises InvalidArgument."""
    text = text_of(rule)[:120]
    if bool(rule.domain) == bool(rule.cidr):
        raise InvalidArgument(f"network_rules: {text!r}: a rule has a domain or a cidr")
    if len(rule.ports) > MAX_PORTS:
        raise InvalidArgument(f"network_rules: {text!r}: at most {MAX_PORTS} ports or spans")
    if rule.cidr:
        network = _network(rule.cidr)
        prefix = network.prefixlen + (96 if network.version == 4 else 0)
        return "", network, _spans(rule, text, prefix, named=False)
    pattern = _pattern(rule.domain)
    if rule.protocol in ("icmp", "any"):
        raise InvalidArgument(f"network_rules: {text!r}: a domain is allowed for tcp or udp")
    return pattern, None, _spans(rule, text, 128, named=True)


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        network = ip_network(text)
    except ValueError as e:
        raise InvalidArgument(f"network_rules: {text[:80]!r} is no network: {e}") from None
    if network.version == 6 and network.network_address.ipv4_mapped is not None:
        raise InvalidArgument(f"network_rules: {text[:80]!r}: write an IPv4 network as one")
    return network


def _pattern(domain: str) -> str:
    """In lower case, in letters of DNS."""
    bare = domain.removeprefix("*.").rstrip(".")
    try:
        name = bare.encode("idna").decode() if not bare.isascii() else bare.lower()
    except UnicodeError as e:
        raise InvalidArgument(f"network_rules: domain {domain[:80]!r}: {e}") from None
    labels = name.lower().split(".")
    if len(name) > 253 or not all(LABEL.match(label) for label in labels):
        raise InvalidArgument(f"network_rules: {domain[:80]!r} is no domain; a wildcard is `*.` at the front")
    if len(labels) < 2 and domain.startswith("*."):
        raise InvalidArgument(f"network_rules: {domain[:80]!r} would allow a whole top-level domain")
    if labels[-1].isdigit():
        raise InvalidArgument(f"network_rules: {domain[:80]!r}: name an address by `cidr`")
    return ("*." if domain.startswith("*.") else "") + name.lower()


def _spans(rule: NetworkRule, text: str, prefix: int, *, named: bool) -> tuple[Span, ...]:
    ports: list[int | str] = list(rule.ports)
    if named and not ports:
        ports = list(PROXIED_PORTS) if rule.protocol != "udp" else [443]
    protocol = PROTOCOLS[rule.protocol or ("tcp" if ports else "any")]
    if not ports:
        return (Span(protocol, 0, 65535, False, prefix),)
    if protocol in (ICMP, ANY):
        raise InvalidArgument(f"network_rules: {text!r}: ports are of tcp or udp")
    made = []
    for port in ports:
        low, high = _ports(port, text)
        if named and protocol == TCP:
            made += _split(low, high, prefix)
        else:
            made.append(Span(protocol, low, high, False, prefix))
    return tuple(made)


def _split(low: int, high: int, prefix: int) -> list[Span]:
    """What the proxy sees, and the rest around it."""
    made, at = [], low
    for port in PROXIED_PORTS:
        if at <= port <= high:
            if at < port:
                made.append(Span(TCP, at, port - 1, False, prefix))
            made.append(Span(TCP, port, port, True, prefix))
            at = port + 1
    if at <= high:
        made.append(Span(TCP, at, high, False, prefix))
    return made


def _ports(port: int | str, text: str) -> tuple[int, int]:
    if isinstance(port, str):
        found = re.match(r"^(\d{1,5})(?:-(\d{1,5}))?\Z", port)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    else:
        low = high = port
    if not 1 <= low <= high <= 65535:
        raise InvalidArgument(f"network_rules: {text!r}: port {str(port)[:20]!r} is not in 1..65535")
    return low, high


def _merged(networks: dict[IPv4Network | IPv6Network, list[Span]]) -> tuple[AddressAllow, ...]:
    """The kernel sees the longest prefix alone, so each has what all that contain it allow."""
    if len(networks) > MAX_PREFIXES:
        raise InvalidArgument(f"network_rules: {len(networks)} networks; at most {MAX_PREFIXES}")
    made = []
    for network in networks:
        spans: list[Span] = []
        for length in range(network.prefixlen + 1):
            spans += networks.get(network.supernet(new_prefix=length), ())
        united = _united(spans)
        if len(united) > MAX_SPANS:
            raise InvalidArgument(
                f"network_rules: {network}: {len(united)} spans of ports; at most {MAX_SPANS}"
            )
        made.append(AddressAllow(str(network), united))
    return tuple(made)


def _united(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same with none that another covers."""
    made: list[Span] = []
    for span in sorted(set(spans), key=lambda s: (s.protocol, s.low, -s.high, -s.prefix)):
        if not any(_covers(other, span) for other in made):
            made.append(span)
    return tuple(made)


def _covers(a: Span, b: Span) -> bool:
    return (
        (a.protocol in (ANY, b.protocol))
        and a.low <= b.low
        and b.high <= a.high
        and a.prefix >= b.prefix
        and (a.proxied == b.proxied)
    )


def rules_from(value: Any) -> NetworkRules:
    """Of plain data, such as JSON gives. Raises InvalidArgument."""
    try:
        rules: NetworkRules = msgspec.convert(value, NetworkRules)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"network_rules: {e}") from None
    check_rules(rules)
    return rules
