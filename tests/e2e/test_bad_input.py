"""Bad input gets a clear, typed error; nothing is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import io

import aiohttp
import pytest

from dsec.client import DSecClient, DSecContainerRunArgs
from dsec.core import errors

pytestmark = pytest.mark.kernel

BASE = "base"


@pytest.fixture
async def client(server):
    async with DSecClient(url=server.url, token=server.token) as client:
        yield client


@pytest.fixture
async def sandbox(client):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image=BASE))
    yield sandbox
    await sandbox.stop()


async def live(client) -> list[str]:
    return [s.id async for s in client.list_sandboxes(states=["creating", "running", "stopping"])]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"container_image": "nowhere:1"}, errors.UnknownLayer),
        ({"container_image": "../../etc/passwd"}, errors.InvalidArgument),
        ({"container_image": BASE, "layers": ["absent"]}, errors.UnknownLayer),
        ({"container_image": BASE, "memory_limit_mb": -1}, errors.InvalidArgument),
        ({"container_image": BASE, "memory_limit_mb": 1 << 40}, errors.InvalidArgument),
        ({"container_image": BASE, "cpu_cores_limit": 0}, errors.InvalidArgument),
        ({"container_image": BASE, "cpu_cores_limit": float("inf")}, errors.InvalidArgument),
        ({"container_image": BASE, "pids_limit": 0}, errors.InvalidArgument),
        ({"container_image": BASE, "disk_limit_mb": -5}, errors.InvalidArgument),
        ({"container_image": BASE, "ttl_running_stop": 0}, errors.InvalidArgument),
        ({"container_image": BASE, "init_user": "nobody-of-this-name"}, errors.UserNotFound),
        ({"container_image": BASE, "init_user": "a b"}, errors.InvalidArgument),
        ({"container_image": BASE, "env": {"A=B": "x"}}, errors.InvalidArgument),
        ({"container_image": BASE, "env": {"A": "x\0y"}}, errors.InvalidArgument),
        ({"container_image": BASE, "hostname": "-bad-"}, errors.InvalidArgument),
        ({"container_image": BASE, "workdir": "relative"}, errors.InvalidArgument),
        ({"container_image": BASE, "qos": "fastest"}, errors.InvalidArgument),
    ],
)
async def test_creation_refused(client, arguments, error):
    with pytest.raises(error):
        sandbox = await client.run_container(DSecContainerRunArgs(**arguments))
        await sandbox.exec(["/bin/true"])  # an unknown user may be found at its first use
    for sandbox_id in await live(client):
        await (await client.get_sandbox(sandbox_id)).stop()


async def test_image_with_no_shell(client):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="empty"))
    with pytest.raises(errors.NoShell):
        await sandbox.run_shell("true")
    with pytest.raises(errors.ProgramNotFound):
        await sandbox.exec(["/bin/true"])
    await sandbox.files.write("/x", b"files work without one")
    assert await sandbox.files.read("/x") == b"files work without one"
    await sandbox.stop()


async def test_operations_refused(client, sandbox):
    with pytest.raises(errors.UserNotFound):
        await sandbox.exec(["/bin/true"], user="no-such-user")
    with pytest.raises(errors.ProgramNotFound):
        await sandbox.exec(["/no/such/program"])
    with pytest.raises(errors.FileNotFound):
        await sandbox.exec(["/bin/true"], cwd="/no/such/directory")
    with pytest.raises(errors.InvalidArgument):
        await sandbox.exec([])
    with pytest.raises(errors.InvalidArgument):
        await sandbox.exec(["/bin/echo", "a\0b"])
    with pytest.raises(errors.InvalidArgument):
        await sandbox.run_shell("true", session="../../x")
    with pytest.raises((errors.InvalidArgument, errors.PayloadTooLarge)):
        await sandbox.run_shell("#" * (4 << 20))
    with pytest.raises(errors.InvalidArgument):
        await sandbox.exec(["/bin/true"], timeout=-1)
    assert (await sandbox.exec(["/bin/echo", "still", "there"])).stdout == b"still there\n"


async def test_paths(client, sandbox):
    for path in ("relative", "", "/a\0b"):
        with pytest.raises(errors.PathInvalid):
            await sandbox.files.write(path, b"x")
    await sandbox.files.write("/tmp/../tmp/./dots", b"dots resolve inside")
    assert await sandbox.files.read("/tmp/dots") == b"dots resolve inside"
    assert await sandbox.files.read("/../../../../../../tmp/dots") == b"dots resolve inside"
    await sandbox.exec(["/bin/ln", "-s", "../../../../../../etc/hostname", "/tmp/up"])
    inside = await sandbox.exec(["/bin/cat", "/etc/hostname"])
    assert await sandbox.files.read("/tmp/up") == inside.stdout
    await sandbox.run_shell("touch $'/tmp/odd-\\xff-name'")
    names = [e.path for e in await sandbox.files.list("/tmp")]
    assert any("odd-" in (n if isinstance(n, str) else n.decode("latin-1")) for n in names)


async def test_wrong_token_and_ids(server, client, sandbox):
    for token in ("", "wrong", sandbox.id):
        async with DSecClient(url=server.url, token=token) as other:
            with pytest.raises(errors.Unauthenticated):
                await other.get_sandbox(sandbox.id)
    with pytest.raises((errors.WrongEdge, errors.NotFound)):
        await client.get_sandbox("sbx-otheredge-aaaaaaaaaaaa")
    with pytest.raises(errors.InvalidArgument):
        await client.get_sandbox("not-an-id")
    mine = sandbox.id.rsplit("-", 1)[0]
    with pytest.raises(errors.SandboxNotFound):
        await client.get_sandbox(f"{mine}-aaaaaaaaaaaa")


async def test_wrong_state(client):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image=BASE))
    await sandbox.stop()
    with pytest.raises((errors.WrongState, errors.NotFound)):
        await sandbox.exec(["/bin/true"])
    await sandbox.stop()


async def test_full_disk_is_told_and_survived(client):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image=BASE, disk_limit_mb=64))
    with pytest.raises(errors.DiskFull):
        await sandbox.files.write("/big", b"\0" * (160 << 20))
    left = await sandbox.exec(["/bin/sh", "-c", "ls -a / | grep -c big"])
    assert left.stdout.strip() == b"0", "a partial file was left behind"
    result = await sandbox.exec(["/bin/dd", "if=/dev/zero", "of=/big", "bs=1M", "count=160"])
    assert (result.exit_code != 0 and b"space" in result.stderr) or b"uota" in result.stderr
    await sandbox.exec(["/bin/rm", "-f", "/big"])
    assert (await sandbox.exec(["/bin/echo", "ok"])).stdout == b"ok\n"
    await sandbox.stop()


async def test_memory_limit_is_told(client):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image=BASE, memory_limit_mb=64))
    hog = "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo unreachable"
    result = await sandbox.exec(["/bin/sh", "-c", hog])
    assert result.reason == "oom"
    result = await sandbox.run_shell(hog)
    assert result.reason == "oom" and b"unreachable" not in result.stdout
    assert (await sandbox.run_shell("echo alive")).stdout == b"alive\n"
    await sandbox.stop()


async def test_creation_cancelled_half_way(client):
    before = set(await live(client))
    args = DSecContainerRunArgs(container_image=BASE)
    tasks = [asyncio.create_task(client.run_container(args)) for _ in range(16)]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, BaseException):
            await result.stop()
    assert done
    # What the server was making for a caller that left is undone or listed; none may hang half-made.
    for sandbox_id in set(await live(client)) - before:
        await (await client.get_sandbox(sandbox_id)).stop()
    assert set(await live(client)) == before


async def test_vanishing_client(server, client, sandbox):
    """A connection that is cut in the middle of a command leaves the command to its end."""
    headers = {"Authorization": f"Bearer {server.token}"}
    body = {"argv": ["/bin/sh", "-c", "sleep 0.5; echo done > /tmp/vanished"], "op_id": "op-vanish"}
    async with aiohttp.ClientSession() as session:
        request = session.post(f"{server.url}/v1/sandboxes/{sandbox.id}/exec", json=body, headers=headers)
        task = asyncio.create_task(request.__aenter__())
        await wait_until(lambda: operation_known(sandbox, "op-vanish"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    result = await (await sandbox.operation("op-vanish")).wait()
    assert result.exit_code == 0
    assert await sandbox.files.read("/tmp/vanished") == b"done\n"


async def operation_known(sandbox, op_id) -> bool:
    try:
        await sandbox.operation(op_id)
    except errors.OperationNotFound:
        return False
    return True


async def wait_until(condition, limit_s: float = 20) -> None:
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_body_over_the_limit(server, sandbox):
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{server.url}/v1/sandboxes/{sandbox.id}/exec",
            data=io.BytesIO(b"[" * (64 << 20)),
            headers=headers,
        ) as response,
    ):
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "payload_too_large"


@pytest.mark.parametrize("image", ["cut", "corrupt"])
async def test_damaged_layer(client, image):
    with pytest.raises((errors.LayerCorrupt, errors.UnknownLayer)):
        await client.run_container(DSecContainerRunArgs(container_image=image))
