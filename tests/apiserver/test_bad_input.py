"""What strangers and clumsy callers send: a typed error each, and never a 200 for a failure."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest
from tests.apiserver.stack import StackServer, args
from yarl import URL

from dsec.backends.base import Exit
from dsec.client import DSecClient, Sandbox
from dsec.core import errors


class Http:
    """Bare HTTP."""

    def __init__(self, server: StackServer) -> None:
        self.url = server.url
        self.headers = {"Authorization": f"Bearer {server.token}"}

    async def __aenter__(self) -> Http:
        self.session = aiohttp.ClientSession(headers=self.headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def __call__(self, method: str, path: str, **how: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **how) as answer:
            return answer.status, json.loads(await answer.read())


@pytest.fixture
async def http(server: StackServer):
    async with Http(server) as made:
        yield made


def error(answer: tuple[int, Any]) -> tuple[int, str]:
    status, body = answer
    assert set(body["error"]) <= {"code", "message", "retry", "details"}
    assert body["error"]["message"]
    return status, body["error"]["code"]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic abc", "Bearer dsec_\u00ff", "x" * 9000]
)
@pytest.mark.parametrize("path", ["/v1/sandboxes", "/v1/nothing", "/v1/node"])
async def test_tokens(server, header, path):
    headers = {} if header is None else {"Authorization": header}
    async with (
        aiohttp.ClientSession() as session,
        session.get(server.url + path, headers=headers) as answer,
    ):
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await answer.json())["error"]["code"] == "unauthenticated"


async def test_public(server):
    async with aiohttp.ClientSession() as session:
        for path in ("/healthz", "/openapi.json"):
            async with session.get(server.url + path) as answer:
                assert answer.status == 200


async def test_scoped_token(server, client):
    async with server.client(token=server.tokens.create("narrow", "mine")) as narrow:
        other = await client.run_container(args(project="theirs"))
        mine = await narrow.run_container(args(project="mine"))
        assert [s.id async for s in narrow.list_sandboxes()] == [mine.id]
        assert (await mine.run_shell("true")).ok
        with pytest.raises(errors.PermissionDenied):
            await narrow.run_container(args(project="theirs"))
        with pytest.raises(errors.PermissionDenied):
            await narrow.get_sandbox(other.id)
        with pytest.raises(errors.PermissionDenied):
            await other.__class__(narrow._connection, other.info).run_shell("true")
        with pytest.raises(errors.PermissionDenied):
            async for _ in narrow.list_sandboxes(project="theirs"):
                pass


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"spec":{}}',
        b'{"spec":{"image":"base"},"extra":1}',
        b'{"spec":{"image":"base","memory_limit_mb":"much"}}',
        b'{"spec":{"image":"base","memory_limit_mb":-1}}',
        b'{"spec":{"image":"base","memory_limit_mb":1e400}}',
        b'{"spec":{"image":"base","memory_limit_mb":123456789012345678901234567890}}',
        b'{"spec":{"image":"base","cpu_cores_limit":0}}',
        b'{"spec":{"image":"base","cpu_cores_limit":NaN}}',
        b'{"spec":{"image":"base","ttl_max":-5}}',
        b'{"spec":{"image":"base","env":{"A=B":"c"}}}',
        b'{"spec":{"image":"base","env":{"A":"\\u0000"}}}',
        b'{"spec":{"image":"base","backend":"none"}}',
        b'{"spec":{"image":"../../etc"}}',
        b'{"spec":{"image":"base"},"timeout_s":0}',
        b'{"spec":{"image":"base"},"timeout_s":-1}',
        b'{"spec":{"image":"\xff"}}',
        b'{"spec":{"image":"base","task":"\\ud800"}}',
        b"[" * 100_000,
    ],
)
async def test_creation_bodies(http, client, body):
    status, code = error(await http("POST", "/v1/sandboxes", data=body))
    assert status == 400 and code == "invalid_argument"
    assert [s async for s in client.list_sandboxes()] == []


async def test_unknown_layer(http):
    body = {"spec": {"image": "unknown", "backend": "fake"}}
    assert error(await http("POST", "/v1/sandboxes", json=body)) == (404, "unknown_layer")


@pytest.mark.parametrize("count", [0, -1, 10**9, 1.5, "x", None])
async def test_batch_counts(http, count):
    body = {"spec": {"image": "base", "backend": "fake"}, "count": count}
    assert error(await http("POST", "/v1/sandboxes:batch", json=body)) == (400, "invalid_argument")


@pytest.mark.parametrize(
    ("sandbox_id", "expected"),
    [
        ("nothing", (400, "invalid_argument")),
        ("sbx-e1-aaaaaaaaaaaa", (404, "sandbox_not_found")),
        ("sbx-other-aaaaaaaaaaaa", (404, "wrong_edge")),
        ("sbx-e1-AAAAAAAAAAAA", (400, "invalid_argument")),
        ("%00", (400, "invalid_argument")),
        ("sbx-e1-aaaaaaaaaaaa%0a", (400, "invalid_argument")),
        ("..", (400, "invalid_argument")),
    ],
)
async def test_ids(http, sandbox_id, expected):
    url = URL(f"{http.url}/v1/sandboxes/{sandbox_id}", encoded=True)
    async with http.session.get(url) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == expected


async def test_paths_and_methods(http):
    assert error(await http("GET", "/nothing")) == (404, "not_found")
    assert error(await http("GET", "/v1/sandboxes/x/y/z/w/v")) == (404, "not_found")
    assert error(await http("PUT", "/v1/sandboxes", data=b"")) == (405, "invalid_argument")
    assert error(await http("GET", "/v1/sandboxes?nothing=1")) == (400, "invalid_argument")
    for query in ("limit=0", "limit=x", "limit=99999999999999999999", "state=odd", "label=x", "limit=1e3"):
        assert error(await http("GET", f"/v1/sandboxes?{query}")) == (400, "invalid_argument")


@pytest.mark.parametrize(
    "body",
    [
        {"argv": []},
        {"argv": "true"},
        {"argv": ["a\0"]},
        {"argv": [{"data": "!", "encoding": "base64"}]},
        {"argv": ["true"], "op_id": "a/b"},
        {"argv": ["true"], "op_id": "x" * 65},
        {"argv": ["true"], "timeout_s": -1},
        {"argv": ["true"], "timeout_s": 1e300},
        {"argv": ["true"], "output_limit": -1},
        {"argv": ["true"], "output_limit": 1 << 40},
        {"argv": ["true"], "wait_s": -1},
        {"argv": ["true"], "rows": 0, "tty": True},
        {"argv": ["true"], "user": "a b"},
        {"argv": ["true"], "env": {"": "x"}},
        {"argv": ["true"], "kind": "shell"},
        {"command": "true"},
    ],
)
async def test_exec_bodies(http, sandbox, body):
    assert error(await http("POST", f"/v1/sandboxes/{sandbox.id}/exec", json=body)) == (
        400,
        "invalid_argument",
    )


async def test_failures_have_their_status(http, sandbox):
    base = f"/v1/sandboxes/{sandbox.id}"
    body = {"argv": ["/none"], "op_id": "op-none"}
    assert error(await http("POST", base + "/exec", json=body)) == (400, "program_not_found")
    status, answer = await http("GET", base + "/operations/op-none")
    assert status == 400 and answer["operation"]["op_id"] == "op-none"
    assert error(await http("GET", base + "/operations/op-other")) == (404, "operation_not_found")
    assert error(await http("GET", base + "/files/stat?path=/none")) == (404, "file_not_found")
    assert error(await http("GET", base + "/files/content?path=/none")) == (404, "file_not_found")
    assert error(await http("PUT", base + "/files/content?path=/tmp", data=b"x")) == (409, "is_a_directory")
    for query in ("", "?path=x", "?path=/a%00b", "?path=", "?path=/" + "x" * 5000):
        assert error(await http("GET", base + "/files/content" + query)) == (400, "path_invalid")
    for query in ("mode=9", "mode=99999", "mode=-1", "mtime_ns=x", "owner=a b", "append=perhaps"):
        answer = await http("PUT", f"{base}/files/content?path=/tmp/x&{query}", data=b"x")
        assert error(answer) == (400, "invalid_argument")
    status, answer = await http("POST", base + "/exec", json={"argv": ["sleep", "1000"], "wait_s": 0})
    assert status == 202 and answer["state"] == "running"


async def test_bodies_over_the_limit(http, sandbox):
    target = f"/v1/sandboxes/{sandbox.id}/exec"
    big = b"[" * (64 << 20)
    assert error(await http("POST", target, data=io.BytesIO(big))) == (413, "payload_too_large")

    async def endless():
        for _ in range(40):
            yield b"[" * (1 << 20)

    assert error(await http("POST", target, data=endless())) == (413, "payload_too_large")
    assert (await sandbox.run_shell("echo fine")).ok


async def raw(server: StackServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(data)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionResetError:  # closed while more was on its way, which may overtake the answer
        return b"HTTP/1.1 400"
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X-Y: z\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nX-Long: " + b"x" * (128 << 10) + b"\r\n\r\n",
        b"GET /" + b"x" * (128 << 10) + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
async def test_wrong_http(server, data):
    assert (await raw(server, data)).startswith(b"HTTP/1.1 400")


def head(server: StackServer, method: str, path: str, length: int) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def vanish(server: StackServer, data: bytes, until: Any) -> None:
    """Send, wait for an event on the server, cut the connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(data)
    await until()
    writer.transport.abort()


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            pass


