"""Sandboxes of this backend on the node's network: which pair is whose, and what was seen of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from dsec.backends.base import Handle, LaunchSpec, Seen
from dsec.core.errors import DSecError, WrongState
from dsec.core.network import Policy
from dsec.core.specs import SandboxSpec
from dsec.network import service
from dsec.network.pairs import Pair
from dsec.network.service import NetworkConfig, NodeNetwork

log = logging.getLogger(__name__)
INDEX: Final = "network"
"""In a handle: the index of its sandbox's pair."""


class Networks:
    """Calls block unless they say otherwise: make them in a thread."""

    def __init__(
        self,
        run: Path,
        edge_id: str,
        config: NetworkConfig,
        *,
        make_pair: Callable[[], tuple[int, int]],
        seen: Callable[[str, Seen], None],
    ) -> None:
        """seen: called on the loop of `start`, with a sandbox's id."""
        self.node = NodeNetwork(run, edge_id, config, make_pair=make_pair, seen=self._refused)
        self._prepared = config.prepared
        self.node.opened = self._opened
        self._seen = seen
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids: dict[int, str] = {}
        self._indexes: dict[str, int] = {}
        self._groups: dict[tuple[str, str], int] = {}

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Not blocking; `open` may follow in a thread."""
        self._loop = loop

    def open(self) -> None:
        """What the configuration wants ready from the start."""
        if self._prepared and not self.node.reason:
            self.node.open()
            self.node.pairs.fill()

    def close(self, *, keep: bool) -> None:
        if self.node.is_open and self._loop is not None and self._loop.is_running():
            done = asyncio.run_coroutine_threadsafe(self._stop_reading(), self._loop)
            done.result(5)
        self.node.close(keep=keep)

    async def _stop_reading(self) -> None:
        asyncio.get_running_loop().remove_reader(self.node.events_fd)

    # --- sandboxes ---

    def take(self, spec: LaunchSpec) -> Pair | None:
        """A pair with its rules in force, for a sandbox that has a network."""
        if spec.policy is None:
            return None
        pair = self.node.take()
        try:
            self._know(spec.sandbox_id, pair.index)
            self.node.assign(pair.index, spec.policy, self._group(spec.spec))
        except BaseException:
            pair.close()
            self.release(spec.sandbox_id)
            raise
        return pair

    def _know(self, sandbox_id: str, index: int) -> None:
        self._ids[index] = sandbox_id
        self._indexes[sandbox_id] = index

    def _group(self, spec: SandboxSpec) -> int:
        """Of a project's named group a number; 0: none."""
        if not spec.group:
            return 0
        return self._groups.setdefault((spec.project, spec.group), len(self._groups) + 1)

    def set_rules(self, handle: Handle, policy: Policy, spec: SandboxSpec) -> None:
        """Also of a sandbox of an earlier life, whose link is there."""
        if INDEX not in handle.data:
            raise WrongState(f"{handle.sandbox_id} has no network")
        index = int(handle.data[INDEX])
        if handle.sandbox_id in self._indexes:
            self.node.set_rules(index, policy)
            return
        self._know(handle.sandbox_id, index)
        self.node.recover(index, policy, self._group(spec))

    def release(self, sandbox_id: str) -> None:
        """Idempotent."""
        index = self._indexes.pop(sandbox_id, None)
        if index is not None:
            self._ids.pop(index, None)
            self.node.release(index)

    def addresses(self, handle: Handle) -> tuple[IPv4Address, IPv6Address] | None:
        if INDEX not in handle.data:
            return None
        index = int(handle.data[INDEX])
        return self.node.addresses.address4(index), self.node.addresses.address6(index)

    # --- what was denied ---

    def _opened(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._read_from_now_on)

    def _read_from_now_on(self) -> None:
        assert self._loop is not None
        if self.node.is_open:
            self._loop.add_reader(self.node.events_fd, self._readable)

    def _readable(self) -> None:
        for event in self.node.read_events():
            self._tell(event)

    def _refused(self, event: service.Seen) -> None:
        """On the gateway's thread."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._tell, event)
            except RuntimeError:
                log.info("an event of the network came when the loop had ended")

    def _tell(self, event: service.Seen) -> None:
        sandbox_id = self._ids.get(event.index)
        if sandbox_id is None:
            return
        try:
            self._seen(
                sandbox_id,
                Seen(
                    what=event.what,
                    reason=event.reason,
                    address=event.address,
                    port=event.port,
                    protocol=event.protocol,
                    name=event.name,
                    inbound=event.inbound,
                    left_out=event.left_out,
                ),
            )
        except DSecError as e:
            log.error("an event of %s: %s", sandbox_id, e.message)
