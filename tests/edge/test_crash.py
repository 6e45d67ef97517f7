"""The edge's process is killed at random instants, while sandboxes are made, used and ended.

Afterwards every sandbox whose creation was answered lives or was ended by somebody, sessions are intact, no
command ran twice, every command has one outcome however often it is asked for, and nothing is on the
machine that no record claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.base import Exit
from dsec.backends.fake import FakeHost, FakeSandbox, SocketEnd
from dsec.backends.fake_aether import FakeOperation
from dsec.core.errors import DSecError
from dsec.core.ids import new_sandbox_id
from dsec.core.specs import SandboxSpec
from dsec.wire import aether as w
from dsec.wire import edge as m

from .conftest import shell
from .edge_process import Peer, serve


class FakeMachine:
    """The host of all sandboxes, over a socket. It outlives every edge."""

    def __init__(self, directory: Path) -> None:
        self.host = FakeHost()
        self.directory = directory
        self.begun: Counter[tuple[str, str]] = Counter()
        self.listeners: dict[str, socket.socket] = {}

    async def answer(self, body: Any) -> Any:
        verb, *rest = body
        return await getattr(self, verb)(*rest)

    async def launch(self, sandbox_id: str, slot: int) -> None:
        assert all(s.slot != slot for s in self.host.sandboxes.values()), "a slot is held twice"
        sandbox = self.host.sandboxes[sandbox_id] = FakeSandbox(sandbox_id, slot)
        sandbox.aether._operations = Begun(self.begun, sandbox_id)
        listener = self.listeners[sandbox_id] = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.directory / sandbox_id[-12:]))
        listener.listen(8)
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, sandbox_id, listener)
        await asyncio.sleep(random.random() * 0.01)

    def _accept(self, sandbox_id: str, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        sandbox = self.host.sandboxes[sandbox_id]
        if sandbox.connection is not None:
            sandbox.connection.close()
        sandbox.connection = SocketEnd(self.host, sandbox.aether, sock)

    async def socket(self, sandbox_id: str) -> str:
        if sandbox_id not in self.host.sandboxes:
            raise DSecError(f"{sandbox_id} is not there")
        return str(self.directory / sandbox_id[-12:])

    async def wait(self, sandbox_id: str) -> Exit:
        sandbox = self.host.sandboxes.get(sandbox_id)
        if sandbox is None:
            return Exit()
        if sandbox.exit is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            sandbox.ended = [*(sandbox.ended or ()), future]
            await future
        return sandbox.exit or Exit()

    async def stop(self, sandbox_id: str) -> None:
        if sandbox_id in self.host.sandboxes:
            self.host.kill(sandbox_id, Exit(signal=9))

    async def destroy(self, sandbox_id: str) -> None:
        await asyncio.sleep(random.random() * 0.005)
        if sandbox_id in self.host.sandboxes:
            self.host.kill(sandbox_id, Exit(signal=9))
            del self.host.sandboxes[sandbox_id]
            listener = self.listeners.pop(sandbox_id)
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
            (self.directory / sandbox_id[-12:]).unlink()

    async def reclaim(self, claimed: frozenset[str]) -> list[str]:
        lost = [i for i in self.host.sandboxes if i not in claimed]
        for sandbox_id in lost:
            await self.destroy(sandbox_id)
        return lost


class Begun(dict[str, FakeOperation]):
    """The operations of one sandbox; counts how often each was begun."""

    def __init__(self, counts: Counter[tuple[str, str]], sandbox_id: str) -> None:
        super().__init__()
        self._counts, self._sandbox_id = counts, sandbox_id

    def __setitem__(self, op_id: str, operation: FakeOperation) -> None:
        if operation.kind == "shell":  # not the stat by which an edge lets aether forget
            self._counts[self._sandbox_id, op_id] += 1
        super().__setitem__(op_id, operation)


class Edge:
    """The process under test, and the only way to talk to it."""

    def __init__(self, directory: Path, machine: str) -> None:
        self.directory = directory
        self.machine = machine
        self.process: subprocess.Popen[bytes] | None = None
        self.up = asyncio.Event()
        self.lives = 0

    async def start(self) -> None:
        self.lives += 1
        control = str(self.directory / f"control{self.lives}")
        arguments = [
            sys.executable,
            "-m",
            "edge_process",
            str(self.directory / "data"),
            self.machine,
            control,
        ]
        self.process = subprocess.Popen(arguments, cwd=Path(__file__).parent)  # noqa: ASYNC220
        while True:
            try:
                self.peer = await Peer.connect(control)
                break
            except OSError:
                assert self.process.poll() is None, "the edge ended by itself"
                await asyncio.sleep(0.01)
        self.up.set()

    async def kill(self) -> None:
        assert self.process is not None
        self.up.clear()
        self.process.kill()
        await asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        await self.peer.close()

    async def ask(self, verb: str, message: Any) -> Any:
        """Until some edge has answered: a client repeats what it got no answer to, with the same ids."""
        while True:
            await self.up.wait()
            with contextlib.suppress(ConnectionError):
                return await self.peer.ask((verb, message))
            await asyncio.sleep(0)


class Client:
    """Makes a sandbox, works in its session, and now and then ends it."""

    def __init__(self, edge: Edge, seed: int) -> None:
        self.edge = edge
        self.random = random.Random(seed)
        self.alive: dict[str, int] = {}
        self.results: dict[tuple[str, str], tuple[w.Shell, m.OperationInfo]] = {}

    async def step(self) -> None:
        choice = self.random.random()
        if not self.alive or (choice < 0.15 and len(self.alive) < 12):
            await self.create()
        elif choice < 0.9:
            await self.work(self.random.choice(list(self.alive)))
        else:
            sandbox_id = self.random.choice(list(self.alive))
            del self.alive[sandbox_id]
            info = await self.edge.ask("stop", m.StopSandbox(sandbox_id=sandbox_id))
            assert info.state == "stopped"

    async def create(self) -> None:
        spec = SandboxSpec(backend="fake", image="base")
        message = m.CreateSandbox(sandbox_id=new_sandbox_id("e1"), spec=spec)
        try:
            info = await self.edge.ask("create", message)
        except DSecError as e:
            if e.code != "launch_failed":  # the server ended while it was being made
                raise
            return
        self.alive[info.id] = 0

    async def work(self, sandbox_id: str) -> None:
        n = self.alive[sandbox_id] = self.alive[sandbox_id] + 1
        size = self.random.choice([0, 10, 1000, 200_000, 600_000])
        request = shell(f"op{n}", f"echo $N; export N={n}; count {size}")
        done = await self.edge.ask("operate", m.Operate(sandbox_id=sandbox_id, request=request))
        before = b"" if n == 1 else str(n - 1).encode()
        assert done.state == "ended", done
        assert done.stdout[: len(before) + 1] == before + b"\n", "the session lost its state"
        assert len(done.stdout) == len(before) + 1 + size
        self.results[sandbox_id, request.op_id] = request, done

    async def verify(self) -> None:
        for (sandbox_id, _), (request, before) in self.results.items():
            repeated = m.Operate(sandbox_id=sandbox_id, request=request)
            assert await self.edge.ask("operate", repeated) == before
        for sandbox_id in self.alive:
            assert (await self.edge.ask("get", m.SandboxId(sandbox_id=sandbox_id))).state == "running"


async def crashes(directory: Path, kills: int, clients: int, seed: int) -> None:
    machine = FakeMachine(directory)
    server = await serve(str(directory / "machine"), machine.answer)
    edge = Edge(directory, str(directory / "machine"))
    users = [Client(edge, seed + i) for i in range(clients)]
    ending = asyncio.Event()
    killer = random.Random(seed)

    async def use(client: Client) -> None:
        while not ending.is_set():
            await client.step()

    async def kill() -> None:
        for _ in range(kills):
            await asyncio.sleep(killer.random() * 0.25)
            await edge.kill()
            await edge.start()
        ending.set()

    try:
        await edge.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            for user in users:
                group.create_task(use(user))
        for user in users:
            await user.verify()
        await edge.kill()
        await edge.start()
        for user in users:
            await user.verify()
        assert not [op for op, n in machine.begun.items() if n > 1], "a command ran twice"
        alive = {sandbox_id for user in users for sandbox_id in user.alive}
        assert set(machine.host.sandboxes) == alive, "more is on the machine than anybody knows of"
        for sandbox_id in alive:
            await edge.ask("stop", m.StopSandbox(sandbox_id=sandbox_id))
        assert machine.host.sandboxes == {}
    finally:
        await edge.kill()
        server.close()
        await asyncio.gather(*(end.gone for end in machine.host.ends))


async def test_killed_at_random_instants(tmp_path: Path) -> None:
    await crashes(tmp_path, kills=12, clients=6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
async def test_killed_very_often(tmp_path: Path, seed: int) -> None:
    await crashes(tmp_path, kills=40, clients=12, seed=1000 * seed)
