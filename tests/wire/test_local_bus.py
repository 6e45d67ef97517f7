"""The Bus in one process: errors pass through it, streams wait for their reader."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dsec.core.errors import DiskFull, Internal, Unavailable
from dsec.wire.bus import Stream
from dsec.wire.local import CREDIT, LocalBus


class Number(msgspec.Struct, frozen=True):
    n: int


async def test_request() -> None:
    bus = LocalBus()

    async def double(message: Number) -> Number:
        if message.n < 0:
            raise DiskFull("no room")
        return Number(2 * message.n)

    bus.serve("double", double)
    assert await bus.request("double", Number(4)) == Number(8)
    with pytest.raises(DiskFull):
        await bus.request("double", Number(-1))
    with pytest.raises(Unavailable):
        await bus.request("nothing", Number(1))
    with pytest.raises(Unavailable):
        await bus.stream("nothing", Number(1))


async def test_a_slow_reader_stops_the_writer() -> None:
    bus, sent = LocalBus(), 0

    async def count(message: Number, stream: Stream) -> None:
        nonlocal sent
        for i in range(message.n):
            await stream.send(Number(i))
            sent += 1

    bus.serve_stream("count", count)
    stream = await bus.stream("count", Number(100))
    assert await stream.receive() == Number(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert sent <= CREDIT + 2
    got = [frame async for frame in stream]
    assert len(got) == 99 and sent == 100 and await stream.receive() is None


async def test_both_ways_and_ends() -> None:
    bus = LocalBus()

    async def echo(message: Any, stream: Stream) -> None:
        async for frame in stream:
            await stream.send(frame)

    bus.serve_stream("echo", echo)
    stream = await bus.stream("echo", Number(0))
    for i in range(3):
        await stream.send(Number(i))
    await stream.end()
    assert [f async for f in stream] == [Number(0), Number(1), Number(2)]


async def test_errors_of_a_stream() -> None:
    bus = LocalBus()

    async def fail(message: Number, stream: Stream) -> None:
        await stream.send(message)
        if message.n:
            raise DiskFull("no room")
        raise ValueError("a bug")

    bus.serve_stream("fail", fail)
    for n, error in ((1, DiskFull), (0, Internal)):
        stream = await bus.stream("fail", Number(n))
        assert await stream.receive() == Number(n)
        for _ in range(2):
            with pytest.raises(error):
                await stream.receive()


async def test_a_reader_that_goes_away_frees_the_writer() -> None:
    bus, ended = LocalBus(), asyncio.Event()

    async def forever(message: Number, stream: Stream) -> None:
        try:
            while True:
                await stream.send(message)
        finally:
            ended.set()

    bus.serve_stream("forever", forever)
    stream = await bus.stream("forever", Number(1))
    await stream.receive()
    await stream.close()
    await ended.wait()


async def test_close_ends_what_runs() -> None:
    bus = LocalBus()

    async def wait(message: Number, stream: Stream) -> None:
        await stream.receive()

    bus.serve_stream("wait", wait)
    stream = await bus.stream("wait", Number(1))
    await asyncio.sleep(0)
    await bus.close()
    await stream.close()
    assert not bus._tasks


async def test_publish() -> None:
    bus = LocalBus()
    subscription = bus.subscribe("news")
    waiting = asyncio.ensure_future(anext(subscription))
    await asyncio.sleep(0)
    await bus.publish("news", Number(1))
    await bus.publish("other", Number(2))
    assert await waiting == Number(1)
    for i in range(2000):
        await bus.publish("news", Number(i))
    assert (await anext(subscription)).n == 2000 - 1024, "the oldest are dropped"
    await subscription.aclose()  # type: ignore[attr-defined]
