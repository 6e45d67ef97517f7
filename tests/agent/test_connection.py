"""The connection: versions, breaches, reconnects; what is kept until the edge has it."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path

import msgspec
import pytest
from tests.agent.wire import Refused, Wire, ack, exec_request, shell_request
from tests.backends.conftest import Rig

from dsec.backends.base import Handle
from dsec.wire import aether as w
from dsec.wire.frames import frame, message

pytestmark = pytest.mark.kernel
Launched = tuple[Handle, Wire]


async def again(rig: Rig, launched: Launched) -> Wire:
    await launched[1].close()
    return await Wire(await rig.backend.connect(launched[0])).open()


async def test_hello(launched: Launched) -> None:
    handle, wire = launched
    hello = wire.hello
    assert hello and (hello.version, hello.oldest, hello.sandbox_id) == (1, 1, handle.sandbox_id)
    assert len(hello.instance) == 16 and hello.instance != bytes(16)
    assert await wire.ping(b"x" * 64) == b"x" * 64


async def test_versions(rig: Rig, launched: Launched) -> None:
    handle, wire = launched
    await wire.close()
    async with Wire(await rig.backend.connect(handle)) as twice:
        twice.send(message(0, w.Type.HELLO, w.Hello(1, 1, "", b"", [])))
        with pytest.raises(EOFError):
            await twice.until(lambda: False)
    other = Wire(await rig.backend.connect(handle))
    await other.open(version=9)
    with pytest.raises(EOFError):
        await other.until(lambda: False)
    assert other.errors[0].code == "version_mismatch"
    await other.close()


BREACHES = {
    "huge": struct.pack("<IIBBH", (1 << 20) + 1, 1, w.Type.DATA, 0, 0),
    "type": struct.pack("<IIBBH", 0, 1, 99, 0, 0),
    "type zero": struct.pack("<IIBBH", 0, 1, 0, 0, 0),
    "reserved": struct.pack("<IIBBH", 0, 1, w.Type.DATA, 0, 1),
    "start on zero": message(0, w.Type.START, exec_request("/bin/true")),
    "config again": frame(0, w.Type.CONFIG, b"x"),
    "long ping": frame(0, w.Type.PING, b"x" * 65),
    "started from the edge": frame(1, w.Type.STARTED, b""),
}


@pytest.mark.parametrize("name", list(BREACHES))
async def test_breaches_close_the_connection_alone(rig: Rig, launched: Launched, name: str) -> None:
    _, wire = launched
    call = await wire.exec("/bin/sleep", "1000").begun()
    wire.send(BREACHES[name])
    with pytest.raises(EOFError):
        await wire.until(lambda: False)
    wire = await again(rig, launched)
    (known,) = await wire.list()
    assert (known.op_id, known.state) == (call.op_id, "running")
    await wire.close()


GARBAGE = [
    b"",
    b"\xc1",
    b"\x90",
    b"\x91\xa4exec",
    b"\x92\xa4exec\xa0",
    b"\x92\xa4exec\xa2id",
    b"\x92\xa4nope\xa2id",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff\xa4exec",
    b"\x9d\xa4exec\xa3id2" + b"\x91" * 1000,
    b"\x9d\xa4exec\xa3id3" + b"\xdd\x00\x0f\xff\xff" + b"\xa0" * 1000,
    b"\x9d\xa4exec\xa3id4\x91\xa4true\x81\xa1A\xa1b\xc4\x05abc",
    b"\x9c\xa5shell\xa3id5\xa1s\xc6\xff\xff\xff\xff",
    b"\x95\xa9read_file\xa3id6",
    b"\x95\xa9read_file\xa3id7\xc0\xc0\xc0",
    msgspec.msgpack.encode(["exec", "x" * 65, ["/bin/true"], {}, "", "", False, False, 0, 0, 0, 0, False]),
    msgspec.msgpack.encode(["exec", "a\0b", ["/bin/true"], {}, "", "", False, False, 0, 0, 0, 0, False]),
    msgspec.msgpack.encode(
        ["exec", "id8", ["/bin/true"], {"": "x"}, "", "", False, False, 0, 0, 0, 0, False]
    ),
    msgspec.msgpack.encode(
        ["exec", "id9", ["/bin/true"], {"A=B": "x"}, "", "", False, False, 0, 0, 0, 0, False]
    ),
    msgspec.msgpack.encode(["exec", "id10", "/bin/true", {}, "", "", False, False, 0, 0, 0, 0, False]),
    msgspec.msgpack.encode(["exec", "id11", ["/bin/true"], {}, "", "", 1, 0, 0, 0, 0, 0, 0]),
]


_NONSENSE = {"invalid_argument", "path_invalid", "unsupported", "user_not_found"}


async def test_requests_that_make_no_sense(launched: Launched) -> None:
    _, wire = launched
    for payload in GARBAGE:
        call = wire.call()
        wire.send(frame(call.channel, w.Type.START, payload))
        with pytest.raises(Refused) as caught:
            await call.result()
        assert caught.value.code in _NONSENSE, payload
        call.forget()
    assert await wire.list() == []
    for type_ in (w.Type.ATTACH,):
        for payload in GARBAGE:
            call = wire.call()
            wire.send(frame(call.channel, type_, payload))
            with pytest.raises(Refused):
                await call.result()
    assert (await wire.run("/bin/true"))[0].exit_code == 0


async def test_fields_past_those_known_are_ignored(launched: Launched) -> None:
    _, wire = launched
    call = wire.call()
    fields = ["exec", call.op_id, ["/bin/echo", "x"], {}, "", "", False, False, 0, 0, 0, 100, False]
    wire.send(
        frame(call.channel, w.Type.START, msgspec.msgpack.encode([*fields, {"new": [1, 2.5, None]}, 7]))
    )
    assert (await call.end()).exit_code == 0 and call.stdout == b"x\n"


async def test_late_frames_are_ignored(launched: Launched) -> None:
    _, wire = launched
    call = wire.exec("/bin/true", stdin=True)
    await call.end()
    call.signal(9)
    call.resize(1, 1)
    call.forget()
    call.eof()
    wire.send(ack(call.channel, 1, 1000))
    assert await wire.ping() == b"ping"
    call = wire.exec("/bin/true", stdin=True)
    await call.result()
    call.write(b"late")
    await call.until(lambda c: c.taken == 4)
    call.signal(9)
    call.resize(1, 1)
    call.forget()
    assert await wire.list() == []


async def test_forget_of_what_runs(launched: Launched) -> None:
    _, wire = launched
    call = wire.exec("/bin/cat", stdin=True)
    await call.begun()
    call.forget()
    with pytest.raises(Refused) as caught:
        await call.end()
    assert caught.value.code == "wrong_state"
    call.failure = None
    call.write(b"still")
    call.eof()
    assert (await call.end()).exit_code == 0 and call.stdout == b"still"


async def test_acks_that_make_no_sense(launched: Launched) -> None:
    _, wire = launched
    call = wire.sh("printf abc; printf def >&2; read x; echo end", stdin=True, hold=True)
    await call.until(lambda c: c.stdout == b"abc" and c.stderr == b"def")
    for stream in range(6):
        for offset in (4, 1 << 63, (1 << 64) - 1):
            wire.send(ack(call.channel, stream, offset))
        wire.send(frame(call.channel, w.Type.ACK, b"short", stream))
    wire.send(ack(call.channel, 1, 3))
    wire.send(ack(call.channel, 1, 1))
    call.write(b"\n")
    await call.result()
    assert call.stdout == b"abcend\n" and call.stderr == b"def"


async def test_same_id_is_not_started_again(launched: Launched) -> None:
    _, wire = launched
    request = exec_request("/bin/sh", "-c", "echo ran >>/tmp/ran; echo out; read x; echo $x", stdin=True)
    first = wire.start(request, hold=True)
    await first.seen(b"out\n")
    second = wire.start(request)
    await second.seen(b"out\n")
    assert second.started == w.Started(first.started.pid if first.started else 0, True)
    second.write(b"more\n")
    assert (await second.result()) and second.stdout == b"out\nmore\n"
    third = wire.start(request)
    await third.result()
    assert third.started and third.started.known
    third.forget()
    _, out, _ = await wire.run("/bin/cat", "/tmp/ran")
    assert out == b"ran\n"


async def test_nothing_is_lost_with_a_connection(rig: Rig, launched: Launched) -> None:
    _, wire = launched
    held = wire.exec("/bin/seq", "200000", hold=True)
    ended = wire.sh("printf out; printf err >&2; exit 3", hold=True)
    failed = wire.exec("/no/such")
    running = wire.sh("read x; echo got $x", stdin=True)
    session = wire.shell("cd /opt; sleep 0.3; echo $PWD; exit 9")
    await held.until(lambda c: c.received(1) >= w.WINDOW)
    await ended.result()
    with pytest.raises(Refused):
        await failed.result()
    await running.begun()
    await session.begun()
    head = held.stdout
    wire.send(ack(held.channel, 1, 1000))
    await wire.ping()
    wire = await again(rig, launched)
    known = {k.op_id: (k.kind, k.state) for k in await wire.list()}
    assert known == {
        held.op_id: ("exec", "running"),
        ended.op_id: ("exec", "ended"),
        failed.op_id: ("exec", "ended"),
        running.op_id: ("exec", "running"),
        session.op_id: ("shell", known[session.op_id][1]),
    }
    with pytest.raises(Refused) as caught:
        await wire.attach(held.op_id, 999).result()
    assert caught.value.code == "invalid_argument"
    held = wire.attach(held.op_id, 5000)
    assert (await held.end()).exit_code == 0
    assert head[:5000] + held.stdout == b"".join(b"%d\n" % i for i in range(1, 200001))
    ended = wire.attach(ended.op_id)
    assert (await ended.end()).exit_code == 3 and (ended.stdout, ended.stderr) == (b"out", b"err")
    with pytest.raises(Refused) as caught:
        await wire.attach(failed.op_id).result()
    assert caught.value.code == "program_not_found"
    running = wire.attach(running.op_id)
    await running.until(lambda c: c.taken == 0)
    running.write(b"it\n")
    assert (await running.end()).exit_code == 0 and running.stdout == b"got it\n"
    session = wire.attach(session.op_id)
    assert (await session.end()).exit_code == 9 and session.stdout == b"/opt\n"
    with pytest.raises(Refused) as caught:
        await wire.attach("never-was").result()
    assert caught.value.code == "operation_not_found"
    await wire.close()


async def test_input_goes_on_after_a_new_connection(rig: Rig, launched: Launched) -> None:
    _, wire = launched
    data = os.urandom(3_000_000)
    call = wire.exec("/bin/sh", "-c", "sleep 0.2; sha256sum", stdin=True)
    op_id, taken = call.op_id, 0
    call.write(data[: 1 << 19])
    await call.until(lambda c: (c.taken or 0) > 0)
    for _ in range(3):
        wire = await again(rig, (launched[0], wire))
        call = wire.attach(op_id)
        await call.until(lambda c: c.taken is not None)
        taken = call.taken or 0
        call.write(data[taken : taken + (1 << 19)])
        await call.until(lambda c, taken=taken: (c.taken or 0) > taken)
    taken = call.taken or 0
    sent = min(len(data), taken + (1 << 18))
    wire = await again(rig, (launched[0], wire))
    call = wire.attach(op_id)
    await call.until(lambda c: c.taken is not None)
    sent = call.taken or 0
    while sent < len(data):
        call.write(data[sent : sent + (1 << 18)])
        sent = min(len(data), sent + (1 << 18))
        await call.until(lambda c, sent=sent: (c.taken or 0) >= sent - (1 << 18))
    call.eof()
    assert (await call.end()).exit_code == 0
    import hashlib

    assert call.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    await wire.close()


async def test_input_that_had_ended_before(rig: Rig, launched: Launched) -> None:
    """EOF that was had, and EOF that is said again on the new connection."""
    _, wire = launched
    call = wire.exec("/bin/sh", "-c", "cat; sleep 0.5; echo end", stdin=True)
    call.write(b"data")
    call.eof()
    await call.seen(b"data")
    wire = await again(rig, launched)
    call = wire.attach(call.op_id, 4)
    await call.until(lambda c: c.taken == 4)
    call.eof()
    assert (await call.end()).exit_code == 0 and call.stdout == b"end\n"
    session = wire.shell("cat; sleep 0.5; echo end", stdin=True)
    session.write(b"data")
    session.eof()
    await session.seen(b"data")
    wire = await again(rig, (launched[0], wire))
    session = wire.attach(session.op_id, 4)
    await session.until(lambda c: c.taken == 4)
    session.eof()
    assert (await session.end()).exit_code == 0 and session.stdout == b"end\n"
    await wire.close()


async def test_reconnects_in_a_row(rig: Rig, launched: Launched) -> None:
    handle, wire = launched
    call = wire.exec("/bin/sh", "-c", "read x; echo $x", stdin=True)
    await call.begun()
    for _ in range(20):
        wire = await again(rig, (handle, wire))
        assert [k.op_id for k in await wire.list()] == [call.op_id]
    fds = len(os.listdir(f"/proc/{handle.pid}/fd"))
    for _ in range(20):
        wire = await again(rig, (handle, wire))
    assert len(os.listdir(f"/proc/{handle.pid}/fd")) == fds
    again_call = wire.attach(call.op_id)
    await again_call.until(lambda c: c.taken == 0)
    again_call.write(b"x\n")
    assert (await again_call.end()).exit_code == 0
    await wire.close()


async def test_an_edge_that_does_not_read(rig: Rig, launched: Launched) -> None:
    """aether holds a bounded amount for it, and what runs meanwhile waits."""
    handle, wire = launched
    calls = [wire.exec("/bin/yes", hold=True, output_limit=1 << 40) for _ in range(8)]
    await asyncio.gather(*(c.until(lambda c: c.received(1) >= w.WINDOW) for c in calls))
    if "asan" not in os.environ.get("DSEC_AGENT", ""):
        assert _private_kib(handle.pid) < 8 * 2 * (w.WINDOW >> 10) + 2048
    for call in calls:
        call.hold = False
        call.signal(9)
        call.acknowledge(1)
    for call in calls:
        assert (await call.end()).reason == "killed"


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return fields["Private_Dirty"] + fields["Private_Clean"]


async def test_idle_costs_little(launched: Launched) -> None:
    """Nothing that was in use for a while stays: not memory, not descriptors."""
    handle, wire = launched
    before = _private_kib(handle.pid)
    fds = len(os.listdir(f"/proc/{handle.pid}/fd"))
    for _ in range(3):
        _, out, _ = await wire.run("/bin/head", "-c", "3000000", "/dev/zero")
        assert len(out) == 3_000_000
        call = wire.exec("/bin/cat", stdin=True)
        call.write(b"x" * 500_000)
        call.eof()
        await call.end()
        await wire.shell("head -c 1000000 /dev/zero; sleep 0.01 & sleep 100", timeout_ms=100).end()
    close = w.CloseSession(op_id="close", session="default")
    closed = wire.start(close)
    await closed.result()
    closed.forget()
    await wire.ping()
    assert await wire.list() == []
    async with asyncio.timeout(20):
        while len(os.listdir(f"/proc/{handle.pid}/fd")) > fds:
            await wire.run("/bin/true")
    if "asan" not in os.environ.get("DSEC_AGENT", ""):
        assert _private_kib(handle.pid) <= before + 100


async def test_bye(rig: Rig, launched: Launched) -> None:
    handle, wire = launched
    call = wire.sh("trap 'echo asked >/tmp/x; exit 0' TERM; echo ready; while :; do sleep 0.02; done")
    await call.seen(b"ready")
    stubborn = wire.sh("trap '' TERM; echo ready; while :; do sleep 0.02; done")
    await stubborn.seen(b"ready")
    wire.send(frame(0, w.Type.BYE, struct.pack("<I", 300)))
    with pytest.raises(EOFError):
        await wire.until(lambda: False)
    exit_ = await asyncio.wait_for(rig.backend.wait_exit(handle), 20)
    assert exit_.signal in (0, None) and not exit_.host_oom


async def test_a_shell_request_on_another_edges_session(rig: Rig, launched: Launched) -> None:
    """Sessions outlive the connection that began them."""
    _, wire = launched
    await wire.text("cd /opt; B=2")
    wire = await again(rig, launched)
    assert await wire.text("echo $PWD $B") == "/opt 2"
    call = wire.start(shell_request("echo again"))
    assert (await call.end()).exit_code == 0
    await wire.close()
