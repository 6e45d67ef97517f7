"""Operations through the edge's subjects, on the fake backend."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from dsec.core.errors import (
    DiskFull,
    InvalidArgument,
    OperationConflict,
    OperationNotFound,
    SandboxNotFound,
    TooManyOperations,
    Unavailable,
    WrongEdge,
)
from dsec.edge.output import Output
from dsec.wire import aether as w
from dsec.wire import edge as m

from .conftest import Node, read_all, shell


async def test_shell(node: Node) -> None:
    sandbox = await node.create()
    done = await node.shell(sandbox.id, "echo hello; echo no >&2")
    assert (done.state, done.stdout, done.stderr) == ("ended", b"hello\n", b"no\n")
    assert isinstance(done.result, w.Ended) and done.result.exit_code == 0
    done = await node.shell(sandbox.id, "cd /tmp && export A=1; false")
    assert isinstance(done.result, w.Ended) and done.result.exit_code == 1 and done.result.cwd == "/tmp"
    assert (await node.shell(sandbox.id, "pwd; echo $A")).stdout == b"/tmp\n1\n"


async def test_repeat_joins_and_conflicts(node: Node) -> None:
    sandbox = await node.create()
    first = await node.shell(sandbox.id, "echo once", op_id="x")
    assert await node.shell(sandbox.id, "echo once", op_id="x") == first
    with pytest.raises(OperationConflict):
        await node.shell(sandbox.id, "echo twice", op_id="x")


async def test_stdin(node: Node) -> None:
    sandbox = await node.create()
    data = bytes(range(256)) * 20_000
    done = await node.shell(sandbox.id, "cat", stdin=data, request={"stdin": True})
    assert done.stdout == data and done.stdout_size == len(data)
    assert (await node.shell(sandbox.id, "cat")).stdout == b""


@pytest.mark.parametrize("size", [0, 1, 100_000, 131_072, 131_073, 300_000, 5_000_000])
async def test_output_is_whole(node: Node, size: int) -> None:
    sandbox = await node.create()
    done = await node.shell(sandbox.id, f"count {size}", op_id="n")
    expected = (b"0123456789abcde\n" * (size // 16 + 1))[:size]
    assert done.stdout == expected
    part = await node.operation(sandbox.id, "n", stdout_from=max(0, size - 70_000))
    assert part.stdout == expected[max(0, size - 70_000) :]
    out, _, end = await read_all(await node.attach(sandbox.id, "n"))
    assert out == expected and end.stdout_size == size


async def test_flood_is_cut(node: Node) -> None:
    sandbox = await node.create()
    request = {"output_limit": 1 << 20, "kill_at_limit": True}
    done = await node.shell(sandbox.id, "yes", request=request)
    assert isinstance(done.result, w.Ended) and done.result.reason == "output_limit"
    assert len(done.stdout) == 1 << 20


async def test_slow_reader_does_not_stall(node: Node) -> None:
    sandbox = await node.create()
    stream = await node.attach(sandbox.id, "n", start=shell("n", "count 8000000"))
    first = await stream.receive()
    await node.operation(sandbox.id, "n", wait_s=None)
    out, _, _ = await read_all(stream)
    assert isinstance(first, m.Output) and len(first.data) + len(out) == 8_000_000


async def test_attach_with_input(node: Node) -> None:
    sandbox = await node.create()
    stream = await node.attach(sandbox.id, "c", start=shell("c", "cat", stdin=True), stdin_from=0)
    await stream.send(m.Input(b"one "))
    await stream.send(m.Input(b"two"))
    await stream.send(m.InputEnd())
    out, _, end = await read_all(stream)
    assert out == b"one two" and end.state == "ended"


async def test_attach_from_offset_and_kill(node: Node) -> None:
    sandbox = await node.create()
    started = await node.shell(sandbox.id, "echo abc; sleep 1000", op_id="k", wait_s=0)
    assert started.state == "running"
    stream = await node.attach(sandbox.id, "k", stdout_from=1)
    frame = await stream.receive()
    assert isinstance(frame, m.Output) and (frame.offset, frame.data) == (1, b"bc\n")
    await stream.send(m.Kill(9, True))
    _, _, end = await read_all(stream)
    assert isinstance(end.result, w.Ended) and end.result.reason == "killed"


async def test_wait_ends_but_operation_goes_on(node: Node) -> None:
    sandbox = await node.create()
    assert (await node.shell(sandbox.id, "sleep 1000", op_id="s", wait_s=0.01)).state == "running"
    await node.ask("signal", m.SignalOperation(sandbox_id=sandbox.id, op_id="s", signal=15))
    done = await node.operation(sandbox.id, "s", wait_s=None)
    assert isinstance(done.result, w.Ended) and done.result.signal == 15


async def test_timeout(node: Node) -> None:
    sandbox = await node.create()
    done = await node.shell(sandbox.id, "sleep 1000", request={"timeout_ms": 1})
    assert isinstance(done.result, w.Ended) and done.result.reason == "timed_out"


async def test_files(node: Node) -> None:
    sandbox = await node.create()
    data = b"x" * 3_000_000
    write = w.WriteFile("w", b"/a/b", "", -1, "", -1, True, False, 1 << 30)
    done = await node.operate(sandbox.id, write, stdin=data)
    assert isinstance(done.result, w.FileDone) and done.result.stat.size == len(data)
    read = await node.operate(sandbox.id, w.ReadFile("r", b"/a/b", "", 0, -1))
    assert read.stdout == data
    missing = await node.operate(sandbox.id, w.ReadFile("q", b"/nowhere", "", 0, -1))
    assert missing.error is not None and missing.error.code == "file_not_found"


async def test_streamed_upload_and_download(node: Node) -> None:
    sandbox = await node.create()
    write = w.WriteFile("w", b"/big", "", -1, "", -1, True, False, 1 << 30)
    stream = await node.attach(sandbox.id, "w", start=write, stdin_from=0)
    for i in range(100):
        await stream.send(m.Input(bytes([i]) * 100_000))
    await stream.send(m.InputEnd())
    _, _, end = await read_all(stream)
    assert isinstance(end.result, w.FileDone) and end.result.stat.size == 10_000_000
    stream = await node.attach(sandbox.id, "r", start=w.ReadFile("r", b"/big", "", 0, -1))
    out, _, _ = await read_all(stream)
    assert out == b"".join(bytes([i]) * 100_000 for i in range(100))
    assert not list((node.data / "edge" / "spool").rglob("r.*")), "a stream is not kept"


async def test_reader_of_content_goes_away(node: Node) -> None:
    sandbox = await node.create()
    write = w.WriteFile("w", b"/big", "", -1, "", -1, True, False, 1 << 30)
    await node.operate(sandbox.id, write, stdin=bytes(5_000_000))
    stream = await node.attach(sandbox.id, "r", start=w.ReadFile("r", b"/big", "", 0, -1))
    assert isinstance(await stream.receive(), m.Output)
    await stream.close()
    done = await node.operation(sandbox.id, "r", wait_s=None)
    assert done.error is not None and done.error.code == "cancelled"


async def test_resend_input_after_lost_connection(node: Node) -> None:
    sandbox = await node.create()
    stream = await node.attach(sandbox.id, "c", start=shell("c", "cat", stdin=True), stdin_from=0)
    await stream.send(m.Input(b"before "))
    assert isinstance(await stream.receive(), m.Output)
    node.backend.host.disconnect(sandbox.id)
    await stream.send(m.Input(b"after"))
    await stream.send(m.InputEnd())
    out, _, _ = await read_all(stream)
    assert out == b"after"
    assert (await node.operation(sandbox.id, "c")).stdout == b"before after"


async def test_lost_connections_lose_no_output(node: Node) -> None:
    sandbox = await node.create()
    running = asyncio.ensure_future(node.shell(sandbox.id, "count 3000000", op_id="n"))
    stream = None
    for _ in range(2):
        stream = await node.attach(sandbox.id, "n", start=shell("n", "count 3000000"))
        await stream.receive()
        node.backend.host.disconnect(sandbox.id)
    assert len((await running).stdout) == 3_000_000


async def test_bad_requests(node: Node) -> None:
    sandbox = await node.create()
    with pytest.raises(InvalidArgument):
        await node.shell(sandbox.id, "true", op_id="a/b")
    with pytest.raises(InvalidArgument):
        await node.shell(sandbox.id, "true", request={"session": ""})
    with pytest.raises(InvalidArgument):
        await node.shell(sandbox.id, "true", request={"output_limit": -1})
    with pytest.raises(OperationNotFound):
        await node.operation(sandbox.id, "nothing")
    with pytest.raises(SandboxNotFound):
        await node.shell("sbx-e1-aaaaaaaaaaaa", "true")
    with pytest.raises(WrongEdge):
        await node.shell("sbx-e2-aaaaaaaaaaaa", "true")


async def test_spool_of_a_sandbox_is_bounded(node: Node) -> None:
    sandbox = await node.create()
    node.edge.operations._spool._per_sandbox = 2_500_000
    for i in range(4):
        await node.shell(sandbox.id, "count 1000000", op_id=f"n{i}")
    gone, kept = await node.operation(sandbox.id, "n0"), await node.operation(sandbox.id, "n3")
    assert (gone.stdout, gone.stdout_from, gone.stdout_size) == (b"", 1_000_000, 1_000_000)
    assert gone.result is not None and len(kept.stdout) == 1_000_000
    with pytest.raises(Unavailable):
        await read_all(await node.attach(sandbox.id, "n0"))
    assert (await node.shell(sandbox.id, "count 1000000", op_id="n1")).stdout == b""


async def test_full_disk_ends_the_command(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Output) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sandbox = await node.create()
    monkeypatch.setattr(Output, "spill", full)
    done = await node.shell(sandbox.id, "yes")
    assert done.error is not None and done.error.code == "disk_full"
    monkeypatch.undo()
    assert (await node.shell(sandbox.id, "echo on")).stdout == b"on\n"


async def test_full_log_starts_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await node.create()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 3)
    with pytest.raises(DiskFull):
        await node.shell(sandbox.id, "echo x", op_id="x")
    monkeypatch.undo()
    assert (await node.shell(sandbox.id, "echo x", op_id="x")).stdout == b"x\n"


async def test_many_operations_at_once(node: Node) -> None:
    sandbox = await node.create()
    running = [
        await node.shell(sandbox.id, "sleep 1000", wait_s=0) for _ in range(node.config.max_operations)
    ]
    with pytest.raises(TooManyOperations):
        await node.shell(sandbox.id, "true")
    await node.ask("signal", m.SignalOperation(sandbox_id=sandbox.id, op_id=running[0].op_id))
    await node.operation(sandbox.id, running[0].op_id, wait_s=None)
    await node.shell(sandbox.id, "true")
    page = await node.ask("operations", m.SandboxId(sandbox_id=sandbox.id))
    assert len(page.operations) == node.config.max_operations + 1
    assert sum(o.state == "running" for o in page.operations) == node.config.max_operations - 1


async def test_close_session_and_resize(node: Node) -> None:
    sandbox = await node.create()
    await node.shell(sandbox.id, "cd /tmp")
    closed = await node.operate(sandbox.id, w.CloseSession("c", "default"))
    assert closed.result == w.Done(True)
    assert (await node.shell(sandbox.id, "pwd")).stdout == b"/root\n"
    await node.shell(sandbox.id, "sleep 1000", op_id="t", wait_s=0)
    await node.ask("resize", m.ResizeOperation(sandbox_id=sandbox.id, op_id="t", rows=50, columns=100))
    with pytest.raises(InvalidArgument):
        await node.ask("resize", m.ResizeOperation(sandbox_id=sandbox.id, op_id="t", rows=0, columns=1))
