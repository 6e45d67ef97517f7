"""Creation through the SDK: alone, many, cancelled, repeated, over broken connections."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.apiserver.stack import StackServer, args

from dsec.client import DSecClient
from dsec.client._transport import AiohttpTransport, Body, Response, TransportError
from dsec.core import errors


async def states(client: DSecClient) -> list[str]:
    return sorted([s.state async for s in client.list_sandboxes()])


class Breaking(AiohttpTransport):
    """Loses the answer of the first requests: they have reached the server."""

    def __init__(self, url: str, lose: int) -> None:
        super().__init__(url)
        self.lose = lose
        self.requests = 0

    async def request(self, method: str, target: str, headers: dict[str, str], body: Body) -> Response:
        self.requests += 1
        answer = await super().request(method, target, headers, body)
        if self.lose:
            self.lose -= 1
            raise TransportError("lost", sent=True)
        return answer


async def test_answers_that_are_lost(server: StackServer) -> None:
    transport = Breaking(server.url, 2)
    async with server.client(transport=transport) as client:
        sandbox = await client.run_container(args())
        assert await states(client) == ["running"], "a repeat made another one"
        transport.lose = 1
        assert (await sandbox.run_shell("cd /tmp; pwd")).ok
        assert len(await sandbox.operations()) == 1
        transport.lose = 1
        await sandbox.files.write("/tmp/a", b"1")
        transport.lose = 1
        await sandbox.files.move("/tmp/a", "/tmp/b")
        transport.lose = 1
        await sandbox.stop()


async def test_no_retries(server: StackServer) -> None:
    transport = Breaking(server.url, 0)
    async with server.client(transport=transport, retries=0) as client:
        sandbox = await client.run_container(args())
        transport.lose = 1
        with pytest.raises(errors.OutcomeUnknown, match="op-x"):
            await sandbox.run_shell("true", op_id="op-x")
        assert (await sandbox.run_shell("true", op_id="op-x")).ok


async def test_no_server() -> None:
    async with DSecClient(url="http://127.0.0.1:1", token="x", retries=1) as client:
        with pytest.raises(errors.Unavailable):
            await client.node()


async def test_idempotency_key(client: DSecClient) -> None:
    first = await client.run_container(args(), idempotency_key="k")
    again = await client.run_container(args(), idempotency_key="k")
    assert first.id == again.id
    with pytest.raises(errors.IdempotencyMismatch):
        await client.run_container(args(memory_limit_mb=64), idempotency_key="k")
    other = await client.run_container(args(), idempotency_key="l")
    assert other.id != first.id


async def test_many(client: DSecClient) -> None:
    ids = {s.id async for s in client.run_many(args(), count=20)}
    assert len(ids) == 20


async def test_many_with_failures(client: DSecClient) -> None:
    told: list[int] = []
    found = [
        s
        async for s in client.run_many(
            args(container_image="unknown"), 3, on_error=lambda i, e: told.append(i)
        )
    ]
    assert found == [] and sorted(told) == [0, 1, 2]
    with pytest.raises(ExceptionGroup) as e:
        async for _ in client.run_many(args(container_image="unknown"), 3):
            pass
    assert e.group_contains(errors.UnknownLayer)
    with pytest.raises(errors.InvalidArgument):
        async for _ in client.run_many(args(memory_limit_mb=-1), 3):
            pass


async def test_many_left_early(server: StackServer, client: DSecClient) -> None:
    async with server.client() as leaver:
        many = leaver.run_many(args(), count=12)
        kept = await anext(many)
        await many.aclose()  # type: ignore[attr-defined]
    assert [s.id async for s in client.list_sandboxes(states=["creating", "running"])] == [kept.id]


async def test_many_over_a_broken_connection(server: StackServer) -> None:
    gate = server.backend.knobs.launch_gate = asyncio.Event()
    async with server.client() as client:
        many = client.run_many(args(), count=8)
        first = asyncio.ensure_future(anext(many))
        await wait_for(client, 8)
        server.cut()
        gate.set()
        ids = {(await first).id} | {s.id async for s in many}
        assert len(ids) == 8
        assert await states(client) == ["running"] * 8


async def test_cancelled_creation_leaves_nothing(server: StackServer) -> None:
    gate = server.backend.knobs.launch_gate = asyncio.Event()
    async with server.client() as client:
        task = asyncio.create_task(client.run_container(args()))
        await wait_for(client, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    gate.set()
    async with server.client() as client:
        assert set(await states(client)) <= {"stopped"}


async def test_deadline(server: StackServer) -> None:
    server.backend.knobs.launch_gate = asyncio.Event()
    async with server.client() as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.run_container(args(), timeout=0.1)
        server.backend.knobs.launch_gate.set()


async def wait_for(client: DSecClient, count: int) -> None:
    for _ in range(10_000):
        if len(await states(client)) == count:
            return
    raise AssertionError("never")


async def test_lists_and_stats(client: DSecClient) -> None:
    a = await client.run_container(args(task="t1", labels={"k": "a b&c"}, secrets={"TOKEN": "s3cret"}))
    await client.run_container(args(task="t2", project="other"))
    assert [s.id async for s in client.list_sandboxes(labels={"k": "a b&c"})] == [a.id]
    assert [s.task async for s in client.list_sandboxes(project="other")] == ["t2"]
    assert [s async for s in client.list_sandboxes(states=["stopped"])] == []
    assert (await a.stats()).sandbox_id == a.id
    assert b"s3cret" not in msgspec.json.encode(
        [await a.refresh(), [s async for s in client.list_sandboxes()]]
    )
    await a.stop()
    await a.stop()
    assert [s.id async for s in client.list_sandboxes(states=["stopped"])] == [a.id]
    with pytest.raises(errors.WrongState):
        await a.run_shell("true")
    with pytest.raises(errors.WrongState):
        await a.stats()
    assert (await client.node()).edge == "e1"


async def test_not_open() -> None:
    client = DSecClient(url="http://127.0.0.1:1")
    with pytest.raises(errors.InvalidArgument, match="open"):
        await client.node()
    with pytest.raises(errors.InvalidArgument):
        DSecClient(url="ftp://x")
