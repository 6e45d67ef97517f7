"""SIGKILL of the server at random instants, during creations, commands and deletions.

After each restart every live sandbox answers, its sessions and background commands are intact, every
acknowledged operation still has its result, and the host holds nothing that no record claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from tests.e2e.host import footprint
from tests.e2e.server import ServerProcess

from dsec.client import DSecClient, DSecContainerRunArgs
from dsec.core import errors
from dsec.core.ids import new_operation_id

pytestmark = pytest.mark.kernel
LASTING = 3


@pytest.fixture
def server(stocked, tmp_path):
    process = ServerProcess(stocked, "--keep")
    process.start()
    yield process
    if process.process is None:
        process.start()
    process.options = ()
    process.kill()
    process.start()
    process.stop()


class Lasting:
    """A sandbox that must live through every kill, with a session and a counting background command."""

    def __init__(self, sandbox_id: str, number: int) -> None:
        self.id = sandbox_id
        self.number = number
        self.background = ""
        self.lines = 0
        self.recorded: dict[str, bytes] = {}

    async def prepare(self, client: DSecClient) -> None:
        sandbox = await client.get_sandbox(self.id)
        await sandbox.run_shell(f"cd /tmp; export NUMBER={self.number}; twice() {{ echo $1 $1; }}")
        counting = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"
        command = await sandbox.exec(["/bin/sh", "-c", counting], background=True)
        self.background = command.op_id

    async def check(self, client: DSecClient) -> None:
        sandbox = await client.get_sandbox(self.id)
        answer = await sandbox.run_shell('echo "$NUMBER $PWD $(twice x)"')
        assert answer.stdout.decode() == f"{self.number} /tmp x x\n"
        assert not answer.session_replaced
        command = await sandbox.operation(self.background)
        output = await command.output()
        numbers = output.stdout.split()
        assert numbers[: len(numbers)] == [str(i + 1).encode() for i in range(len(numbers))], (
            "a line was lost"
        )
        assert len(numbers) >= self.lines
        self.lines = len(numbers)
        for op_id, stdout in self.recorded.items():
            again = await sandbox.exec(["/bin/sh", "-c", f"echo {op_id}; echo x >> /tmp/count"], op_id=op_id)
            assert again.stdout == stdout
        count = await sandbox.exec(["/bin/sh", "-c", "cat /tmp/count 2>/dev/null | wc -l"])
        assert int(count.stdout) >= len(self.recorded)

    async def step(self, client: DSecClient) -> None:
        """One command that must run exactly once, through a lost answer as well."""
        op_id = new_operation_id()
        sandbox = await client.get_sandbox(self.id)
        result = await sandbox.exec(["/bin/sh", "-c", f"echo {op_id}; echo x >> /tmp/count"], op_id=op_id)
        self.recorded[op_id] = result.stdout


async def churn(client: DSecClient, lasting: list[Lasting]) -> None:
    """Creations, commands and deletions, until the server goes away."""

    async def come_and_go() -> None:
        while True:
            sandbox = await client.run_container(DSecContainerRunArgs(container_image="base"))
            await sandbox.run_shell("echo hello")
            await sandbox.stop()

    async def steps(one: Lasting) -> None:
        while True:
            await one.step(client)
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(come_and_go())
        for one in lasting:
            group.create_task(steps(one))


async def one_round(server: ServerProcess, lasting: list[Lasting], delay: float) -> None:
    async with DSecClient(url=server.url, token=server.token, retries=0) as client:
        load = asyncio.create_task(churn(client, lasting))
        await asyncio.sleep(delay)  # the random instant, not a wait for anything
        server.kill()
        with contextlib.suppress(BaseExceptionGroup, asyncio.CancelledError, errors.DSecError):
            load.cancel()
            await load
    server.start()
    async with DSecClient(url=server.url, token=server.token) as client:
        live = {s.id async for s in client.list_sandboxes(states=["running"])}
        assert {one.id for one in lasting} <= live
        for one in lasting:
            await one.check(client)
        for sandbox_id in live - {one.id for one in lasting}:
            sandbox = await client.get_sandbox(sandbox_id)
            assert (await sandbox.exec(["/bin/echo", "here"])).stdout == b"here\n"
            await sandbox.stop()
        left = {s.id async for s in client.list_sandboxes(states=["creating", "running", "stopping"])}
        assert left == {one.id for one in lasting}
        assert footprint(server.data) == {one.id for one in lasting}, "the host holds what no record claims"


async def run_rounds(server: ServerProcess, rounds: int, seed: int) -> None:
    instant = random.Random(seed)
    async with DSecClient(url=server.url, token=server.token) as client:
        lasting = []
        for number in range(LASTING):
            sandbox = await client.run_container(DSecContainerRunArgs(container_image="base"))
            lasting.append(Lasting(sandbox.id, number))
            await lasting[-1].prepare(client)
    for _ in range(rounds):
        await one_round(server, lasting, instant.uniform(0.0, 0.6))


async def test_kill_a_few_times(server):
    await run_rounds(server, rounds=8, seed=1)


@pytest.mark.slow
async def test_kill_two_hundred_times(server):
    await run_rounds(server, rounds=200, seed=2)
