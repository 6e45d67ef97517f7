"""The edge's connection against an aether that says anything at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.core.errors import AetherLost, DSecError, ProtocolError
from dsec.edge.aether import AetherConnection, Watchdog
from dsec.edge.operation import Operation
from dsec.edge.oplog import Intent
from dsec.wire import aether as w
from dsec.wire.frames import frame, message

from .conftest import shell

T = w.Type
HELLO = message(0, T.HELLO, w.Hello(1, 1, "s", b"i" * 16, []))
ENDED = w.Ended("exited", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, False, "/")


class Owner:
    def __init__(self) -> None:
        self.ended: DSecError | None = None
        self.done = asyncio.Event()
        self.events: list[w.Event] = []

    def connection_ended(self, connection: AetherConnection, error: DSecError) -> None:
        assert self.ended is None, "told twice"
        self.ended = error
        self.done.set()

    def event(self, event: w.Event) -> None:
        self.events.append(event)


class Host:
    def ended(self, operation: Operation) -> bool:
        return True


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def open_one(hello: bytes = HELLO) -> tuple[AetherConnection, Owner, socket.socket]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    owner = Owner()
    await asyncio.get_running_loop().sock_sendall(far, hello)
    try:
        connection = await AetherConnection.open(near, owner, Watchdog(5), deadline_s=5)
    except BaseException:
        far.close()
        raise
    return connection, owner, far


def operation(directory: Path, kind: str = "shell", limit: int = 1 << 20) -> Operation:
    intent = Intent("op", kind, b"", "default", "", 0.0, limit, False)
    return Operation(Host(), "s", intent, msgspec.msgpack.encode(shell("op", "true")), str(directory))


async def hostile(directory: Path, data: bytes, kind: str = "shell", cuts: int = 0) -> Operation:
    """What an operation has become after aether said `data` and closed; nothing else may be raised."""
    connection, owner, far = await open_one()
    op = operation(directory, kind)
    op.begin(connection)
    op.put(b"input", eof=True)
    loop = asyncio.get_running_loop()
    step = cuts or len(data) or 1
    try:
        for at in range(0, len(data), step):
            await loop.sock_sendall(far, data[at : at + step])
            await asyncio.sleep(0)
    except OSError:
        pass  # it was dropped before the end
    far.close()
    await owner.done.wait()
    assert isinstance(owner.ended, ProtocolError | AetherLost), owner.ended
    for out in (op.stdout, op.stderr):
        if out is not None:
            assert out.held <= w.WINDOW and out.received <= op.intent.output_limit
            out.close()
    return op


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=20)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
bodies = st.one_of(
    st.binary(max_size=64),
    anything.map(msgspec.msgpack.encode),
    st.sampled_from(
        [
            msgspec.msgpack.encode(w.Started(1, False)),
            msgspec.msgpack.encode(w.Started(1, True)),
            msgspec.msgpack.encode(w.Failure("nonsense", "x" * 100, 5)),
            msgspec.msgpack.encode(ENDED),
            msgspec.msgpack.encode([]),
            b"\x05" + b"\0" * 7,
            b"\x91" * 50_000,
            b"\xdd\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
        ]
    ),
)
frames = st.builds(
    frame,
    st.sampled_from([0, 1, 1, 1, 2, 0xFFFFFFFF]),
    st.sampled_from(list(T)) | st.integers(0, 255),
    bodies,
    st.integers(0, 4) | st.integers(0, 255),
)
streams = st.lists(frames, max_size=12).map(b"".join)


@given(streams, st.sampled_from(["shell", "exec", "read_file", "write_file", "stat"]), st.integers(0, 40))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_frames(tmp_path: Path, data: bytes, kind: str, cuts: int) -> None:
    run(_any_frames(tmp_path, data, kind, cuts))


async def _any_frames(directory: Path, data: bytes, kind: str, cuts: int) -> None:
    await hostile(directory / "spool", data, kind, cuts)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_hello(data: bytes) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        far.sendall(data)
        far.close()
        with pytest.raises((ProtocolError, AetherLost, DSecError)):
            await AetherConnection.open(near, Owner(), Watchdog(5), deadline_s=5)

    run(main())


STARTED = message(1, T.STARTED, w.Started(1, False))
RESULT = message(1, T.RESULT, ENDED)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(1, T.DATA, b"x", 1), id="data before started"),
        pytest.param(STARTED + STARTED, id="started twice"),
        pytest.param(STARTED + frame(1, T.DATA, b"x", 3), id="content of a command"),
        pytest.param(STARTED + frame(1, T.DATA, b"x", 0), id="data on stdin"),
        pytest.param(STARTED + frame(1, T.DATA, b"x", 9), id="unknown stream"),
        pytest.param(STARTED + frame(1, T.EOF, b"", 1) + frame(1, T.DATA, b"x", 1), id="data after eof"),
        pytest.param(STARTED + frame(1, T.EOF, b"", 1) * 2, id="eof twice"),
        pytest.param(STARTED + frame(1, T.DATA, bytes(w.WINDOW + 1), 1), id="over the window"),
        pytest.param(STARTED + frame(1, T.ACK, (99).to_bytes(8, "little")), id="ack of what was not sent"),
        pytest.param(STARTED + frame(1, T.ACK, b"1"), id="short ack"),
        pytest.param(frame(0, T.PONG), id="pong unasked"),
        pytest.param(STARTED + RESULT + RESULT, id="result twice"),
        pytest.param(STARTED + RESULT + frame(1, T.DATA, b"x", 1), id="data after the result"),
        pytest.param(frame(7, T.DATA, b"x", 1), id="channel that never was"),
        pytest.param(message(0, T.OPERATIONS, []), id="operations unasked"),
        pytest.param(HELLO, id="hello twice"),
        pytest.param(frame(0, 99), id="unknown type"),
        pytest.param(frame(1, T.START, b""), id="a frame of the edge's"),
        pytest.param(w.HEADER.pack(1 << 30, 1, T.DATA, 1, 0), id="a huge frame"),
        pytest.param(message(1, T.STARTED, ["x", 1]), id="wrong types"),
        pytest.param(frame(1, T.STARTED, b"\x91" * 100_000), id="deep nesting"),
    ],
)
def test_breaches(tmp_path: Path, data: bytes) -> None:
    async def main() -> None:
        connection, owner, far = await open_one()
        op = operation(tmp_path)
        op.begin(connection)
        await asyncio.get_running_loop().sock_sendall(far, data)
        await owner.done.wait()
        assert isinstance(owner.ended, ProtocolError)
        far.close()

    run(main())


def test_output_over_the_limit_is_a_breach(tmp_path: Path) -> None:
    async def main() -> None:
        connection, owner, far = await open_one()
        operation(tmp_path, limit=10).begin(connection)
        await asyncio.get_running_loop().sock_sendall(far, STARTED + frame(1, T.DATA, bytes(11), 1))
        await owner.done.wait()
        assert isinstance(owner.ended, ProtocolError)
        far.close()

    run(main())


def test_late_ack_of_a_forgotten_channel_is_none(tmp_path: Path) -> None:
    async def main() -> None:
        connection, owner, far = await open_one()
        op = operation(tmp_path)
        op.begin(connection)
        ack = frame(1, T.ACK, bytes(8))
        event = message(0, T.EVENT, w.Event("oom_kill", "x", "", 1))
        await asyncio.get_running_loop().sock_sendall(far, STARTED + RESULT + ack + event)
        while not owner.events:
            await asyncio.sleep(0)
        assert owner.ended is None and op.state == "ended"
        connection.close()
        far.close()
        await asyncio.sleep(0)

    run(main())


def test_no_answer_is_noticed(tmp_path: Path) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        far.sendall(HELLO)
        owner, watchdog = Owner(), Watchdog(0.02)
        connection = await AetherConnection.open(near, owner, watchdog, deadline_s=5)
        operation(tmp_path).begin(connection)
        await owner.done.wait()
        assert isinstance(owner.ended, AetherLost)
        watchdog.close()
        far.close()

    run(main())
