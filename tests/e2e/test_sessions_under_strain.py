"""Shell sessions at their edges: input that ends at once, signals, commands that turn on the driver."""

from __future__ import annotations

import asyncio

import pytest

from dsec.client import DSecClient, DSecContainerRunArgs, DSecError

pytestmark = pytest.mark.kernel
LIMIT_S = 30
SHELLS = {"bash": [], "posix": ["posix-shell"]}


@pytest.fixture
async def client(server):
    async with DSecClient(url=server.url, token=server.token) as client:
        yield client


@pytest.fixture(params=list(SHELLS))
async def sandbox(client, request):
    args = DSecContainerRunArgs(container_image="base", layers=SHELLS[request.param], memory_limit_mb=512)
    sandbox = await client.run_container(args)
    yield sandbox
    await sandbox.stop()


async def test_input_that_ends_before_the_command_begins(sandbox):
    """The session is busy when the input and its end arrive: nothing is lost, nobody waits for ever."""
    async with asyncio.timeout(LIMIT_S):
        first = asyncio.create_task(sandbox.run_shell("sleep 0.3"))
        await asyncio.sleep(0)
        waiting = [
            asyncio.create_task(sandbox.run_shell("cat", stdin=text)) for text in (b"one", b"", b"two")
        ]
        await first
        assert sorted([(await task).stdout for task in waiting]) == [b"", b"one", b"two"]
        for i in range(50):
            assert (await sandbox.run_shell("cat", stdin=f"{i}")).stdout == str(i).encode()
            assert (await sandbox.run_shell("true", stdin=b"x" * 300_000)).exit_code == 0


async def test_both_streams_fill_in_another_directory(sandbox):
    """What is set before a command opens its stderr and closes it: output after that is still read."""
    flood = "head -c 300000 /dev/zero >&2; head -c 300000 /dev/zero; sleep 0.05; head -c 300000 /dev/zero >&2"
    async with asyncio.timeout(LIMIT_S):
        for _ in range(5):
            result = await sandbox.run_shell(flood, cwd="/tmp", env={"A": "b"}, timeout=10)
            assert (result.reason, result.stdout_total, result.stderr_total) == ("exited", 300_000, 600_000)


async def test_timeout_holds_after_a_signal(sandbox):
    """A signal that a program takes lightly is no end, and does not call off the timeout."""
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    async with asyncio.timeout(LIMIT_S):
        for run in (
            lambda: sandbox.exec(["/bin/sh", "-c", script], timeout=2, background=True),
            lambda: sandbox.run_shell(f"/bin/sh -c {script!r}", timeout=2, background=True),
        ):
            command = await run()
            async for _ in command.stream():
                break
            await command.kill(15)
            assert (await command.wait()).reason == "timed_out"


async def test_signal_that_is_handled_is_no_end(sandbox):
    script = "trap 'echo got; exit 0' USR1; echo ready; while :; do sleep 0.05; done"
    async with asyncio.timeout(LIMIT_S):
        for run in (
            lambda: sandbox.exec(["/bin/sh", "-c", script], background=True),
            lambda: sandbox.run_shell(f'/bin/sh -c "{script}"', background=True),
        ):
            command = await run()
            async for _ in command.stream():
                break
            await command.kill(10)
            result = await command.wait()
            assert (result.reason, result.exit_code, b"got" in result.stdout) == ("exited", 0, True)


FIND = 'for d in /proc/$$/fd/*; do [ -e "$d/env" ] && break; done; cd "$d/" || exit 9; '
HOSTILE = {
    "the saved environment is a FIFO": FIND + "rm env && mkfifo env; cd /; echo done",
    "the saved environment is endless": FIND + "rm env && ln -s /dev/zero env; cd /; echo done",
    "the next command's text is a FIFO": FIND + "for i in 2 3 4 5; do mkfifo c$i; done; cd /; echo done",
    "the next command's text is a link": FIND
    + "for i in 2 3 4 5; do ln -s /etc/evil c$i; done; cd /; echo done",
    "the pipe for numbers is full and nobody reads": (
        "echo done; for d in /proc/$$/fd/*; do case $(readlink $d) in pipe:*) "
        "(timeout 1 head -c 1000000 /dev/zero >$d) 2>/dev/null & esac; done; "
        "(sleep 0.5; kill -STOP $$) >/dev/null 2>&1 & sleep 0.2"
    ),
    "the shell is stopped": "(sleep 0.2; kill -STOP $$) >/dev/null 2>&1 & echo done",
    "the shell is killed between two commands": "echo done; (kill -9 $$) >/dev/null 2>&1 &",
}


@pytest.mark.parametrize("how", list(HOSTILE))
async def test_command_that_turns_on_the_driver(sandbox, how):
    """Root may harm its own session; aether still answers, and other sessions live."""
    async with asyncio.timeout(LIMIT_S):
        first = await sandbox.run_shell(HOSTILE[how], timeout=5)
        assert b"done" in first.stdout, first
        for background in (True, False):
            task = asyncio.create_task(_tolerant(sandbox, background))
            assert (await sandbox.exec(["/bin/echo", "alive"], timeout=5)).stdout == b"alive\n"
            await task
        assert (await sandbox.run_shell("echo other", session="other")).stdout == b"other\n"
        assert (await sandbox.exec(["/bin/sh", "-c", "test ! -e /etc/evil"])).exit_code == 0


async def _tolerant(sandbox, background):
    try:
        if background:
            await (await sandbox.run_shell("echo more", timeout=5, background=True)).wait()
        else:
            await sandbox.run_shell("echo more", timeout=5)
    except DSecError:
        pass