async def test_vanishing_in_the_middle_of_an_upload(server, client, sandbox):
    path = f"/v1/sandboxes/{sandbox.id}/files/content?path=/tmp/half&op_id=op-half"

    async def begun() -> bool:
        return "op-half" in {o.op_id for o in await sandbox.operations()}

    data = head(server, "PUT", path, 1 << 20) + b"x" * 1000
    await vanish(server, data, lambda: eventually(begun))

    async def over() -> bool:
        return all(o.state != "running" for o in await sandbox.operations())

    await eventually(over)
    assert not await sandbox.files.exists("/tmp/half"), "half an upload was taken for the whole"


async def test_vanishing_in_the_middle_of_a_command(server, sandbox):
    body = json.dumps({"argv": ["/bin/cat"], "open_input": True, "op_id": "op-v"}).encode()

    async def begun() -> bool:
        return "op-v" in {o.op_id for o in await sandbox.operations()}

    request = head(server, "POST", f"/v1/sandboxes/{sandbox.id}/exec", len(body)) + body
    await vanish(server, request, lambda: eventually(begun))
    command = await sandbox.operation("op-v")
    await command.send_stdin("still here\n")
    await command.close_stdin()
    assert (await command.wait()).stdout == b"still here\n"


@pytest.mark.parametrize("key", ["", "Idempotency-Key: k\r\n"])
@pytest.mark.parametrize("batch", [False, True])
async def test_vanishing_in_the_middle_of_a_creation(server, client: DSecClient, key: str, batch: bool):
    gate = server.backend.knobs.launch_gate = asyncio.Event()
    body: dict[str, Any] = {"spec": {"image": "base", "backend": "fake"}}
    path = "/v1/sandboxes"
    if batch:
        path += ":batch"
        body |= {"count": 3, "name": "b" if key else ""}
    text = json.dumps(body).encode()
    request = head(server, "POST", path, len(text)) + text
    if not batch:
        request = request.replace(b"Host: x\r\n", b"Host: x\r\n" + key.encode())

    async def begun() -> bool:
        return len([s async for s in client.list_sandboxes(states=["creating"])]) == (3 if batch else 1)

    await vanish(server, request, lambda: eventually(begun))
    if not key:

        async def undone() -> bool:
            return not [s async for s in client.list_sandboxes(states=["creating", "running"])]

        await eventually(undone)
    gate.set()
    if key:

        async def made() -> bool:
            return len([s async for s in client.list_sandboxes(states=["running"])]) == (3 if batch else 1)

        await eventually(made)


async def test_vanishing_reader(server, sandbox: Sandbox):
    """Of a file: the read ends on the server too."""
    await sandbox.files.write("/tmp/big", b"x" * (4 << 20))
    request = head(server, "GET", f"/v1/sandboxes/{sandbox.id}/files/content?path=/tmp/big&op_id=op-r", 0)

    async def begun() -> bool:
        return "op-r" in {o.op_id for o in await sandbox.operations()}

    await vanish(server, request, lambda: eventually(begun))

    async def over() -> bool:
        return all(o.state != "running" for o in await sandbox.operations())

    await eventually(over)


async def test_content_that_breaks_off_is_no_whole(server, sandbox: Sandbox):
    await sandbox.files.write("/tmp/big", b"x" * (32 << 20))

    async def read() -> None:
        async for _ in sandbox.files.stream("/tmp/big"):
            server.backend.host.kill(sandbox.id, Exit(signal=9))

    with pytest.raises(errors.Unavailable):
        await read()
