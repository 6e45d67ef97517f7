"""schemathesis: requests made of the OpenAPI document, valid and not, against the whole server.

Nothing crashes it (5xx other than what the document names), every answer is as the document says, and in the
end the server is what it was: it answers, and holds no task, connection or sandbox of the requests.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
import uvloop
from hypothesis import HealthCheck, given, settings
from schemathesis import checks
from schemathesis.generation import GenerationMode
from tests.apiserver.stack import StackServer, args

EXAMPLES = 25
ALLOWED_5XX = frozenset({501, 503, 504, 507})
"""Unsupported, unavailable, too late, disk full: typed errors, not faults."""


@schemathesis.serializer("application/x-tar")
def _as_it_is(ctx: Any, value: Any) -> bytes:
    """An archive of nothing in particular."""
    return value if isinstance(value, bytes) else json.dumps(value, default=str).encode()


class Served:
    """The server on a thread of its own, and one live sandbox in it."""

    def __init__(self, data: Path) -> None:
        self.server = StackServer(data)
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.run(self.server.start())
        self.document: dict[str, Any] = json.loads(self.get("/openapi.json").content)
        self.sandbox_id: str = self.run(self._sandbox())

    def run(self, coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result(60)

    async def _sandbox(self) -> str:
        async with self.server.client() as client:
            return (await client.run_container(args())).id

    def get(self, path: str) -> requests.Response:
        return requests.get(self.server.url + path, headers=self.headers, timeout=30)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.server.token}"}

    def close(self) -> None:
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.server.tokens.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()
    assert made.server.backend.host.sandboxes == {}


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m, p) for p, methods in document["paths"].items() for m in methods]


def a_document() -> dict[str, Any]:
    """The table of routes needs no server."""
    from dsec.apiserver.app import ApiServer
    from dsec.iam.tokens import TokenStore
    from dsec.wire.local import LocalBus

    api = ApiServer(LocalBus(), TokenStore(":memory:"), edges=["e1"])
    return json.loads(api.document)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "path"), operations(a_document()))
def test_every_operation(served: Served, method: str, path: str) -> None:
    schema = schemathesis.openapi.from_dict(served.document)
    operation = schema[path][method.upper()]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    strategy = operation.as_strategy(generation_mode=modes[0]) | operation.as_strategy(
        generation_mode=modes[1]
    )
    websocket = "101" in served.document["paths"][path][method]["responses"]

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=strategy)
    def run(case: Any) -> None:
        if "id" in (case.path_parameters or {}) and hash(repr(case.path_parameters)) % 4:
            case.path_parameters["id"] = served.sandbox_id
        if method == "delete" and path == "/v1/sandboxes/{id}":
            case.path_parameters["id"] = "sbx-e1-aaaaaaaaaaaa"
        response = case.call(base_url=served.server.url, headers=served.headers, timeout=30)
        status = response.status_code
        assert status < 500 or status in ALLOWED_5XX, (status, response.text)
        if websocket:
            assert status in (400, 401, 403, 404, 405, 426), response.text
            return
        if status >= 400 and "application/json" in response.headers.get("content-type", ""):
            assert set(json.loads(response.content)) >= {"error"}, response.text
        case.validate_response(
            response,
            checks=[checks.content_type_conformance, checks.response_schema_conformance],
        )

    run()
    assert served.get("/healthz").status_code == 200
    assert served.get(f"/v1/sandboxes/{served.sandbox_id}").json()["state"] == "running"
