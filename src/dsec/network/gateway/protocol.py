"""What server and gateway say to each other, over a SOCK_SEQPACKET Unix socket below DATA/run. msgpack, one
message a packet; the first carries descriptors."""

from __future__ import annotations

import msgspec

from dsec.core.network import NameAllow, Policy

VERSION = 1
MAX_MESSAGE = 1 << 20


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Settings(Message, frozen=True):
    """First on each connection. With it, when `listeners` is not 0: the map of pins, then sockets: UDP for
    DNS, TCP for DNS, TCP for the proxy, of each as many as `listeners`."""

    version: int
    gateway4: str
    gateway6: str
    upstreams: list[str]
    """`address` or `address#port` of resolvers; empty: those of the host's resolv.conf."""
    listeners: int = 0
    connections: int = 256
    """Through the proxy at once, of one sandbox."""
    queries_per_second: float = 50.0
    new_names_per_minute: int = 120
    """Different names below wildcards: so much at most a sandbox could say by asking."""


class Welcome(Message, frozen=True):
    """The gateway's answer. `indexes`: sandboxes that it knows of."""

    version: int
    pid: int
    indexes: list[int]
    has_listeners: bool
    proxy_port: int


class SetPolicy(Message, frozen=True):
    """Replaces what was known of a sandbox. Answered by Done: it is in force."""

    sequence: int
    index: int
    address4: str
    address6: str
    names: tuple[NameAllow, ...]
    drop: bool


class Remove(Message, frozen=True):
    """The sandbox is gone: its connections end, its pins are taken away."""

    index: int


class End(Message, frozen=True):
    """Nobody needs the gateway any more."""


class Done(Message, frozen=True):
    sequence: int


class Refused(Message, frozen=True):
    """Something that a sandbox was not let. `what`: dns, http or tls."""

    index: int
    what: str
    name: str
    reason: str
    """not_allowed, rebinding, rate, new_names, label, no_name, host_mismatch, encrypted_hello, ..."""
    address: str = ""
    port: int = 0
    left_out: int = 0


ToGateway = Settings | SetPolicy | Remove | End
FromGateway = Welcome | Done | Refused
encode = msgspec.msgpack.Encoder().encode
to_gateway = msgspec.msgpack.Decoder(ToGateway).decode
from_gateway = msgspec.msgpack.Decoder(FromGateway).decode


def policy_of(message: SetPolicy) -> Policy:
    return Policy(names=message.names, drop=message.drop)
