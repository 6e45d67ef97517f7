from __future__ import annotations

import array
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.network.hosts import Host, World

from dsec.backends.container.launcher import agent_binary, sealed_copy
from dsec.core.network import NetworkRules, Policy, compile_rules, rules_from
from dsec.network.addresses import Addresses
from dsec.network.pairs import Pair
from dsec.network.service import NetworkConfig, NodeNetwork, Seen
from dsec.wire.aether import PAIR, Paired, Spawn


class PairMaker:
    """A launcher, asked for pairs alone, one at a time and from any thread."""

    def __init__(self) -> None:
        from dsec.backends.container.launcher import Launcher

        program = sealed_copy(agent_binary())
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = Launcher._start(program, theirs.fileno())
        theirs.close()
        import os

        os.close(program)
        self._socket = ours

    def __call__(self) -> tuple[int, int]:
        import msgspec

        with self._lock:
            self._socket.send(msgspec.msgpack.encode(Spawn(1, PAIR)))
            data, ancillary, _, _ = self._socket.recvmsg(256, socket.CMSG_SPACE(8), socket.MSG_CMSG_CLOEXEC)
        answer = msgspec.convert(msgspec.msgpack.decode(data), Paired)
        assert answer.errno == 0
        fds = [fd for _, _, raw in ancillary for fd in array.array("i", raw)]
        return fds[0], fds[1]

    def close(self) -> None:
        import os

        self._socket.close()
        os.waitpid(self.pid, 0)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def maker() -> Iterator[PairMaker]:
    made = PairMaker()
    yield made
    made.close()


class Net:
    """A node's network on the world's host, and sandboxes of it."""

    def __init__(
        self, world: World, run: Path, maker: Callable[[], tuple[int, int]], **config: object
    ) -> None:
        self.world = world
        self.seen: list[Seen] = []
        self.config = NetworkConfig(upstreams=["198.51.100.2"], **config)  # type: ignore[arg-type]
        self.network = NodeNetwork(run, "e1", self.config, make_pair=maker, seen=self.seen.append)
        self.inside: list[tuple[Pair, Host]] = []

    def open(self) -> None:
        self.world.host.run(self.network.open)

    def sandbox(self, rules: object = None, group: int = 0) -> tuple[int, Host]:
        pair = self.world.host.run(self.network.take)
        self.rules(pair.index, rules or {}, group=group)
        host = Host.of(pair.net, f"sandbox{pair.index}")
        self.inside.append((pair, host))
        return pair.index, host

    def rules(self, index: int, rules: object, group: int | None = None) -> None:
        policy = self.policy(rules)
        if group is None:
            self.network.set_rules(index, policy)
        else:
            self.network.assign(index, policy, group)

    def policy(self, rules: object) -> Policy:
        found: NetworkRules = rules_from(rules)
        return compile_rules(found, drop=self.config.drop)

    def events(self) -> list[Seen]:
        self.seen += self.network.read_events()
        return self.seen

    def end(self, index: int) -> None:
        """As when a sandbox is destroyed: its processes end, then the pair is given back."""
        for pair, host in list(self.inside):
            if pair.index == index:
                host.close()
                pair.close()
                self.inside.remove((pair, host))
        self.network.release(index)

    def close(self, *, keep: bool = False) -> None:
        for pair, host in self.inside:
            host.close()
            pair.close()
        self.inside.clear()
        self.world.host.run(lambda: self.network.close(keep=keep))

    @property
    def addresses(self) -> Addresses:
        return self.network.addresses


@pytest.fixture
def net(world: World, tmp_path: Path, maker: PairMaker) -> Iterator[Net]:
    made = Net(world, tmp_path, maker)
    made.open()
    yield made
    made.close()
