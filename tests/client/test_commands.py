"""Commands through the SDK, real HTTP and the real edge."""

from __future__ import annotations

import asyncio

import pytest
from tests.apiserver.stack import StackServer, args

from dsec.client import CommandFailed, DSecClient, Sandbox
from dsec.core import errors


async def known(sandbox: Sandbox, op_id: str) -> None:
    """Returns when the server knows the operation."""
    for _ in range(10_000):
        if op_id in {o.op_id for o in await sandbox.operations()}:
            return
    raise AssertionError(f"{op_id} never began")


async def test_the_listing(server: StackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_URL", server.url)
    monkeypatch.setenv("DSEC_TOKEN", server.token)
    client = DSecClient()
    await client.open()
    sandbox = await client.run_container(
        args(
            memory_limit_mb=4096,
            cpu_cores_limit=4,
            ttl_running_stop=300,
            network_rules={"npm": False, "pypi": True},
            init_user="root",
        ),
        timeout=120,
    )
    result = await sandbox.run_shell("echo hello world")
    await sandbox.stop()
    await client.close()
    assert result.stdout == b"hello world\n"
    assert result.ok and result.check() is result and result.reason == "exited"


async def test_streams_apart(sandbox):
    result = await sandbox.run_shell("echo out; echo err >&2; false")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 1)
    with pytest.raises(CommandFailed, match="exit 1: err"):
        result.check()


async def test_bytes_that_are_no_text(sandbox):
    data = bytes(range(256)) * 3
    result = await sandbox.exec(["/bin/cat"], stdin=data)
    assert result.stdout == data
    assert "\ufffd" in result.stdout_text


async def test_large_stdin_and_output(sandbox):
    data = b"0123456789abcdef" * (5 << 16)
    result = await sandbox.exec(["/bin/cat"], stdin=data)
    assert result.stdout == data and not result.stdout_truncated


async def test_output_past_the_limit_is_counted(sandbox):
    result = await sandbox.exec(["count", "100000"], output_limit=1000)
    assert len(result.stdout) == 1000
    assert result.stdout_total == 100_000 and result.stdout_truncated


async def test_callbacks(sandbox):
    got: list[bytes] = []

    async def on_stderr(data: bytes) -> None:
        got.append(b"E" + data)

    result = await sandbox.run_shell(
        "echo a; echo b >&2; count 300000", on_stdout=got.append, on_stderr=on_stderr
    )
    out = b"".join(g for g in got if not g.startswith(b"E"))
    assert out == result.stdout and len(out) == 300_002
    assert b"Eb\n" in got and result.stderr == b"b\n"


async def test_background(sandbox, server):
    command = await sandbox.exec(["/bin/cat"], stdin=True, background=True)
    await command.send_stdin("one\n")
    assert (await command.status()).state == "running"
    await command.send_stdin(b"two\n")
    async with server.client() as other:
        again = await (await other.get_sandbox(sandbox.id)).operation(command.op_id)
        await command.close_stdin()
        result = await again.wait()
    assert result.stdout == b"one\ntwo\n"
    part = await command.output(stdout_from=4)
    assert part.stdout == b"two\n" and part.stdout_end == 8 and not part.running
    with pytest.raises(errors.OperationNotFound):
        await sandbox.operation("op-unknown")


async def test_kill(sandbox):
    command = await sandbox.exec(["sleep", "1000"], background=True)
    await command.kill(15)
    result = await command.wait()
    assert result.reason in ("killed", "signaled") and not result.ok


async def test_timeout_is_told(sandbox):
    result = await sandbox.run_shell("sleep 1000", timeout=0.05)
    assert result.reason == "timed_out"


async def test_same_op_id_runs_once(sandbox):
    first = await sandbox.run_shell("cd /tmp; pwd", op_id="op-1")
    again = await sandbox.run_shell("cd /tmp; pwd", op_id="op-1")
    assert first == again
    with pytest.raises(errors.OperationConflict):
        await sandbox.run_shell("echo another", op_id="op-1")


async def test_sessions(sandbox):
    build = sandbox.session("build")
    await build.run("cd /tmp")
    assert (await build.run("pwd")).stdout == b"/tmp\n"
    assert (await sandbox.run_shell("pwd")).stdout != b"/tmp\n"
    await build.close()
    with pytest.raises(errors.SessionNotFound):
        await build.close()


async def test_cancelled_command_is_killed(sandbox):
    task = asyncio.create_task(sandbox.exec(["sleep", "1000"], op_id="op-c"))
    await known(sandbox, "op-c")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    result = await (await sandbox.operation("op-c")).wait()
    assert not result.ok


async def test_failing_callback_ends_the_command(sandbox):
    def fail(data: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await sandbox.run_shell("echo x; sleep 1000", on_stdout=fail, op_id="op-f")
    assert not (await (await sandbox.operation("op-f")).wait()).ok


async def test_pty(sandbox):
    async with await sandbox.pty(["/bin/cat"], rows=30, columns=100) as terminal:
        await terminal.resize(rows=40, columns=120)
        await terminal.send("keys\n")
        got = b""
        async for chunk in terminal:
            got += chunk
            if b"keys" in got:
                break


async def test_failures_are_typed(sandbox):
    with pytest.raises(errors.ProgramNotFound):
        await sandbox.exec(["/no/such"])
    for wrong in ([], ["a\0b"], [""]):
        with pytest.raises(errors.InvalidArgument):
            await sandbox.exec(wrong)
    with pytest.raises(errors.InvalidArgument):
        await sandbox.run_shell("true", session="../x")
    with pytest.raises(errors.InvalidArgument):
        await sandbox.run_shell("true", timeout=-1)
    with pytest.raises(errors.InvalidArgument):
        await sandbox.run_shell("true", timeout=float("nan"))
    with pytest.raises(errors.InvalidArgument):
        await sandbox.run_shell("true", user="a b")
    with pytest.raises(errors.PayloadTooLarge):
        await sandbox.run_shell("#" * (4 << 20))
    with pytest.raises(errors.PathInvalid):
        await sandbox.run_shell("true", cwd="relative")


async def test_server_that_comes_back(server, sandbox):
    command = await sandbox.exec(["/bin/cat"], stdin=True, background=True)
    await command.send_stdin("before\n")
    await server.restart()
    await command.send_stdin("after\n")
    await command.close_stdin()
    assert (await command.wait()).stdout == b"before\nafter\n"


async def test_wait_over_a_graceful_restart(server, sandbox):
    task = asyncio.create_task(sandbox.exec(["sleep", "6"], op_id="op-long"))
    await known(sandbox, "op-long")
    await server.restart(graceful=True)
    assert (await task).ok


async def test_stream_over_a_restart(server, sandbox):
    command = await sandbox.exec(["/bin/cat"], stdin=True, background=True)
    await command.send_stdin("one\n")
    got = b""
    async for chunk in command.stream():
        got += chunk.data
        if got == b"one\n":
            await server.restart()
            await command.send_stdin("two\n")
            await command.close_stdin()
    assert got == b"one\ntwo\n"
