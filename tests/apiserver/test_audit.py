"""The audit record through the API: who did what, what misbehaved, and who may read it."""

from __future__ import annotations

import json

import aiohttp
import pytest
from tests.apiserver.stack import StackServer, args

from dsec.audit.log import verify
from dsec.client import DSecClient
from dsec.core.errors import PermissionDenied, SandboxNotFound, Unauthenticated
from dsec.wire.audit import AuditEntry
from dsec.wire.edge import SandboxInfo


async def record(client: DSecClient, **where: str) -> list[AuditEntry]:
    return [entry async for entry in client.audit(**where)]  # type: ignore[arg-type]


async def test_who_did_what_to_which_sandbox(server: StackServer) -> None:
    async with server.client() as client:
        sandbox = await client.run_container(args(secrets={"KEY": "hidden-value"}))
        await sandbox.exec(["/bin/true", "one"])
        await sandbox.files.write("/tmp/a", b"content-of-a-file")
        await sandbox.files.read("/tmp/a")
        await sandbox.stop()
        found = await record(client, sandbox=sandbox.id, kind="action")
    said = [e.what for e in found]
    for what in ("sandboxes.create", "sandbox.created", "files.write", "files.read", "sandbox.ended"):
        assert what in said
    command = next(e for e in found if "command" in e.detail)
    assert command.detail["command"] == "/bin/true one" and command.outcome == "ok"
    assert command.name == "test" and command.who.startswith("tok-") and command.peer.startswith("127.0.0.1:")
    assert next(e for e in found if e.what == "files.write").detail["path"] == "/tmp/a"
    text = b"".join(p.read_bytes() for p in (server.data / "audit").glob("*.jsonl"))
    assert (
        b"hidden-value" not in text and b"content-of-a-file" not in text and server.token.encode() not in text
    )
    assert verify(server.data / "audit")[0] >= len(found)


async def test_what_was_refused(server: StackServer) -> None:
    async with server.client() as client:
        gone = "sbx-e1-aaaaaaaaaaaa"
        with pytest.raises(SandboxNotFound):
            await client._connection.call(SandboxInfo, "DELETE", f"/v1/sandboxes/{gone}")
        assert [e.outcome for e in await record(client, sandbox=gone)] == ["sandbox_not_found"]
        async with server.client(token="dsec_wrong") as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.node()
        found = await record(client, what="auth.")
    assert found[0].outcome == "unauthenticated" and found[0].who == ""
    assert "dsec_wrong" not in json.dumps(found[0].detail)


async def test_a_flood_of_wrong_tokens_is_counted(server: StackServer) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            async with session.get(server.url + "/v1/node", headers={"Authorization": "Bearer x"}) as got:
                assert got.status in (401, 429)
    async with server.client() as client:
        assert 50 <= len(await record(client, what="auth.refused")) < 250


async def test_a_project_sees_its_own(server: StackServer) -> None:
    token = server.tokens.create("of-p", project="p")
    async with server.client() as all_of_it, server.client(token=token) as client:
        await (await all_of_it.run_container(args(project="q"))).stop()
        mine = await client.run_container(args(project="p"))
        await mine.stop()
        found = await record(client)
        assert {e.sandbox for e in found} == {mine.id} and {e.project for e in found} == {"p"}
        with pytest.raises(PermissionDenied):
            await record(client, project="q")


async def test_json_lines(server: StackServer) -> None:
    async with server.client() as client:
        await (await client.run_container(args())).stop()
    headers = {"Authorization": f"Bearer {server.token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(server.url + "/v1/audit?format=ndjson&limit=3") as answer,
    ):
        lines = (await answer.text()).splitlines()
        assert [json.loads(line)["position"] for line in lines] == [1, 2, 3]
        assert answer.headers["X-Next"] == "3" and answer.content_type == "application/x-ndjson"


async def test_what_misbehaved_inside(server: StackServer) -> None:
    """The kernel's own limits are in tests/attacks."""
    async with server.client() as client:
        sandbox = await client.run_container(args())
        await sandbox.exec(["yes"], timeout=0.2)
        found = await record(client, sandbox=sandbox.id, kind="misbehaviour")
        await sandbox.stop()
    assert [e.what for e in found] == ["timed_out"]
    assert found[0].detail["command"] == "yes"
