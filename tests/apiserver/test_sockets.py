"""The WebSockets as any client meets them."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from dsec.apiserver.watch import WatchReader
from dsec.core.errors import ProtocolError
from dsec.wire import api


@pytest.fixture
async def connect(server, sandbox):
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        def to(path: str) -> Any:
            return session.ws_connect(f"{server.url}/v1/sandboxes/{sandbox.id}{path}")

        yield to


async def told(ws: aiohttp.ClientWebSocketResponse) -> tuple[bytes, list[Any]]:
    """All bytes of stdout, all control messages, to the close."""
    out, control = b"", []
    async for message in ws:
        if message.type is aiohttp.WSMsgType.BINARY:
            stream, offset = api.ATTACH_HEADER.unpack_from(message.data)
            assert (stream, offset) == (1, len(out))
            out += message.data[api.ATTACH_HEADER.size :]
        else:
            control.append(json.loads(message.data))
    return out, control


def frame(offset: int, data: bytes, stream: int = 0) -> bytes:
    return api.ATTACH_HEADER.pack(stream, offset) + data


async def test_start_feed_and_end(connect):
    async with connect("/operations/op-1/attach?start=1&stdin_from=0") as ws:
        await ws.send_str(json.dumps({"kind": "exec", "argv": ["/bin/cat"], "open_input": True}))
        await ws.send_bytes(frame(0, b"one\n"))
        await ws.send_bytes(frame(4, b"two\n"))
        await ws.send_str(json.dumps({"t": "in_eof"}))
        out, control = await told(ws)
    assert out == b"one\ntwo\n"
    assert [c["t"] for c in control][-1] == "end"
    assert control[-1]["operation"]["result"]["reason"] == "exited"
    async with connect("/operations/op-1/attach?stdout_from=0") as ws:
        assert (await told(ws))[0] == out


async def test_kill_and_resize(connect):
    async with connect("/operations/op-k/attach?start=1&stdin_from=0") as ws:
        request = {"kind": "exec", "argv": ["/bin/cat"], "tty": True, "open_input": True}
        await ws.send_str(json.dumps(request))
        await ws.send_str(json.dumps({"t": "resize", "rows": 10, "columns": 20}))
        await ws.send_str(json.dumps({"t": "kill", "signal": 9}))
        _, control = await told(ws)
    assert control[-1]["operation"]["state"] == "ended"


@pytest.mark.parametrize(
    ("query", "messages", "code"),
    [
        ("", [], "operation_not_found"),
        ("?stdout_from=-1", [], "invalid_argument"),
        ("?odd=1", [], "invalid_argument"),
        ("?start=1", ["no json"], "invalid_argument"),
        ("?start=1", [b"bytes"], "invalid_argument"),
        ("?start=1", [{"kind": "exec", "argv": []}], "invalid_argument"),
        ("?start=1", [{"kind": "exec", "argv": ["x"], "op_id": "other"}], "invalid_argument"),
        ("?start=1", [{"kind": "other"}], "invalid_argument"),
        ("?start=1", [{"kind": "exec", "argv": ["/bin/cat"]}, b"\0"], "invalid_argument"),
        (
            "?start=1&stdin_from=0",
            [{"kind": "exec", "argv": ["/bin/cat"], "open_input": True}, b"\0"],
            "invalid_argument",
        ),
        (
            "?start=1&stdin_from=0",
            [{"kind": "exec", "argv": ["/bin/cat"], "open_input": True}, frame(7, b"gap")],
            "invalid_argument",
        ),
        (
            "?start=1&stdin_from=0",
            [
                {"kind": "exec", "argv": ["/bin/cat"], "open_input": True},
                {"t": "resize", "rows": 0, "columns": 1},
            ],
            "invalid_argument",
        ),
        (
            "?start=1&stdin_from=0",
            [{"kind": "exec", "argv": ["/bin/cat"], "open_input": True}, {"t": "what"}],
            "invalid_argument",
        ),
    ],
)
async def test_wrong_messages(connect, sandbox, query, messages, code):
    async with connect("/operations/op-w/attach" + query) as ws:
        for message in messages:
            if isinstance(message, bytes):
                await ws.send_bytes(message)
            else:
                await ws.send_str(message if isinstance(message, str) else json.dumps(message))
        _, control = await told(ws)
    assert control[-1]["t"] == "error" and control[-1]["error"]["code"] == code
    assert ws.close_code == 4000


async def test_message_over_the_limit(connect, sandbox):
    async with connect("/operations/op-b/attach?start=1&stdin_from=0") as ws:
        request = {"kind": "exec", "argv": ["/bin/cat"], "open_input": True}
        await ws.send_str(json.dumps(request))
        await ws.send_bytes(frame(0, b"x" * (3 << 20)))
        await told(ws)
    assert ws.close_code == 1009
    assert (await sandbox.run_shell("echo fine")).ok


async def test_no_token(server, sandbox):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as e:
            await session.ws_connect(f"{server.url}/v1/sandboxes/{sandbox.id}/operations/x/attach")
        assert e.value.status == 401


def test_watch_events_are_cut_where_they_end() -> None:
    import msgspec

    events = [
        ["created", b"/a"],
        ["moved_to", b"/" + b"x" * 300],
        ["overflow", b""],
        ["attrib", b"/b"],
    ]
    data = b"".join(msgspec.msgpack.encode(e) for e in events)
    data += b"\x92\xdb\0\0\0\x01x\xc6\0\0\0\x02/y"
    events.append(["x", b"/y"])
    for step in (1, 2, 7, len(data)):
        reader = WatchReader()
        got = [e for at in range(0, len(data), step) for e in reader.feed(data[at : at + step])]
        assert got == [(e[0], e[1]) for e in events]


@pytest.mark.parametrize("data", [b"\x93abc", b"\x92\x01\x02", b"\x92\xc5\xff\xff" + b"x" * 70_000 + b"\x00"])
def test_wrong_watch_events(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        WatchReader().feed(data)
