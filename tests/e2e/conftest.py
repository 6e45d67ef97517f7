"""A server on layers that are made once per test run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.e2e.layers import stock_store
from tests.e2e.server import ServerProcess

from dsec.client import DSecClient, DSecContainerRunArgs


@pytest.fixture(scope="session")
def stocked(tmp_path_factory) -> Path:
    """A data directory that holds the layers that the tests name, and no server yet."""
    data = tmp_path_factory.mktemp("stock") / "data"
    data.mkdir(mode=0o700)
    stock_store(data)
    return data


async def warm(process: ServerProcess) -> None:
    """Layers stay mounted once they were used: use them before the first look at what a test leaves."""
    async with DSecClient(url=process.url, token=process.token) as client:
        for image, layers in (("base", ["posix-shell"]), ("empty", [])):
            args = DSecContainerRunArgs(container_image=image, layers=layers)
            await (await client.run_container(args)).stop()


@pytest.fixture(scope="module")
def server(stocked, tmp_path_factory):
    """A running server; what it leaves behind when it stops is the leak check's matter."""
    process = ServerProcess(stocked)
    process.start()
    asyncio.run(warm(process))
    yield process
    process.stop()
