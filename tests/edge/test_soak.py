"""Cycles of create, one command, destroy: nothing grows. The full number is left to `make soak`."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from dsec.backends.fake import FakeBackend

from .conftest import Node


def rss() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def cycles(node: Node, count: int) -> None:
    async def one() -> None:
        info = await node.create()
        done = await node.shell(info.id, "echo x; count 200000", op_id="o")
        assert len(done.stdout) == 200_002
        await node.stop_sandbox(info.id)

    for _ in range(0, count, 20):
        await asyncio.gather(*(one() for _ in range(20)))


@pytest.mark.parametrize(
    "count", [pytest.param(400, id="short"), pytest.param(10_000, id="long", marks=pytest.mark.slow)]
)
async def test_nothing_grows(tmp_path: Path, count: int) -> None:
    node = Node(tmp_path, FakeBackend(), stopped_kept=50, ended_kept=50)
    await node.start()
    await cycles(node, 200)
    memory, fds = rss(), len(os.listdir("/proc/self/fd"))
    await cycles(node, count)
    assert rss() - memory < 4 << 20
    assert len(os.listdir("/proc/self/fd")) - fds <= 4
    edge = node.edge
    assert len(edge.sandboxes) == 50 and not edge.tasks and not edge.operations._sandbox_of
    assert len(list((tmp_path / "edge" / "operations").iterdir())) == 50
    assert len(list((tmp_path / "edge" / "spool").iterdir())) == 50
    assert sum(edge.lifecycle.counts.values()) == 50 and edge.slots.held == frozenset()
    await node.stop()
