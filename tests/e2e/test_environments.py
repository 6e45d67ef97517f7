"""Environments: an image of a registry started directly, what an agent did packed, others started from it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.e2e.server import ServerProcess
from tests.layers.oci.conftest import Served, registry

from dsec.client import DSecClient, DSecContainerRunArgs, Sandbox
from dsec.core import errors
from dsec.layers.exporter import Exporter
from dsec.layers.oci import open_image
from dsec.layers.store import LayerStore

__all__ = ["registry"]
pytestmark = pytest.mark.kernel


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[DSecClient]:
    async with DSecClient(url=server.url, token=server.token) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def packed_before(server: ServerProcess) -> None:
    """The first sandbox that is frozen makes the group that all are frozen in: before the first look."""

    async def pack() -> None:
        async with DSecClient(url=server.url, token=server.token) as client:
            sandbox = await client.run_container(args())
            packed = await sandbox.pack_diff()
            await client.remove_layer(packed.layer.digest)
            await sandbox.stop()

    asyncio.run(pack())


async def forget(client: DSecClient, *layers: str) -> None:
    """Layers go, and with the end of the next sandbox their mounts."""
    for layer in layers:
        assert layer in await client.remove_layer(layer)
    await (await client.run_container(args())).stop()


def args(image: str = "base", **how: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, **how)  # type: ignore[arg-type]


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run_shell(command)
    assert result.exit_code == 0, (command, result)
    return result.stdout.decode().strip()


async def test_image_of_a_registry(client: DSecClient, server: ServerProcess, registry: Served) -> None:
    """Imported once for all who ask at the same time; then it is a layer like any other."""
    reference = f"{registry.host}/team/base:1"
    with LayerStore(server.data / "store") as store:
        Exporter(store).to_registry(["base"], reference, level=1)
    made = await asyncio.gather(*(client.run_container(args(reference)) for _ in range(5)))
    assert [await output(s, "cat /etc/os-release | head -n 1; id -un") for s in made] == [
        await output(made[0], "cat /etc/os-release | head -n 1; id -un")
    ] * 5
    layer = await client.layer(reference)
    assert layer.kind == "base" and layer.provenance.manifest.startswith("sha256:")
    assert [found.name async for found in client.layers(prefix=registry.host)] == [reference]
    by_digest = await client.run_container(args(f"{registry.host}/team/base@{layer.provenance.manifest}"))
    await output(by_digest, "true")
    for sandbox in (*made, by_digest):
        await sandbox.stop()
    with pytest.raises(errors.NotFound):
        await client.run_container(args(f"{registry.host}/team/none:1"))
    with pytest.raises(errors.UnknownLayer):  # a bare name never asks a registry
        await client.run_container(args("no-such-layer"))
    await forget(client, reference)


async def test_work_becomes_an_environment(client: DSecClient, server: ServerProcess, tmp_path: Path) -> None:
    sandbox = await client.run_container(args(env={"A": "1"}, secrets={"KEY": "hidden"}))
    await output(
        sandbox,
        "mkdir -p /srv/work && cd /srv/work && echo done > result && chmod 4755 result; "
        "rm /etc/issue; rm -rf /usr/share/doc; mkdir /usr/share/doc; echo new > /usr/share/doc/only; "
        "mv /srv/work/result /srv/work/moved; ln /srv/work/moved /srv/work/hard; "
        "echo junk > /tmp/junk; mkdir -p /root/.cache/pip && echo c > /root/.cache/pip/x; "
        "echo secret-history > /root/.bash_history",
    )
    packed = await sandbox.pack_diff(
        "team/solved:1", labels={"task": "7"}, smoke="test -f /srv/work/moved && python3 -c 'print(6 * 7)'"
    )
    assert packed.layer.kind == "snapshot" and packed.layer.name == "team/solved:1" and packed.left_out > 0
    assert packed.layer.provenance.sandbox == sandbox.id and packed.smoke_output.strip() == "42"
    assert any(f.kind == "setuid" and f.path == "srv/work/moved" for f in packed.findings)
    assert packed.frozen_s > 0
    assert await output(sandbox, "cat /tmp/junk") == "junk"  # it goes on as it was
    fresh = await client.run_container(args("team/solved:1"))
    assert await output(fresh, "cat /srv/work/moved; stat -c '%a %h' /srv/work/hard") == "done\n4755 2"
    assert await output(
        fresh, "ls /usr/share/doc; ls -A /tmp /root/.cache 2>/dev/null; ls /root/.bash_history || true"
    )
    assert await output(fresh, "ls /usr/share/doc") == "only"
    assert (
        await fresh.run_shell("ls /etc/issue /tmp/junk /root/.bash_history /root/.cache/pip")
    ).exit_code != 0
    assert await output(fresh, "ls -A /tmp") == ""
    assert "hidden" not in await output(fresh, "env")
    # On top of one that was packed, once more; it shows both.
    await output(fresh, "echo second > /srv/work/second; rm /srv/work/hard")
    again = await fresh.pack_diff()
    assert again.layer.name == "" and again.layer.below[-1] == packed.layer.digest
    third = await client.run_container(args(again.layer.digest))
    assert await output(third, "ls /srv/work") == "moved\nsecond"
    for one in (sandbox, fresh, third):
        await one.stop()
    with LayerStore(server.data / "store") as store:
        Exporter(store).to_archive(
            ["team/solved:1"], tmp_path / "out.tar", "docker", name="solved:1", level=1
        )
    with open_image(str(tmp_path / "out.tar")) as image:
        assert len(image.layers) == 2
    with pytest.raises(errors.Conflict):
        await client.remove_layer(packed.layer.digest)  # another stands on it
    await forget(client, again.layer.digest, "team/solved:1")


async def test_what_is_refused(client: DSecClient, server: ServerProcess) -> None:
    sandbox = await client.run_container(args())
    key = "-----BEGIN PRIVATE KEY-----\n" + "A" * 64 + "\n-----END PRIVATE KEY-----\n"
    await sandbox.files.write("/srv/key.pem", key.encode())
    with pytest.raises(errors.InvalidArgument, match=r"srv/key\.pem: a private key"):
        await sandbox.pack_diff("x:1")
    packed = await sandbox.pack_diff("x:1", keep=["srv/key.pem"])
    assert [f.severity for f in packed.findings if f.kind == "secret"] == ["note"]
    assert await client.remove_layer("x:1")
    before = {e.name for e in os.scandir(server.data / "store/layers")}
    with pytest.raises(errors.Conflict, match="did not pass"):
        await sandbox.pack_diff("y:1", refuse=False, smoke="echo reason; exit 3")
    with pytest.raises(errors.UnknownLayer):
        await client.layer("y:1")
    assert {e.name for e in os.scandir(server.data / "store/layers")} == before
    for bad in ({"remove": ["../x"]}, {"name": "../y"}, {"labels": {"": "x"}}):
        with pytest.raises(errors.InvalidArgument):
            await sandbox.pack_diff(**bad)  # type: ignore[arg-type]
    await sandbox.stop()
    await forget(client)
    with pytest.raises(errors.WrongState):
        await sandbox.pack_diff("z:1")
    assert [
        s.id async for s in client.list_sandboxes() if s.labels.get("dsec/smoke") and s.state == "running"
    ] == []


async def test_packing_while_it_works(client: DSecClient) -> None:
    """Several at once, of a sandbox that writes all the time; each is whole, none stops it."""
    sandbox = await client.run_container(args())
    await sandbox.run_shell("mkdir /srv/w")
    step = "i=$((i+1)); echo $i > /srv/w/tmp; mv /srv/w/tmp /srv/w/$i; echo $i > /srv/w/last"
    loop = f"i=0; while :; do {step}; done"
    command = await sandbox.run_shell(loop, background=True, session="writer")
    packed = await asyncio.gather(*(sandbox.pack_diff() for _ in range(3)))
    first = int((await sandbox.run_shell("cat /srv/w/last")).stdout or 0)
    async with asyncio.timeout(30):
        while int((await sandbox.run_shell("cat /srv/w/last")).stdout or 0) <= first:
            pass
    await command.kill()
    await sandbox.stop()
    for one in packed:
        made = await client.run_container(args(one.layer.digest))
        names = await output(
            made, "cd /srv/w && ls | grep -v -e tmp -e last | sort -n | awk 'NR != $1' | head -n 1"
        )
        assert names == ""  # no gap: all up to an instant, nothing after it
        await made.stop()
    await forget(client, *{one.layer.digest for one in packed})
