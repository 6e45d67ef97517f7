"""The only listing that the paper publishes must run word for word; only the image's name is filled in."""

from __future__ import annotations

import pytest

from dsec.client import DSecClient, DSecContainerRunArgs

pytestmark = pytest.mark.kernel


async def test_listing(server, monkeypatch):
    monkeypatch.setenv("DSEC_URL", server.url)
    monkeypatch.setenv("DSEC_TOKEN", server.token)

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
