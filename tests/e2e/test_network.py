"""Sandboxes with a network: a whole server on a host of its own, with an Internet behind it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.conftest import warm
from tests.e2e.server import ServerProcess
from tests.network.hosts import World

from dsec.client import DSecClient, DSecContainerRunArgs, Sandbox
from dsec.core.errors import InvalidArgument, WrongState

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft: install nftables"),
]
CONFIG = """
[network]
upstreams = ["198.51.100.2"]

[network.services.pypi]
domains = ["pypi.test.example"]
ports = [80, 443, 8000]
env = { PIP_INDEX_URL = "http://pypi.test.example/simple" }

[network.services.mirror]
domains = ["mirror.corp.example"]
ports = [8000]
private = true
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    made.zone.records = {
        "pypi.test.example": {"A": ["203.0.113.10"], "AAAA": ["2001:db8:2::10"]},
        "other.test.example": {"A": ["203.0.113.10"]},
        "a.wild.example": {"A": ["203.0.113.20"]},
        "mirror.corp.example": {"A": ["10.77.0.1"]},
        "rebind.test.example": {"A": ["10.77.0.1"]},
    }
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(stocked: Path, tmp_path_factory: pytest.TempPathFactory, world: World) -> Iterator[ServerProcess]:
    config = tmp_path_factory.mktemp("config") / "dsec.toml"
    config.write_text(CONFIG)
    process = ServerProcess(stocked, "--config", str(config))
    world.host.run(process.start)
    world.host.run(lambda: asyncio.run(_first(process)))
    yield process
    process.stop()


async def _first(process: ServerProcess) -> None:
    """The network is made with the first sandbox that has one, and stays."""
    await warm(process)
    async with DSecClient(url=process.url, token=process.token) as client:
        await (await client.run_container(args({}))).stop()


def args(rules: object, **more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image="base", network_rules=rules, **more)  # type: ignore[arg-type]


HOLD = """exec 3<>/dev/tcp/203.0.113.10/8000; echo open
while echo x >&3 && read -t 5 l <&3; do sleep 0.01; done"""

Body = Callable[[DSecClient], Awaitable[None]]


@pytest.fixture
def on_host(server: ServerProcess, world: World) -> Callable[[Body], None]:
    """Run a body, given a client, on the server's host."""

    def run(body: Body) -> None:
        async def go() -> None:
            async with DSecClient(url=server.url, token=server.token) as client:
                await body(client)

        world.host.run(lambda: asyncio.run(go()))

    return run


async def reaches(sandbox: Sandbox, host: str, port: int) -> bool:
    """By bash: one line to an echo server and back."""
    script = f"exec 3<>/dev/tcp/{host}/{port} && echo hello >&3 && read -t 3 line <&3 && echo $line"
    return (await sandbox.exec(["/bin/bash", "-c", script], timeout=20)).stdout == b"hello\n"


def test_names_files_and_addresses(on_host: Callable[[Body], None]) -> None:
    async def body(client: DSecClient) -> None:
        async with await client.run_container(args({"pypi": True}, hostname="box")) as sandbox:
            hosts = (await sandbox.files.read("/etc/hosts")).decode()
            resolv = (await sandbox.files.read("/etc/resolv.conf")).decode()
            assert "127.0.0.1\tlocalhost" in hosts and "\tbox\n" in hosts
            assert resolv.startswith("nameserver 100.111.255.254\n")
            found = await sandbox.exec(["getent", "ahosts", "box"])
            assert found.stdout.startswith(b"100.96.") or b"fd5e:" in found.stdout
            assert (await sandbox.exec(["getent", "hosts", "localhost"])).exit_code == 0
            names = await sandbox.exec(["/bin/sh", "-c", "ls /sys/class/net; cat /proc/net/dev"])
            assert b"eth0" in names.stdout and b"\nlo" in names.stdout
            assert (await sandbox.exec(["printenv", "PIP_INDEX_URL"])).stdout.startswith(b"http://pypi.")

    on_host(body)


def test_by_name_and_nothing_else(on_host: Callable[[Body], None], world: World) -> None:
    async def body(client: DSecClient) -> None:
        rules = {"pypi": True, "allow": [{"domain": "*.wild.example", "ports": [8000]}]}
        async with await client.run_container(args(rules)) as sandbox:
            assert await reaches(sandbox, "pypi.test.example", 8000)
            assert await reaches(sandbox, "a.wild.example", 8000)
            for host, port in (
                ("pypi.test.example", 8001),
                ("other.test.example", 8000),
                ("203.0.113.20", 22),
            ):
                assert not await reaches(sandbox, host, port)
            assert ("other.test.example", "A") not in world.zone.asked, "a query left the node"
            page = await sandbox.events()
            assert {(e.what, e.name) for e in page.events} >= {("dns", "other.test.example")}
            assert ("flow", 8001) in {(e.what, e.port) for e in page.events}
            assert [e.position for e in page.events] == list(range(1, len(page.events) + 1))
            seen = [e async for e in client.audit(sandbox=sandbox.id, what="network_denied")]
            assert len(seen) == len(page.events)

    on_host(body)


