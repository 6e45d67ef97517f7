"""The document is whole, valid, and says what the server does."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from dsec.apiserver.router import Route
from dsec.wire import api


@pytest.fixture
async def document(server) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(server.url + "/openapi.json") as answer:
        found: dict[str, Any] = json.loads(await answer.read())
        return found


async def test_valid(document):
    validate(document)
    assert document["openapi"].startswith("3.1")


async def test_every_route_is_in_it(server, document):
    found = routes(server.api._router._root)
    assert len(found) > 25
    for route in found:
        method = "get" if route.method == "WS" else route.method.lower()
        operation = document["paths"][route.path][method]
        named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", route.path))
        assert operation["responses"]["default"]["$ref"].endswith("/Error")
    ids = [o["operationId"] for p in document["paths"].values() for o in p.values()]
    assert len(ids) == len(set(ids))


def routes(node: Any) -> list[Route]:
    below = [*node.children.values(), *([node.any] if node.any else [])]
    return [*node.routes.values(), *(r for child in below for r in routes(child))]


async def test_answers_are_as_it_says(server, sandbox, document):
    """Real answers against the document's own schemas."""

    async def check(path: str, template: str, **how: Any) -> None:
        method = how.pop("method", "GET")
        async with session.request(method, server.url + path, **how) as answer:
            described = document["paths"][template][method.lower()]["responses"]
            content = described[str(answer.status)]["content"]["application/json"]["schema"]
            schema = {**content, "components": document["components"]}
            Draft202012Validator(schema).validate(json.loads(await answer.read()))

    box, name = f"/v1/sandboxes/{sandbox.id}", "/v1/sandboxes/{id}"
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await check("/v1/sandboxes", "/v1/sandboxes")
        await check(box, name)
        await check(f"{box}/stats", f"{name}/stats")
        await check("/v1/node", "/v1/node")
        body = {"argv": ["/bin/cat"], "stdin": {"data": "/w==", "encoding": "base64"}}
        await check(f"{box}/exec", f"{name}/exec", method="POST", json=body)
        await check(f"{box}/shell", f"{name}/shell", method="POST", json={"command": "echo x", "wait_s": 0})
        await check(f"{box}/operations", f"{name}/operations")
        await check(f"{box}/files?path=/tmp", f"{name}/files")
        create = {"spec": {"image": "base", "backend": "fake"}}
        await check("/v1/sandboxes", "/v1/sandboxes", method="POST", json=create)


def test_bytes_in_json() -> None:
    for data in (b"", b"text", "\u00e4".encode(), b"\xff", bytes(range(256))):
        blob = api.to_blob(data)
        again = msgspec.json.decode(msgspec.json.encode(blob), type=api.Blob)
        assert api.of_blob(again) == data
