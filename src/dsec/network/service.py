"""The network of one node's sandboxes, put together: router, pairs, the kernel's filter, the gateway.

Made at the first sandbox with a network (or at the start, where pairs are to be ready), so a node
without such sandboxes has none of it. Calls block: make them in a thread.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import DSecError, InvalidArgument, Unsupported
from dsec.core.network import Policy
from dsec.linux import bpf
from dsec.network import router as routers
from dsec.network.addresses import DEFAULT_POOL4, DEFAULT_POOL6, Addresses
from dsec.network.dataplane import Counters, Dataplane, Denied
from dsec.network.gateway.client import Gateway, Listeners
from dsec.network.gateway.protocol import VERSION, Refused, Settings
from dsec.network.pairs import Pair, Pairs
from dsec.network.router import Router

log = logging.getLogger(__name__)
READY: Final = 16
DNS: Final = 53


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator says of the sandboxes' network."""

    pool4: str = DEFAULT_POOL4
    pool6: str = DEFAULT_POOL6
    upstreams: list[str] = []
    """Resolvers, `address` or `address#port`; empty: those of the host's resolv.conf."""
    drop: bool = False
    """Drop what is denied instead of refusing it."""
    prepared: int = 0
    """Pairs of namespaces that are ready from the start. 0: made ready from the first use on."""
    flows: int = 4096
    """Open at once, of one sandbox."""
    proxied: int = 256
    """Connections to domains on ports 80 and 443, of one sandbox."""
    queries_per_second: float = 50.0
    new_names_per_minute: int = 120


class Seen(msgspec.Struct, frozen=True):
    """Something that a sandbox was not let do."""

    index: int
    what: str
    """flow, dns, http, tls or proxy."""
    reason: str
    address: str = ""
    port: int = 0
    protocol: str = ""
    name: str = ""
    inbound: bool = False
    left_out: int = 0


