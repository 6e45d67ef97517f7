"""The backend is told once that a sandbox has had its first result."""

from __future__ import annotations

from tests.edge.conftest import Node


async def test_told_once(node: Node) -> None:
    info = await node.create()
    answered = node.backend.host.answered
    assert answered == set()
    await node.shell(info.id, "echo one")
    assert answered == {info.id}
    answered.clear()
    await node.shell(info.id, "echo two")
    assert answered == set()
