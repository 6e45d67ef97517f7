"""Connections to ports inside, at aether itself: it alone connects, and only to loopback addresses."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.agent.wire import Call, Refused, Wire

from dsec.wire import aether as w

pytestmark = pytest.mark.kernel
SOURCE = Path(__file__).with_name("listener.c")
CONTENT = w.Stream.CONTENT
_serial = itertools.count(1)


@pytest.fixture(scope="session")
def listener(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The program."""
    built = tmp_path_factory.mktemp("listener") / "listener"
    compiler = shutil.which("musl-gcc") or "gcc"
    subprocess.run([compiler, "-static", "-O1", "-o", str(built), str(SOURCE)], check=True, timeout=60)
    subprocess.run(["strip", str(built)], check=True, timeout=60)
    return built.read_bytes()


@pytest.fixture
async def serving(wire: Wire, listener: bytes):  # type: ignore[no-untyped-def]
    """`await serving(mode, port)`: the program serves inside."""
    put = wire.sh("cat >/tmp/listener && chmod 755 /tmp/listener", stdin=True)
    await put.begun()
    put.write(listener)
    put.eof()
    assert (await put.end()).exit_code == 0

    async def serve(mode: str, port: int, address: str = "127.0.0.1") -> Call:
        call = wire.exec("/tmp/listener", mode, address, str(port))
        await call.seen(b"ready")
        return call

    return serve


def dial(wire: Wire, port: int, address: str = "", timeout_ms: int = 10_000, *, hold: bool = False) -> Call:
    return wire.start(w.Dial(f"dial-{next(_serial)}", address, port, timeout_ms), hold=hold)


async def over(call: Call) -> None:
    assert msgspec.msgpack.decode(await call.result(), type=w.Done).ok
    assert call.ended_streams == [CONTENT]
    call.forget()


async def only(wire: Wire, *calls: Call) -> None:
    """No dial is left but these."""
    known = {k.op_id for k in await wire.list() if k.kind == "dial"}
    assert known == {c.op_id for c in calls}


async def test_both_ways_and_their_ends(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    await serving("echo", 4000)
    call = await dial(wire, 4000).begun()
    data = bytes(range(256)) * 4096
    call.write(data)
    await call.until(lambda c: c.received(CONTENT) == len(data))
    assert bytes(call.output[CONTENT]) == data and call.taken == len(data)
    call.eof()
    await over(call)
    await only(wire)


async def test_input_may_come_before_it_stands(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    await serving("echo", 4000)
    call = dial(wire, 4000)
    call.write(b"early")
    call.eof()
    await over(call)
    assert bytes(call.output[CONTENT]) == b"early"


async def test_the_port_may_end_first(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    server = await serving("talk", 4000)
    call = await dial(wire, 4000).begun()
    await call.until(lambda c: c.ended_streams == [CONTENT])
    assert bytes(call.output[CONTENT]) == bytes(i % 251 for i in range(3_000_000))
    assert call.raw_result is None, "the other way is still open"
    call.write(b"x" * 1000)
    call.eof()
    await over(call)
    await server.seen(b"got 1000\n")


async def test_what_is_not_acknowledged_stops_the_port(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    await serving("talk", 4000)
    call = await dial(wire, 4000, hold=True).begun()
    await call.until(lambda c: c.received(CONTENT) == w.WINDOW)
    assert await wire.ping() == b"ping"
    assert call.received(CONTENT) == w.WINDOW
    call.hold = False
    call.acknowledge(CONTENT)
    await call.until(lambda c: c.received(CONTENT) == 3_000_000)
    call.eof()
    await over(call)


async def test_a_port_that_reads_nothing_stops_the_sender(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    await serving("hold", 4000)
    call = await dial(wire, 4000).begun()
    call.write(b"x" * w.UPLOAD_WINDOW)
    await call.until(lambda c: c.taken)
    assert await wire.ping() == b"ping"
    call.signal(9)
    with pytest.raises(Refused, match="cancelled"):
        await call.result()
    call.forget()
    await only(wire)


async def test_torn_from_inside(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    await serving("reset", 4000)
    call = await dial(wire, 4000).begun()
    call.write(b"x")
    with pytest.raises(Refused, match="port_reset: port 4000 inside: Connection reset"):
        await call.result()
    call.forget()
    await only(wire)


async def test_addresses(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    await serving("echo", 4000, "127.0.0.5")
    with pytest.raises(Refused, match="port_refused"):
        await dial(wire, 4000).begun()
    call = await dial(wire, 4000, "127.0.0.5").begun()
    call.eof()
    await over(call)
    await serving("echo", 4001, "::1")
    for address in ("", "::1"):
        call = await dial(wire, 4001, address).begun()
        call.eof()
        await over(call)
    with pytest.raises(Refused, match="port_refused"):
        await dial(wire, 4001, "127.0.0.1").begun()


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1", "fe80::1", "localhost", "127.1", "x" * 4000]
)
async def test_no_other_addresses(wire: Wire, address: str) -> None:
    with pytest.raises(Refused, match="invalid_argument: dial: only loopback addresses"):
        await dial(wire, 80, address).begun()


@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 40])
async def test_no_such_ports(wire: Wire, port: int) -> None:
    with pytest.raises(Refused, match="invalid_argument"):
        await dial(wire, port).begun()


async def test_one_that_never_accepts(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    await serving("deaf", 4000)
    first = await dial(wire, 4000).begun()  # what the kernel's queue holds
    with pytest.raises(Refused, match="deadline_exceeded"):
        await dial(wire, 4000, timeout_ms=200).begun()
    waits = dial(wire, 4000)
    waits.signal(9)
    with pytest.raises(Refused, match="cancelled"):
        await waits.begun()
    first.signal(9)
    with pytest.raises(Refused, match="cancelled"):
        await first.result()


async def test_many_at_once(wire: Wire, serving) -> None:  # type: ignore[no-untyped-def]
    await serving("echo", 4000)
    calls = await asyncio.gather(*(dial(wire, 4000).begun() for _ in range(60)))
    for i, call in enumerate(calls):
        call.write(b"%d" % i)
    for call in calls:
        call.eof()
    for i, call in enumerate(calls):
        await over(call)
        assert bytes(call.output[CONTENT]) == b"%d" % i
    await only(wire)