def test_private_addresses_behind_names(on_host: Callable[[Body], None]) -> None:
    async def body(client: DSecClient) -> None:
        rules = {"mirror": True, "allow": [{"domain": "rebind.test.example", "ports": [8000]}]}
        async with await client.run_container(args(rules)) as sandbox:
            assert await reaches(sandbox, "mirror.corp.example", 8000), "the operator says it may"
            assert not await reaches(sandbox, "rebind.test.example", 8000)
            assert not await reaches(sandbox, "10.77.0.1", 22)
            assert "rebinding" in {e.reason for e in (await sandbox.events()).events}

    on_host(body)


def test_rules_change_while_it_runs(on_host: Callable[[Body], None], world: World) -> None:
    async def body(client: DSecClient) -> None:
        async with await client.run_container(args({})) as sandbox:
            assert not await reaches(sandbox, "203.0.113.10", 8000)
            await sandbox.set_network_rules({"allow": [{"cidr": "203.0.113.10"}]})
            assert await reaches(sandbox, "203.0.113.10", 8000)
            assert (await sandbox.network_rules()) is not None
            script = HOLD
            held = await sandbox.exec(["/bin/bash", "-c", script], background=True)
            async with asyncio.timeout(20):
                while b"open" not in (await held.output()).stdout:
                    await asyncio.sleep(0.01)
            began = time.monotonic()
            await sandbox.set_network_rules({})
            assert (await held.wait()).exit_code is not None
            assert time.monotonic() - began < 5
            with pytest.raises(InvalidArgument, match="npm"):
                await sandbox.set_network_rules({"npm": True})
            with pytest.raises(InvalidArgument, match="no service"):
                await sandbox.set_network_rules({"nothere": True})

    on_host(body)
    world.servers.hang_up()


def test_without_a_network_there_is_none_to_change(on_host: Callable[[Body], None]) -> None:
    async def body(client: DSecClient) -> None:
        async with await client.run_container(args(None)) as sandbox:
            assert (await sandbox.exec(["ls", "/sys/class/net"])).stdout == b"lo\n"
            with pytest.raises(WrongState, match="network_rules"):
                await sandbox.set_network_rules({"pypi": True})
        with pytest.raises(InvalidArgument, match=r"\[network.services.npm\]"):
            await client.run_container(args({"npm": True}))

    on_host(body)


def test_groups(on_host: Callable[[Body], None]) -> None:
    async def body(client: DSecClient) -> None:
        async with (
            await client.run_container(args({}, group="g")) as one,
            await client.run_container(args({}, group="g")) as two,
            await client.run_container(args({}, group="g", project="other")) as stranger,
        ):
            shown = await one.exec(
                ["/bin/sh", "-c", "hostname -I 2>/dev/null || getent ahostsv4 $(hostname)"]
            )
            address = shown.stdout_text.split()[0]
            serve = await one.exec(
                ["perl", "-MIO::Socket::INET", "-e",
                 'my $s = IO::Socket::INET->new(LocalPort => 5000, Listen => 5, ReuseAddr => 1) or die; '
                 '$| = 1; print "up\\n"; while (my $c = $s->accept) { my $l = <$c>; print $c $l; close $c }'],
                background=True,
            )  # fmt: skip
            async with asyncio.timeout(20):
                while b"up" not in (await serve.output()).stdout:
                    await asyncio.sleep(0.01)
            assert await reaches(two, address, 5000)
            assert not await reaches(stranger, address, 5000)

    on_host(body)


def test_a_server_that_was_killed(stocked: Path, tmp_path: Path, world: World) -> None:
    """Rules stay in force while it is dead, and change again once it is back."""
    config = tmp_path / "dsec.toml"
    config.write_text(CONFIG)
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    server = ServerProcess(data, "--config", str(config), "--store", str(stocked / "store"))

    async def before() -> str:
        async with DSecClient(url=server.url, token=server.token) as client:
            sandbox = await client.run_container(args({"pypi": True, "allow": [{"cidr": "203.0.113.10"}]}))
            assert await reaches(sandbox, "pypi.test.example", 8000)
            return sandbox.id

    async def after(sandbox_id: str) -> None:
        async with DSecClient(url=server.url, token=server.token) as client:
            sandbox = await client.get_sandbox(sandbox_id)
            assert await reaches(sandbox, "203.0.113.10", 8000)
            assert await reaches(sandbox, "pypi.test.example", 8000)
            assert not await reaches(sandbox, "203.0.113.20", 8000)
            await sandbox.set_network_rules({"allow": [{"cidr": "203.0.113.20"}]})
            assert await reaches(sandbox, "203.0.113.20", 8000)
            assert not await reaches(sandbox, "203.0.113.10", 8000)
            async with await client.run_container(args({"pypi": True})) as another:
                assert await reaches(another, "pypi.test.example", 8000)
            await sandbox.stop()

    world.host.run(server.start)
    try:
        sandbox_id = world.host.run(lambda: asyncio.run(before()))
        server.kill()
        world.host.run(server.start)
        world.host.run(lambda: asyncio.run(after(sandbox_id)))
    finally:
        server.stop()
