from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.apiserver.stack import StackServer, args

from dsec.client import DSecClient, Sandbox


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StackServer]:
    made = StackServer(tmp_path)
    await made.start()
    yield made
    await made.stop()
    made.tokens.close()
    assert made.backend.host.sandboxes == {}, "sandboxes are left on the host"


@pytest.fixture
async def client(server: StackServer) -> AsyncIterator[DSecClient]:
    async with server.client() as made:
        yield made


@pytest.fixture
async def sandbox(client: DSecClient) -> Sandbox:
    return await client.run_container(args())
