"""Time and size limits on what a connection may do, and random input to the parsers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.apiserver.stack import StackServer

from dsec.apiserver import http as http_module
from dsec.apiserver import server as server_module
from dsec.apiserver.convert import command_request
from dsec.apiserver.http import Request, decode
from dsec.core.errors import InvalidArgument, PayloadTooLarge
from dsec.core.specs import SandboxSpec, validate
from dsec.wire import aether as w
from dsec.wire import api


async def connect(server: StackServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX-Slow:"])
async def test_headers_that_do_not_come(server, monkeypatch, first):
    monkeypatch.setattr(server_module, "HEADERS_S", 0.05)
    reader, writer = await connect(server)
    writer.write(first)
    async with asyncio.timeout(20):
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass
    writer.close()


async def test_headers_that_stop_coming_on_a_used_connection(server, monkeypatch):
    monkeypatch.setattr(server_module, "HEADERS_S", 0.05)
    reader, writer = await connect(server)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    writer.write(b"GET /healthz HTTP/1.1\r\nHost:")
    async with asyncio.timeout(20):
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass
    writer.close()


async def test_a_body_that_stops(server, monkeypatch):
    monkeypatch.setattr(http_module, "BODY_PAUSE_S", 0.05)
    reader, writer = await connect(server)
    head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    writer.write(head.encode() + b"Content-Length: 100\r\n\r\n{")
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 400")
    writer.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def bodies(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly its own fields, with odd values."""
    odd = JSON | st.sampled_from(
        ["true", ["true"], 0, -1, 1e308, "\0", "x" * 300, {"data": "/w==", "encoding": "base64"}]
    )
    names = [f.encode_name for f in msgspec.structs.fields(kind)]
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=5), odd, max_size=6)


@given(bodies(api.ExecRequest))
def test_random_exec(body: dict[str, Any]) -> None:
    body = {"argv": ["true"], **body}
    decoder = msgspec.json.Decoder(api.ExecRequest)
    try:
        request = command_request(decode(decoder, json.dumps(body).encode(errors="surrogatepass")))
    except (InvalidArgument, PayloadTooLarge):
        return
    assert isinstance(request, w.Exec) and 0 <= request.timeout_ms < 1 << 40
    assert len(msgspec.msgpack.encode(request)) <= w.MAX_PAYLOAD


@given(bodies(SandboxSpec))
def test_random_spec(spec: dict[str, Any]) -> None:
    body = {"spec": {"image": "base", **spec}}
    decoder = msgspec.json.Decoder(api.CreateRequest)
    try:
        validate(decode(decoder, json.dumps(body).encode(errors="surrogatepass")).spec)
    except InvalidArgument:
        pass


@given(
    st.binary(max_size=60)
    | st.lists(
        st.sampled_from([b"path=", b"mode=", b"n=", b"f=", b"&", b"%", b"/", b"00", b"+", b"-1"]), max_size=8
    ).map(b"".join)
)
def test_random_query(query: bytes) -> None:
    async def nothing(*_: Any) -> Any:
        return {}

    request = Request({"query_string": query, "headers": []}, nothing, nothing)
    for read in (
        lambda: request.path(),
        lambda: request.octal("mode"),
        lambda: request.number("n", 0, 0, 10),
        lambda: request.seconds("n", 0.0, 10),
        lambda: request.flag("f"),
        lambda: request.texts("path"),
    ):
        try:
            read()
        except InvalidArgument:
            pass
