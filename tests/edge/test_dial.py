"""Connections to ports inside, through an edge on the fake backend: port 7 echoes, nothing else listens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsec.backends.fake_aether import ECHO_PORT, FakeAether
from dsec.core.errors import (
    DSecError,
    InvalidArgument,
    PortRefused,
    PortReset,
    SandboxNotFound,
    TooManyOperations,
    Unavailable,
    WrongState,
)
from dsec.core.ids import new_sandbox_id
from dsec.edge.operation import CONTENT
from dsec.wire import aether as w
from dsec.wire import edge as m
from dsec.wire.local import LocalStream

from .conftest import Node

LIMIT_S = 20.0


def aether(node: Node, sandbox_id: str) -> FakeAether:
    return node.backend.host.sandboxes[sandbox_id].aether


async def dial(node: Node, sandbox_id: str, port: int = ECHO_PORT, **how: Any) -> LocalStream:
    stream = await node.bus.stream("edge.e1.dial", m.DialPort(sandbox_id=sandbox_id, port=port, **how))
    async with asyncio.timeout(LIMIT_S):
        assert await stream.receive() == m.Dialed()
    return stream


async def read(stream: LocalStream, size: int) -> bytes:
    got = b""
    async with asyncio.timeout(LIMIT_S):
        while len(got) < size:
            frame = await stream.receive()
            assert isinstance(frame, m.Output) and frame.stream == CONTENT and frame.offset == len(got)
            got += frame.data
    return got


async def hung_up(node: Node, sandbox_id: str) -> None:
    """Until nothing of it is left, here and in the sandbox."""
    async with asyncio.timeout(LIMIT_S):
        while node.edge.sandboxes[sandbox_id].dials or node.edge.sandboxes[sandbox_id].busy:
            await asyncio.sleep(0.01)
    assert not aether(node, sandbox_id).operations


async def test_carries_bytes_both_ways_and_their_ends(node: Node) -> None:
    sandbox = await node.create()
    stream = await dial(node, sandbox.id)
    data = bytes(range(256)) * 8192  # more than both windows
    sent = asyncio.ensure_future(_send(stream, data))
    assert await read(stream, len(data)) == data
    await sent
    await stream.send(m.InputEnd())
    assert await stream.receive() == m.OutputEnd(CONTENT)
    assert await stream.receive() is None
    await hung_up(node, sandbox.id)


async def _send(stream: LocalStream, data: bytes) -> None:
    for at in range(0, len(data), 1 << 16):
        await stream.send(m.Input(data[at : at + (1 << 16)]))


async def test_a_caller_that_goes_away_ends_it(node: Node) -> None:
    sandbox = await node.create()
    stream = await dial(node, sandbox.id)
    assert node.edge.sandboxes[sandbox.id].busy
    await stream.send(m.Input(b"x" * 100_000))
    await stream.close()
    await hung_up(node, sandbox.id)


async def test_a_port_where_nothing_listens(node: Node) -> None:
    sandbox = await node.create()
    with pytest.raises(PortRefused, match="port 80 inside"):
        await dial(node, sandbox.id, 80)
    with pytest.raises(PortRefused):
        await dial(node, sandbox.id, 80, wait_s=0.1)
    await hung_up(node, sandbox.id)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"port": 0}, InvalidArgument),
        ({"port": 65536}, InvalidArgument),
        ({"wait_s": -1.0}, InvalidArgument),
        ({"wait_s": float("nan")}, InvalidArgument),
        ({"timeout_s": float("inf")}, InvalidArgument),
        ({"address": "1" * 100}, InvalidArgument),
    ],
)
async def test_what_can_never_be(node: Node, how: dict[str, Any], error: type[DSecError]) -> None:
    sandbox = await node.create()
    with pytest.raises(error):
        await dial(node, sandbox.id, **how)


async def test_only_in_a_sandbox_that_runs(node: Node) -> None:
    sandbox = await node.create()
    await node.bus.request("edge.e1.stop", m.StopSandbox(sandbox_id=sandbox.id))
    with pytest.raises(WrongState):
        await dial(node, sandbox.id)
    with pytest.raises(SandboxNotFound):
        await dial(node, new_sandbox_id("e1"))


async def test_their_number_has_a_limit(node: Node) -> None:
    sandbox = await node.create()
    limit = node.config.max_connections
    streams = [await dial(node, sandbox.id) for _ in range(limit)]
    with pytest.raises(TooManyOperations):
        await dial(node, sandbox.id)
    for stream in streams:
        await stream.close()
    await hung_up(node, sandbox.id)
    await (await dial(node, sandbox.id)).close()


async def test_a_stopped_sandbox_ends_them(node: Node) -> None:
    sandbox = await node.create()
    stream = await dial(node, sandbox.id)
    await node.bus.request("edge.e1.stop", m.StopSandbox(sandbox_id=sandbox.id))
    with pytest.raises(Unavailable):
        await stream.receive()


async def test_a_lost_connection_ends_them_and_aether_forgets(node: Node) -> None:
    sandbox = await node.create()
    stream = await dial(node, sandbox.id)
    connection = node.edge.sandboxes[sandbox.id].connection
    assert connection is not None
    connection.drop(Unavailable("cut by the test"))
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(Unavailable):
            await stream.receive()
    again = await dial_again(node, sandbox.id)
    async with asyncio.timeout(LIMIT_S):
        while len(aether(node, sandbox.id).operations) > 1:
            await asyncio.sleep(0.01)
    await again.close()
    await hung_up(node, sandbox.id)


async def dial_again(node: Node, sandbox_id: str) -> LocalStream:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await dial(node, sandbox_id)
            except Unavailable:
                await asyncio.sleep(0.01)


async def test_a_later_edge_lets_aether_forget(node: Node) -> None:
    sandbox = await node.create()
    await dial(node, sandbox.id)
    await node.crash()
    await node.start()
    async with asyncio.timeout(LIMIT_S):
        while aether(node, sandbox.id).operations:
            await asyncio.sleep(0.01)
    assert [op.op_id for op in (await node.ask("operations", m.SandboxId(sandbox_id=sandbox.id))).operations] == []


async def test_an_error_of_the_sandboxs_own_invention(node: Node) -> None:
    """It must not pass for the server's own word, such as that a token is wrong."""
    sandbox = await node.create()
    stream = await dial(node, sandbox.id)
    (operation,) = aether(node, sandbox.id).operations.values()
    operation.end(w.Type.ERROR, w.Failure("unauthenticated", "log in again", 0))
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(PortReset, match="log in again"):
            await stream.receive()
