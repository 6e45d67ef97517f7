"""dsec layer build -f: a Dockerfile, its steps in sandboxes, its result a layer that sandboxes start from."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.e2e.server import ServerProcess
from tests.layers.oci.conftest import Served, registry

from dsec.client import DSecClient, DSecContainerRunArgs
from dsec.layers.exporter import Exporter
from dsec.layers.store import LayerStore

__all__ = ["registry"]
pytestmark = pytest.mark.kernel

COMMAND = [sys.executable, "-m", "dsec.cli.main", "layer", "build"]
DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG BASE=base
FROM ${BASE} AS make
WORKDIR /src
COPY greet.sh part?.txt ./
RUN cat part1.txt part2.txt > both && mkdir out && cp both out/ && ln -s both out/link \\
    # a comment in between
    && sh greet.sh > out/greeting

FROM base
ARG WHO=nobody
ENV GREETING="hello $WHO" MODE=${MODE:-plain}
LABEL team="a b"
WORKDIR /app
RUN echo "me:x:1234:1235::/app:/bin/sh" >> /etc/passwd && echo "me:x:1235:" >> /etc/group && chown 1234:1235 .
COPY --from=make --chown=me /src/out ./
COPY --chmod=750 tree/ /srv/tree/
ADD some.tar.gz /unpacked
COPY <<EOT /etc/motd
$GREETING
EOT
USER me
RUN <<EOT
id -un > /app/who
pwd >> /app/who
echo "$GREETING $WHO" >> /app/who
EOT
RUN ["python3", "-c", "open('/app/py', 'w').write('x')"]
EXPOSE 80
ENTRYPOINT ["/bin/sh", "-c"]
CMD ["cat /app/who"]
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    (root / "tree/deep").mkdir(parents=True)
    (root / "greet.sh").write_text("echo from make\n")
    (root / "part1.txt").write_text("1\n")
    (root / "part2.txt").write_text("2\n")
    (root / "tree/deep/file").write_text("deep\n")
    (root / "tree/left.log").write_text("no\n")
    (root / ".dockerignore").write_text("**/*.log\n")
    (root / "Dockerfile").write_text(DOCKERFILE)
    with tarfile.open(root / "some.tar.gz", "w:gz") as tar:
        tar.add(root / "part1.txt", "in/tar.txt")
    return root


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[DSecClient]:
    async with DSecClient(url=server.url, token=server.token) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def packed_before(server: ServerProcess, registry: Served) -> None:
    """The first sandbox that is frozen makes the group that all are frozen in: before the first look.

    registry: it stays to the end of all tests, and is to be there from the beginning.
    """

    async def pack() -> None:
        async with DSecClient(url=server.url, token=server.token) as client:
            sandbox = await client.run_container(DSecContainerRunArgs(container_image="base"))
            packed = await sandbox.pack_diff()
            await client.remove_layer(packed.layer.digest)
            await sandbox.stop()

    asyncio.run(pack())


def build(server: ServerProcess, *words: object, status: int = 0) -> str:
    """What it said on stderr."""
    command = [*COMMAND, "--data", str(server.data)]
    env = {**os.environ, "DSEC_URL": server.url, "DSEC_TOKEN": server.token}
    done = subprocess.run(
        [*command, *map(str, words)], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == status, done.stderr[-4000:]
    return done.stderr


def interrupt(server: ServerProcess, after: bytes, *words: object) -> int:
    """A build that is sent SIGINT after it said that line; its status."""
    env = {**os.environ, "DSEC_URL": server.url, "DSEC_TOKEN": server.token}
    command = [*COMMAND, "--data", str(server.data), *map(str, words)]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while process.stderr.readline() != after:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        return process.wait(60)


async def output(client: DSecClient, image: str, command: str, user: str = "") -> str:
    sandbox = await client.run_container(DSecContainerRunArgs(container_image=image))
    result = await sandbox.run_shell(command, user=user)
    await sandbox.stop()
    assert result.exit_code == 0, (command, result)
    return result.stdout.decode()


async def forget(server: ServerProcess, client: DSecClient, *names: str) -> None:
    """The layers go, those of the steps too, and with the end of the next sandbox their mounts."""
    with LayerStore(server.data / "store") as store:
        for name in names:
            store.remove(name)
        while store.collect(-1).layers:
            pass
    await output(client, "base", "true")


async def test_whole(server: ServerProcess, client: DSecClient, context: Path) -> None:
    said = build(server, "--dockerfile", "--build-arg", "WHO=you", "built:1", context)
    assert "cached" not in said and "Dockerfile:1: directive 'syntax' is ignored" in said
    shown = await output(
        client, "built:1", "cat /app/who /app/greeting /app/both /etc/motd /app/py; id -un; pwd"
    )
    assert shown == "me\n/app\nhello you you\nfrom make\n1\n2\nhello you\nxme\n/app\n"
    stats = await output(
        client,
        "built:1",
        "cd /; stat -c '%A %U:%G %n' app/both app/link srv/tree srv/tree/deep/file; readlink app/link; "
        "cat unpacked/in/tar.txt; find /srv -type f; echo $GREETING $MODE; ls /src 2>&1 | wc -l",
        user="root",
    )
    assert stats == (
        "-rw-r--r-- me:me app/both\nlrwxrwxrwx me:me app/link\ndrwxr-x--- root:root srv/tree\n"
        "-rwxr-x--- root:root srv/tree/deep/file\nboth\n1\n/srv/tree/deep/file\nhello you plain\n1\n"
    )
    layer = await client.layer("built:1")
    with LayerStore(server.data / "store") as store:
        config = store.find("built:1").config
    assert layer.kind == "base" and config.labels == {"team": "a b"}
    assert (config.user, config.workdir, config.cmd) == ("me", "/app", ["cat /app/who"])
    assert config.env["GREETING"] == "hello you" and config.entrypoint == ["/bin/sh", "-c"]
    await forget(server, client, "built:1")


async def test_cache(server: ServerProcess, client: DSecClient, context: Path) -> None:
    """The second build runs nothing; a changed file runs what comes after it, and only that."""
    build(server, "-f", context / "Dockerfile", "cache:1", context)
    os.utime(context / "part1.txt", (1, 1))
    again = build(server, "-f", context / "Dockerfile", "cache:2", context)
    steps = [line for line in again.splitlines() if " RUN " in line or " COPY " in line or " ADD " in line]
    assert len(steps) == 9 and all("] cached " in line for line in steps)
    assert (await client.layer("cache:1")).digest == (await client.layer("cache:2")).digest
    (context / "part1.txt").write_text("new\n")
    third = build(server, "-f", context / "Dockerfile", "cache:3", context)
    steps = [line for line in third.splitlines() if " RUN " in line or " COPY " in line]
    first_run = next(line for line in steps if "/etc/passwd" in line)
    assert "cached" in first_run and sum("cached" in line for line in steps) == 1
    assert await output(client, "cache:3", "cat /app/both") == "new\n2\n"
    other = build(server, "-f", context / "Dockerfile", "--target", "make", "cache:4", context)
    assert "passwd" not in other and "cached COPY" in other
    await forget(server, client, "cache:1", "cache:2", "cache:3", "cache:4")


async def test_failures(server: ServerProcess, client: DSecClient, context: Path) -> None:
    file = context / "Bad"
    file.write_text("FROM base\nRUN echo begun; echo why >&2; exit 7\n")
    said = build(server, "-f", file, "bad:1", context, status=125)
    assert (
        "begun" in said and "step_failed: Bad:2: RUN: the command ended with exit 7" in said and "why" in said
    )
    for text, told in (
        ("FROM no-such-layer\n", "Bad:1: FROM: no layer 'no-such-layer:latest'"),
        ("FROM base\nCOPY none /x\n", "Bad:2: COPY: 'none': it is not in the context"),
        ("FROM base\nCOPY ../x /x\n", "leads out of the context"),
        ("FROM base\nCOPY tree/left.log /x\n", ".dockerignore leaves it out"),
        ("FROM base\nCOPY --from=base /no/such /x\n", "/no/such: there is no such file"),
        ("FROM base\nUSER none\nRUN true\n", "user_not_found: Bad:3: RUN: "),
        (
            "FROM base\nCOPY --chown=nobody-at-all part1.txt /x\n",
            "Bad:2: COPY: --chown: no 'nobody-at-all' in /etc/passwd",
        ),
        ("FROM base\nADD https://x.example/y /x\n", "only local files"),
        ("FROM base\nRUN --mount=type=ssh true\n", "--mount=type=ssh is not supported"),
        ("FROM scratch\n", "makes no file"),
    ):
        file.write_text(text)
        assert told in build(server, "-f", file, "bad:1", context, status=125)
    running = [s.id async for s in client.list_sandboxes() if s.state == "running"]
    assert running == []
    await forget(server, client)


async def test_links_lead_nowhere_else(server: ServerProcess, client: DSecClient, context: Path) -> None:
    """Links of the context stay in it; a destination behind a link of the base is where the link leads."""
    os.symlink("/etc/hostname", context / "outside")
    file = context / "Links"
    file.write_text("FROM base\nCOPY outside /x\n")
    assert "'outside': it is not in the context" in build(server, "-f", file, "l:1", context, status=125)
    (context / "inner").symlink_to("tree/deep")
    file.write_text("FROM base\nRUN ln -s /srv /lnk\nCOPY inner /lnk/a\nCOPY part1.txt /lnk/a/\n")
    build(server, "-f", file, "l:1", context)
    assert await output(client, "l:1", "readlink /lnk; cat /srv/a/file /srv/a/part1.txt") == "/srv\ndeep\n1\n"
    file.write_text("FROM base\nENV A=1\n")
    build(server, "-f", file, "l:2", context)
    assert (await client.layer("l:2")).digest == (await client.layer("base")).digest
    assert await output(client, "l:2", "echo $A") == "1\n"
    with LayerStore(server.data / "store") as store:
        store.remove("l:2")
    await forget(server, client, "l:1")


async def test_interrupted(server: ServerProcess, client: DSecClient, context: Path) -> None:
    """Ctrl-C leaves no sandbox and no layer."""
    file = context / "Long"
    file.write_text("FROM base\nRUN echo begun; sleep 1000\n")
    before = {e.name for e in os.scandir(server.data / "store/layers")}
    assert await asyncio.to_thread(interrupt, server, b"begun\n", "-f", file, "long:1", context) == 130
    assert [s.id async for s in client.list_sandboxes() if s.state == "running"] == []
    assert {e.name for e in os.scandir(server.data / "store/layers")} == before


async def test_many_steps(server: ServerProcess, client: DSecClient, context: Path) -> None:
    file = context / "Many"
    steps = "".join(f"COPY part1.txt /many/{n}\n" for n in range(120))
    file.write_text(f"FROM base\n{steps}RUN ls /many | wc -l > /count\n")
    build(server, "-f", file, "many:1", context)
    assert await output(client, "many:1", "cat /count; ls /many | wc -l") == "120\n120\n"
    await forget(server, client, "many:1")


async def test_base_of_a_registry(
    server: ServerProcess, client: DSecClient, context: Path, registry: Served
) -> None:
    reference = f"{registry.host}/team/base:1"
    with LayerStore(server.data / "store") as store:
        Exporter(store).to_registry(["base"], reference, level=1)
    file = context / "Registry"
    file.write_text(f"FROM {reference}\nRUN echo made > /srv/made\n")
    build(server, "-f", file, "registry:1", context)
    assert "] cached RUN" in build(server, "-f", file, "registry:2", context)
    assert await output(client, "registry:2", "cat /srv/made") == "made\n"
    file.write_text(f"FROM {registry.host}/team/none:1\n")
    assert "team/none" in build(server, "-f", file, "registry:3", context, status=125)
    await forget(server, client, "registry:1", "registry:2", reference)
