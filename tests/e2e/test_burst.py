"""A burst of creations through a real server: each sandbox is its own and has its limits; none is left."""

from __future__ import annotations

import asyncio

import pytest
from tests.e2e.host import footprint
from tests.e2e.server import ServerProcess

from dsec.client import DSecClient, DSecContainerRunArgs

pytestmark = pytest.mark.kernel
AT_ONCE = 12
HOG = "x=$(head -c 100000000 /dev/zero | tr '\\0' x); echo unreachable"
CREATION_LIMIT_S = 120


async def one(client: DSecClient, number: int) -> None:
    """Every fourth asks for more memory than it may have, and lives on."""
    args = DSecContainerRunArgs(container_image="base", memory_limit_mb=32, hostname=f"box-{number}")
    sandbox = await client.run_container(args, timeout=CREATION_LIMIT_S)
    try:
        await sandbox.run_shell(f"cd /tmp; echo {number} > mine")
        if number % 4 == 0:
            hog = await sandbox.exec(["/bin/sh", "-c", HOG])
            assert hog.reason == "oom" and hog.stdout == b""
        told = await sandbox.run_shell("cat mine /etc/hostname")
        assert told.stdout == f"{number}\nbox-{number}\n".encode() and told.exit_code == 0
    finally:
        await sandbox.stop()


async def test_burst(server: ServerProcess) -> None:
    async with DSecClient(url=server.url, token=server.token) as client, asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(one(client, number))
    assert footprint(server.data) == set()
