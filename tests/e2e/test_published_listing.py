"""The only listing that the paper publishes must run word for word; only the image's name is filled in."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from tests.e2e.server import ServerProcess
from tests.network.hosts import world

from dsec.client import DSecClient, DSecContainerRunArgs

pytestmark = pytest.mark.kernel
CONFIG = '[network.services.pypi]\ndomains = ["pypi.example"]\n'


@pytest.mark.skipif(shutil.which("nft") is None, reason="network_rules need nft: install nftables")
def test_listing(stocked, tmp_path, monkeypatch):
    """On a host of its own: what its network needs is made there."""
    config, data = tmp_path / "dsec.toml", tmp_path / "data"
    config.write_text(CONFIG)
    data.mkdir(mode=0o700)
    server = ServerProcess(data, "--config", str(config), "--store", str(stocked / "store"))
    with world() as made:
        made.host.run(server.start)
        try:
            monkeypatch.setenv("DSEC_URL", server.url)
            monkeypatch.setenv("DSEC_TOKEN", server.token)
            made.host.run(lambda: asyncio.run(listing()))
        finally:
            server.stop()


async def listing():
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image="registry.example/sphinx-9658:official",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    await sandbox.stop()

    assert result.stdout == b"hello world\n"
    assert result.exit_code == 0 and result.reason == "exited"
    await client.close()


def test_sync_twin(server):
    from dsec.client import sync

    with sync.DSecClient(url=server.url, token=server.token) as client:
        sandbox = client.run_container(DSecContainerRunArgs(container_image="base"))
        sandbox.run_shell("cd /tmp; export GREETING=hello")
        assert sandbox.run_shell("echo $GREETING from $PWD").stdout == b"hello from /tmp\n"
        sandbox.stop()
