"""Pages, layers, the node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.apiserver.stack import StackServer, args

from dsec.client import DSecClient, _client
from dsec.core import errors
from dsec.wire import layers as m


async def test_pages(client: DSecClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {s.id async for s in client.run_many(args(), count=7)}
    monkeypatch.setattr(_client, "PAGE", 3)
    found = [s.id async for s in client.list_sandboxes()]
    assert found == sorted(made)


async def test_layers(server: StackServer, client: DSecClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.Unavailable):
        [layer async for layer in client.layers()]
    asked: list[Any] = []

    async def page(query: m.LayerQuery) -> m.LayerPage:
        asked.append(query)
        names = [n for n in ("base:1", "base:2", "tool@1") if n > query.after][: query.limit]
        more = names[-1] if len(names) == query.limit else ""
        return m.LayerPage(layers=[m.LayerInfo(digest="d", name=n) for n in names], next=more)

    async def get(msg: m.LayerName) -> m.LayerInfo:
        asked.append(msg)
        return m.LayerInfo(digest="d", name="base:1", total=5)

    async def remove(msg: m.LayerName) -> m.Removed:
        asked.append(msg)
        return m.Removed([msg.reference])

    async def import_image(msg: m.ImportImage) -> m.LayerInfo:
        asked.append(msg)
        return m.LayerInfo(digest="e", name=msg.source)

    for verb, handler in (("list", page), ("get", get), ("remove", remove), ("import", import_image)):
        server.bus.serve(f"layers.{verb}", handler)
    monkeypatch.setattr(_client, "PAGE", 2)
    assert [layer.name async for layer in client.layers(prefix="b")] == ["base:1", "base:2", "tool@1"]
    assert asked[-1] == m.LayerQuery(after="base:2", prefix="b", limit=2)
    assert (await client.layer("host:5000/a/b:1")).total == 5
    assert asked[-1] == m.LayerName("host:5000/a/b:1")
    assert await client.remove_layer("base:1") == ["base:1"]
    assert (await client.import_image("host/a:1", labels={"a": "b"})).name == "host/a:1"
    assert asked[-1].source == "host/a:1" and asked[-1].labels == {"a": "b"} and asked[-1].principal
    with pytest.raises(errors.InvalidArgument):
        await client.layer("")


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