class NodeNetwork:
    """`take`, `assign`, `set_rules`, `release`; `open` is called by whoever comes first."""

    def __init__(
        self,
        run: Path,
        edge_id: str,
        config: NetworkConfig,
        *,
        make_pair: Callable[[], tuple[int, int]],
        seen: Callable[[Seen], None],
    ) -> None:
        """seen: called on the gateway's thread; what the kernel denied comes by `read_events`."""
        self._config = config
        self._run = run
        self._edge_id = edge_id
        self._make_pair = make_pair
        self._seen = seen
        self._lock = threading.RLock()
        self._opened = False
        self._policies: dict[Policy, int] = {}
        self._users: dict[int, int] = {}
        """Sandboxes that a policy's number stands for."""
        self._of: dict[int, tuple[int, int, Policy]] = {}
        """Of each index: number of its policy, group, policy."""
        self._next_policy = 1
        self.addresses = Addresses.of(config.pool4, config.pool6)
        self.router = Router(run, edge_id, self.addresses, flows=config.flows, drop=config.drop)
        self.opened: Callable[[], None] = lambda: None
        """Told, in the thread that opened it, that `events_fd` is there from now on."""

    # --- open and close ---

    @property
    def reason(self) -> str:
        """Empty, or why there can be none on this host."""
        return routers.missing() or bpf.available()

    @property
    def described(self) -> str:
        """For the fingerprint."""
        if why := self.reason:
            return f"no: {why}"
        if why := routers.forwarding():
            return f"domains on ports 80 and 443 alone: {why}"
        return "yes"

    @property
    def is_open(self) -> bool:
        return self._opened

    @property
    def left_by_another_life(self) -> bool:
        return self.router.path.exists()

    def open(self) -> None:
        """Idempotent. Raises Unsupported that says what is missing, Unavailable."""
        with self._lock:
            if self._opened:
                return
            if why := self.reason:
                raise Unsupported(why)
            try:
                self._open()
            except OSError as e:
                raise Unsupported(f"the sandboxes' network: {e}") from e
            self._opened = True
        self.opened()

    def _open(self) -> None:
        found = self.left_by_another_life
        self.router.open(proxy_port=PROXY_PORT)
        self.dataplane = Dataplane(self.addresses)
        try:
            self.dataplane.open()
            self.dataplane.set_node_addresses(self.router.node_addresses())
            self.pairs = Pairs(
                self.router,
                make=self._make_pair,
                prepare=self.dataplane.attach,
                ready=self._config.prepared or READY,
            )
            self.gateway = Gateway(
                self._run,
                Settings(
                    version=VERSION,
                    gateway4=str(self.addresses.gateway4),
                    gateway6=str(self.addresses.gateway6),
                    upstreams=self._config.upstreams,
                    connections=self._config.proxied,
                    queries_per_second=self._config.queries_per_second,
                    new_names_per_minute=self._config.new_names_per_minute,
                ),
                pins_fd=self.dataplane.pins_fd,
                listen=self._listeners,
                refused=self._refused,
            )
            self._known = self.gateway.open()
        except BaseException:
            self.dataplane.close()
            self.router.close(keep=found)
            raise

    def _listeners(self) -> Listeners:
        gateways = [str(self.addresses.gateway4), str(self.addresses.gateway6)]
        return Listeners(
            self.router.listen(DNS, socket.SOCK_DGRAM, gateways),
            self.router.listen(DNS, socket.SOCK_STREAM, gateways),
            self.router.listen(PROXY_PORT, socket.SOCK_STREAM, ["0.0.0.0", "::"]),
        )

    def close(self, *, keep: bool) -> None:
        """keep: sandboxes live on."""
        with self._lock:
            if self._opened:
                self._opened = False
                self.pairs.close()
                self.gateway.close(keep=keep)
                self.dataplane.close()
                self.router.close(keep=keep)
            elif not keep and self.left_by_another_life:
                self.router.remove()

    # --- sandboxes ---

    def take(self) -> Pair:
        """A pair in which nothing is allowed yet. Raises Unsupported, LaunchFailed, ResourceExhausted."""
        self.open()
        return self.pairs.take()

    def assign(self, index: int, policy: Policy, group: int) -> None:
        """Give a pair its rules. Raises InvalidArgument for rules that do not fit, Unavailable."""
        self._put(index, policy, group)

    def set_rules(self, index: int, policy: Policy) -> None:
        """In force when this returns, for flows that are open as well."""
        with self._lock:
            known = self._of.get(index)
        if known is None:
            raise InvalidArgument("the sandbox has no network")
        self._put(index, policy, known[1])

    def _put(self, index: int, policy: Policy, group: int) -> None:
        with self._lock:
            number = self._number(policy)
            before = self._of.get(index)
            self._of[index] = (number, group, policy)
            self.dataplane.assign(index, policy=number, group=group, drop=policy.drop)
            if before is not None:
                self._unuse(before[0], before[2])
        addresses = (str(self.addresses.address4(index)), str(self.addresses.address6(index)))
        self.gateway.set_policy(index, addresses, policy)

    def _number(self, policy: Policy) -> int:
        """Of a policy that is in the kernel; sandboxes with the same rules share one."""
        number = self._policies.get(policy)
        if number is None:
            number, self._next_policy = self._next_policy, self._next_policy + 1
            self.dataplane.set_policy(number, policy)
            self._policies[policy] = number
        self._users[number] = self._users.get(number, 0) + 1
        return number

    def _unuse(self, number: int, policy: Policy) -> None:
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self._policies[policy]
            self.dataplane.drop_policy(number)

    def release(self, index: int) -> None:
        """Its sandbox is gone. Idempotent."""
        with self._lock:
            if not self._opened:
                return
            known = self._of.pop(index, None)
            if known is not None:
                self.dataplane.unassign(index)
                self._unuse(known[0], known[2])
        self.gateway.remove(index)
        self.pairs.release(index)

    def recover(self, index: int, policy: Policy, group: int) -> None:
        """A sandbox of an earlier life: its link is there, and goes on under these rules."""
        self.open()
        self.pairs.hold(index)
        self._put(index, policy, group)
        number = self.addresses.number(index)
        self.router.run(lambda: self.dataplane.attach(number))

    def reclaim(self) -> list[str]:
        """What no sandbox of this life has, of what earlier ones left. Call it once all were recovered."""
        if not self._opened:
            if self.left_by_another_life:
                self.router.remove()
                return ["network"]
            return []
        claimed = frozenset(self._of)
        self.gateway.forget_all_but(self._known, claimed)
        return self.pairs.reclaim(claimed)

    def counters(self, index: int) -> Counters:
        return self.dataplane.counters(index)

    # --- what was denied ---

    @property
    def events_fd(self) -> int:
        return self.dataplane.events_fd

    def read_events(self) -> list[Seen]:
        """What the kernel denied since the last call. Quick."""
        return [_seen(d) for d in self.dataplane.read_events()] if self._opened else []

    def _refused(self, event: Refused) -> None:
        try:
            self._seen(
                Seen(
                    index=event.index,
                    what=event.what,
                    reason=event.reason,
                    address=event.address,
                    port=event.port,
                    protocol="udp" if event.what == "dns" else "tcp",
                    name=event.name,
                    left_out=event.left_out,
                )
            )
        except DSecError as e:
            log.error("an event of the network: %s", e)


PROXY_PORT: Final = 3129
"""In the router's namespace, where nobody else listens."""


def _seen(denied: Denied) -> Seen:
    return Seen(
        index=denied.index,
        what="flow",
        reason=denied.reason,
        address=denied.address,
        port=denied.port,
        protocol=denied.protocol,
        inbound=denied.inbound,
        left_out=denied.left_out,
    )
