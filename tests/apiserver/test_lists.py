"""Pages, layers, the node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.apiserver.stack import StackServer, args

from dsec.client import DSecClient, _client
from dsec.core import errors
from dsec.wire.api import LayerInfo


async def test_pages(client: DSecClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {s.id async for s in client.run_many(args(), count=7)}
    monkeypatch.setattr(_client, "PAGE", 3)
    found = [s.id async for s in client.list_sandboxes()]
    assert found == sorted(made)


async def test_layers(server: StackServer, client: DSecClient) -> None:
    with pytest.raises(errors.Unavailable):
        await client.layers()

    async def layers(_: Any) -> list[LayerInfo]:
        return [LayerInfo(digest="d", name="base", kind="base", size=5)]

    server.bus.serve("layers.list", layers)
    assert [layer.name for layer in await client.layers()] == ["base"]


async def test_many_at_once(client: DSecClient) -> None:
    """More waits at once than one pool of a hundred connections would carry."""
    sandbox = await client.run_container(args())
    commands = [
        await sandbox.exec(["/bin/cat"], stdin=True, background=True, op_id=f"op-{i}") for i in range(200)
    ]
    waits = [asyncio.create_task(command.wait()) for command in commands]
    for command in commands:
        await command.close_stdin()
    assert all(result.ok for result in await asyncio.gather(*waits))
