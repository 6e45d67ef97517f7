"""What the gateway knows of each sandbox, and what it tells the server."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import Final, Protocol

import msgspec

from dsec.core.network import MAX_NAME_SPANS, NameAllow, Policy, Span
from dsec.network.gateway.protocol import Refused, SetPolicy, policy_of

MAX_PINNED: Final = 1024
"""Addresses of one sandbox; the oldest goes first."""
GRACE_S: Final = 5.0
"""A pin outlives its answer: who connects at the last moment is on the way still."""
EVENTS_BURST: Final = 50.0
EVENTS_A_SECOND: Final = 20.0


class Pinner(Protocol):
    """Allows an address in the kernel, for some seconds from now."""

    def pin(self, index: int, address: str, expires_s: float, spans: Iterable[Span]) -> None: ...
    def unpin(self, index: int, address: str) -> None: ...


class Connection(Protocol):
    """One that goes through the proxy."""

    name: str
    port: int

    def cut(self) -> None: ...


class Bucket:
    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst, self._left, self._at = rate, burst, burst, time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Sandbox:
    """By the source of its packets, which the kernel's filter has checked."""

    def __init__(self, message: SetPolicy, queries: float, names: int) -> None:
        self.index = message.index
        self.addresses = (message.address4, message.address6)
        self.policy: Policy = policy_of(message)
        self.connections: set[Connection] = set()
        self.pinned: OrderedDict[str, dict[NameAllow, float]] = OrderedDict()
        """By address: the names' entries that lead to it, and until when (monotonic)."""
        self.asking = 0
        """Of its queries, under way."""
        self.streams = 0
        """TCP connections to the resolver."""
        self.queries = Bucket(queries, 2 * queries)
        self._new_names = names
        self._names: set[str] = set()
        self._names_since = time.monotonic()
        self._events = Bucket(EVENTS_A_SECOND, EVENTS_BURST)
        self._left_out = 0

    def new_name(self, name: str) -> bool:
        """Whether one more name below a wildcard may be asked for in this minute."""
        now = time.monotonic()
        if now - self._names_since > 60:
            self._names.clear()
            self._names_since = now
        self._names.add(name)
        return len(self._names) <= self._new_names

    def event(self, event: Refused) -> Refused | None:
        """The event, unless there were too many of them just now."""
        if not self._events.take():
            self._left_out += 1
            return None
        event = msgspec.structs.replace(event, left_out=self._left_out)
        self._left_out = 0
        return event


class Table:
    """All sandboxes of the node."""

    def __init__(self, pinner: Pinner, tell: Callable[[Refused], None]) -> None:
        self._pinner = pinner
        self._tell = tell
        self._by_index: dict[int, Sandbox] = {}
        self._by_address: dict[str, Sandbox] = {}
        self.queries_per_second = 50.0
        self.new_names = 120

    @property
    def indexes(self) -> list[int]:
        return list(self._by_index)

    def at(self, address: str) -> Sandbox | None:
        found = ip_address(address.partition("%")[0])
        if found.version == 6 and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return self._by_address.get(str(found))

    def set(self, message: SetPolicy) -> None:
        """In force when this returns, for what is open as well."""
        known = self._by_index.get(message.index)
        if known is None:
            made = Sandbox(message, self.queries_per_second, self.new_names)
            self._by_index[message.index] = made
            for address in made.addresses:
                self._by_address[address] = made
            return
        known.policy = policy_of(message)
        for address, entries in list(known.pinned.items()):
            gone = [allow for allow in entries if allow not in known.policy.names]
            for allow in gone:
                del entries[allow]
            if not entries:
                self._unpin(known, address)
            elif gone:
                self._tell_kernel(known, address, entries)
        for connection in list(known.connections):
            if allowed(known.policy, connection.name, connection.port) is None:
                connection.cut()

    def remove(self, index: int) -> None:
        known = self._by_index.pop(index, None)
        if known is None:
            return
        for address in known.addresses:
            self._by_address.pop(address, None)
        for connection in list(known.connections):
            connection.cut()
        for address in list(known.pinned):
            self._unpin(known, address)

    def pin(self, sandbox: Sandbox, address: str, allow: NameAllow, seconds: float) -> None:
        if sandbox.index not in self._by_index:
            return  # it went while its query was under way
        if allow not in sandbox.policy.names:
            return  # its rule did
        now = time.monotonic()
        entries = sandbox.pinned.setdefault(address, {})
        for past in [a for a, until in entries.items() if until <= now]:
            del entries[past]
        entries[allow] = now + seconds + GRACE_S
        sandbox.pinned.move_to_end(address)
        self._tell_kernel(sandbox, address, entries)
        if len(sandbox.pinned) > MAX_PINNED:
            self._unpin(sandbox, next(iter(sandbox.pinned)))

    def _tell_kernel(self, sandbox: Sandbox, address: str, entries: dict[NameAllow, float]) -> None:
        """What all names allow there together; of more than fit, the newest."""
        spans = dict.fromkeys(s for allow in reversed(entries) for s in allow.spans)
        seconds = max(entries.values()) - time.monotonic()
        self._pinner.pin(sandbox.index, address, max(seconds, 0.0), list(spans)[:MAX_NAME_SPANS])

    def _unpin(self, sandbox: Sandbox, address: str) -> None:
        del sandbox.pinned[address]
        self._pinner.unpin(sandbox.index, address)

    def refused(
        self, sandbox: Sandbox, what: str, name: str, reason: str, address: str = "", port: int = 0
    ) -> None:
        event = sandbox.event(Refused(sandbox.index, what, name[:253], reason, address, port))
        if event is not None:
            self._tell(event)


def allowed(policy: Policy, name: str, port: int) -> NameAllow | None:
    """The entry by which a name may be reached at a TCP port."""
    allow = policy.allows_name(name)
    if allow is None or not any(s.protocol in (0, 6) and s.low <= port <= s.high for s in allow.spans):
        return None
    return allow
