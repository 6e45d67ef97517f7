"""Terminals whose client has vanished."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.backends.fake import FakeBackend
from dsec.wire import aether as w
from dsec.wire import edge as m
from dsec.wire.local import LocalStream

from .conftest import Node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path, FakeBackend(), hang_up_after_s=0.2)
    await made.start()
    yield made
    await made.stop()


def terminal(op_id: str) -> w.Exec:
    return w.Exec(
        op_id=op_id,
        argv=["/bin/cat"],
        env={},
        cwd="",
        user="",
        stdin=True,
        tty=True,
        rows=24,
        columns=80,
        timeout_ms=0,
        output_limit=1 << 20,
        kill_at_limit=False,
    )


async def follow(node: Node, sandbox_id: str, request: w.Exec, **how: Any) -> LocalStream:
    """A stream that certainly follows the operation: it has shown something."""
    stream = await node.attach(sandbox_id, request.op_id, start=request, stdin_from=0, **how)
    await stream.send(m.Input(b"key\n"))
    assert isinstance(await stream.receive(), m.Output)
    return stream


async def test_a_terminal_whose_client_vanished_is_hung_up(node: Node) -> None:
    info = await node.create()
    await (await follow(node, info.id, terminal("t"))).close()
    async with asyncio.timeout(10):
        done = await node.operation(info.id, "t", wait_s=None)
    assert isinstance(done.result, w.Ended) and done.result.signal == signal.SIGHUP
    assert node.edge.sandboxes[info.id].attached == 0


async def test_a_terminal_that_is_taken_up_again_is_not_hung_up(node: Node) -> None:
    info = await node.create()
    first = await follow(node, info.id, terminal("t"))
    second = await follow(node, info.id, terminal("t"))
    await first.close()
    assert (await node.operation(info.id, "t", wait_s=0.4)).state == "running"
    await second.close()
    third = await follow(node, info.id, terminal("t"))
    assert (await node.operation(info.id, "t", wait_s=0.4)).state == "running"
    await third.close()
    async with asyncio.timeout(10):
        assert (await node.operation(info.id, "t", wait_s=None)).state == "ended"


async def test_a_silent_command_keeps_no_stream_whose_client_has_gone(node: Node) -> None:
    info = await node.create()
    request = msgspec.structs.replace(terminal("c"), tty=False)
    await (await follow(node, info.id, request)).close()
    done = await node.operation(info.id, "c", wait_s=0.4)
    assert (done.state, node.edge.sandboxes[info.id].attached) == ("running", 0)
