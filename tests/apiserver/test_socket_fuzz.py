"""Raw frames of WebSockets, well-formed and not: none crashes the server, hangs, or leaves anything."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.apiserver.stack import StackServer

from dsec.client import Sandbox
from dsec.wire import api

END_S = 20.0
"""A connection that lives longer than this after its client has said all is hung."""


def masked(payload: bytes, opcode: int, *, fin: bool = True, rsv: int = 0, mask: bool = True) -> bytes:
    first = (0x80 if fin else 0) | rsv << 4 | opcode
    n, bit = len(payload), 0x80 if mask else 0
    head = struct.pack("!BB", first, bit | (n if n < 126 else 126)) + (
        struct.pack("!H", n) if n >= 126 else b""
    )
    key = b"\x01\x02\x03\x04"
    body = bytes(b ^ key[i % 4] for i, b in enumerate(payload)) if mask else payload
    return head + (key if mask else b"") + body


header = st.builds(
    lambda stream, offset, data: api.ATTACH_HEADER.pack(stream, offset) + data,
    st.integers(0, 255),
    st.one_of(st.integers(0, 64), st.integers(0, (1 << 64) - 1)),
    st.binary(max_size=300),
)
control = st.sampled_from(
    [
        b'{"t":"in_eof"}',
        b'{"t":"signal","signal":9}',
        b'{"t":"signal","signal":-1}',
        b'{"t":"resize","rows":0,"columns":99999}',
        b'{"t":"ack"}',
        b'{"t":' + b"[" * 5000,
        b"\xff\xfe",
        b'{"kind":"exec","argv":["/bin/cat"],"open_input":true}',
        b'{"kind":"exec","argv":[]}',
        b'{"kind":"shell","command":"cat"}',
        b"",
    ]
)
frames = st.lists(
    st.one_of(
        st.builds(masked, header, st.just(2)),
        st.builds(masked, control, st.just(1)),
        st.builds(
            masked,
            st.binary(max_size=300),
            st.integers(0, 15),
            fin=st.booleans(),
            rsv=st.integers(0, 7),
            mask=st.booleans(),
        ),
        st.binary(max_size=40),
        st.just(struct.pack("!BBQ", 0x82, 0xFF, 1 << 40)),
    ),
    max_size=8,
)


async def upgrade(server: StackServer, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    lines = (
        f"GET {path} HTTP/1.1",
        "Host: dsec",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
        f"Authorization: Bearer {server.token}",
    )
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
    return reader, writer


@pytest.mark.parametrize(
    "path",
    ["/operations/op-fuzz/attach?start=1&stdin_from=0", "/operations/op-none/attach", "/files/watch?path=/"],
)
async def test_frames(server: StackServer, sandbox: Sandbox, caplog: Any, path: str) -> None:
    caplog.set_level(logging.ERROR)
    seen = 0

    async def one(said: list[bytes]) -> None:
        nonlocal seen
        seen += 1
        reader, writer = await upgrade(
            server, f"/v1/sandboxes/{sandbox.id}{path}".replace("op-fuzz", f"op-{seen}")
        )
        writer.write(b"".join(said))
        writer.write_eof()
        try:
            async with asyncio.timeout(END_S):
                while await reader.read(1 << 16):
                    pass
        except ConnectionError:
            pass
        finally:
            writer.close()

    loop = asyncio.get_running_loop()

    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(said=frames)
    def run(said: list[bytes]) -> None:
        asyncio.run_coroutine_threadsafe(one(said), loop).result(END_S + 10)

    await asyncio.to_thread(run)
    assert [r.getMessage() for r in caplog.records] == []
    assert (await sandbox.exec(["echo", "well"])).stdout == b"well\n"
    async with asyncio.timeout(END_S):
        while server.server._server.server_state.connections and _open(server) > 1:  # the client's own
            await asyncio.sleep(0.01)


def _open(server: StackServer) -> int:
    return sum(not c.transport.is_closing() for c in server.server._server.server_state.connections)
