"""An edge ends without a word; the next one takes over the same data and the same host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.base import Exit
from dsec.backends.fake import FakeBackend
from dsec.backends.fake_aether import FakeAether
from dsec.core.errors import OperationConflict, Unavailable
from dsec.core.ids import new_sandbox_id
from dsec.wire import aether as w
from dsec.wire import edge as m

from .conftest import Node, read_all, shell


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path, FakeBackend())
    await made.start()
    yield made
    await made.stop()
    assert made.backend.host.sandboxes == {} and made.edge.slots.held == frozenset()


async def again(node: Node) -> None:
    await node.crash()
    await node.start()


async def forgotten(node: Node, sandbox_id: str, op_id: str) -> None:
    """Until aether does not know the operation any more."""
    while op_id in node.backend.host.sandboxes[sandbox_id].aether.operations:
        await asyncio.sleep(0)


async def test_running_sandboxes_and_their_sessions_go_on(node: Node) -> None:
    made = [await node.create(labels={"n": str(i)}) for i in range(5)]
    await node.shell(made[0].id, "cd /tmp; export A=1")
    await again(node)
    for info in made:
        found = await node.get(info.id)
        assert (found.state, found.labels, found.created_at) == ("running", info.labels, info.created_at)
    assert (await node.shell(made[0].id, "pwd; echo $A", op_id="after")).stdout == b"/tmp\n1\n"
    assert node.edge.slots.held == set(range(5))


async def test_repeated_operation_gets_its_recorded_result(node: Node) -> None:
    info = await node.create()
    first = await node.shell(info.id, "echo once; echo err >&2", op_id="x")
    large = await node.shell(info.id, "count 1000000", op_id="big")
    await again(node)
    assert await node.shell(info.id, "echo once; echo err >&2", op_id="x") == first
    assert await node.shell(info.id, "count 1000000", op_id="big") == large
    with pytest.raises(OperationConflict):
        await node.shell(info.id, "echo twice", op_id="x")
    out, _, _ = await read_all(await node.attach(info.id, "big", stdout_from=999_000))
    assert len(out) == 1000
    await node.stop_sandbox(info.id)
    await again(node)
    assert await node.shell(info.id, "count 1000000", op_id="big") == large


async def test_running_operation_is_attached_again(node: Node) -> None:
    info = await node.create()
    await node.shell(
        info.id, "count 400000; cat", op_id="c", open_input=True, wait_s=0, request={"stdin": True}
    )
    sandbox = node.edge.sandboxes[info.id]
    operation = sandbox.running["c"]
    while operation.stdout is None or operation.stdout.received < 400_000:
        await operation.changed_future()
    await node.ask("input", m.InputOperation(sandbox_id=info.id, op_id="c", data=b"one "))
    while operation.stdout.received < 400_004:
        await operation.changed_future()
    await again(node)
    stream = await node.attach(info.id, "c", stdin_from=0)
    await node.ask("input", m.InputOperation(sandbox_id=info.id, op_id="c", data=b"two", eof=True))
    out, _, end = await read_all(stream)
    assert out[400_000:] == b"one two" and end.stdout_size == 400_007
    assert isinstance(end.result, w.Ended) and end.result.exit_code == 0


async def test_operation_that_ended_while_no_edge_was_there(node: Node) -> None:
    info = await node.create()
    await node.shell(info.id, "cat; echo late", op_id="c", open_input=True, wait_s=0, request={"stdin": True})
    aether = node.backend.host.sandboxes[info.id].aether
    await node.operation(info.id, "c", wait_s=0.001)
    await node.crash()
    aether.operations["c"].end_input()
    await node.start()
    assert (await node.operation(info.id, "c", wait_s=None)).stdout == b"late\n"
    await forgotten(node, info.id, "c")


async def test_recorded_but_not_forgotten(node: Node) -> None:
    """Killed between the outcome's record and FORGET."""
    info = await node.create()
    aether = node.backend.host.sandboxes[info.id].aether
    kept = aether._forget
    aether_type = type(aether)
    aether_type._forget = lambda self, operation: None  # type: ignore[method-assign]
    try:
        first = await node.shell(info.id, "echo x", op_id="x")
        await node.ask("sandbox_stats", m.SandboxId(sandbox_id=info.id))
        await node.crash()
    finally:
        aether_type._forget = kept.__func__  # type: ignore[attr-defined, method-assign]
    await node.start()
    assert await node.shell(info.id, "echo x", op_id="x") == first
    await forgotten(node, info.id, "x")


async def test_intent_that_was_never_sent_may_be_repeated(node: Node) -> None:
    info = await node.create()
    node.edge.sandboxes[info.id].connection._write = lambda data: None  # type: ignore[union-attr]
    await node.shell(info.id, "echo x", op_id="x", wait_s=0)
    await again(node)
    assert (await node.shell(info.id, "echo x", op_id="x")).stdout == b"x\n"


async def test_sandbox_that_died_meanwhile(node: Node) -> None:
    info = await node.create()
    await node.shell(info.id, "sleep 1000", op_id="s", wait_s=0)
    await node.crash()
    node.backend.host.kill(info.id, Exit(signal=9))
    await node.start()
    found = await node.get(info.id)
    assert found.state == "failed" and found.reason == "sandbox_failed"
    lost = await node.operation(info.id, "s")
    assert lost.state == "outcome_unknown"
    assert (await node.shell(info.id, "sleep 1000", op_id="s")).state == "outcome_unknown"


async def test_half_made_and_half_stopped(node: Node) -> None:
    node.backend.knobs.launch_gate = gate = asyncio.Event()
    half = new_sandbox_id("e1")
    creating = asyncio.ensure_future(node.create(half))
    while node.backend.launches == 0:
        await asyncio.sleep(0)
    node.backend.knobs.launch_gate = None
    other = await node.create()
    node.backend.knobs.destroy_gate = asyncio.Event()
    stopping = asyncio.ensure_future(node.stop_sandbox(other.id))
    await asyncio.sleep(0)
    creating.cancel()
    stopping.cancel()
    await asyncio.wait([creating, stopping])
    await node.crash()
    gate.set()
    node.backend.knobs.destroy_gate = None
    await node.start()
    assert (await node.stop_sandbox(other.id)).reason == "requested"
    await node.stop_sandbox(half)
    assert (await node.get(half)).state in ("failed", "stopped")
    assert node.edge.slots.held == frozenset()


async def test_unclaimed_is_reclaimed(node: Node) -> None:
    info = await node.create()
    await node.crash()
    stray = node.backend.host.sandboxes["stray"] = node.backend.host.sandboxes[info.id].__class__("stray", 77)
    await node.start()
    assert "stray" not in node.backend.host.sandboxes and stray.exit is not None
    assert (await node.get(info.id)).state == "running"


async def test_keep_leaves_sandboxes_for_the_next_edge(node: Node) -> None:
    info = await node.create()
    await node.shell(info.id, "sleep 1000", op_id="s", wait_s=0)
    await node.stop(keep=True)
    await node.start()
    assert (await node.operation(info.id, "s")).state == "running"
    assert (await node.shell(info.id, "echo on", op_id="t")).stdout == b"on\n"


async def test_streamed_content_is_cut_by_a_crash(node: Node) -> None:
    info = await node.create()
    write = w.WriteFile("w", b"/big", "", -1, "", -1, True, False, 1 << 30)
    await node.operate(info.id, write, stdin=bytes(5_000_000))
    stream = await node.attach(info.id, "r", start=w.ReadFile("r", b"/big", "", 0, -1))
    await stream.receive()
    await again(node)
    assert (await node.operation(info.id, "r")).state == "outcome_unknown"
    await forgotten(node, info.id, "r")


async def test_idle_ttl_begins_anew(node: Node) -> None:
    info = await node.create(ttl_running_stop=1)
    await again(node)
    sandbox = node.edge.sandboxes[info.id]
    while not sandbox.machine.gone:
        await sandbox.changed()
    assert (await node.get(info.id)).reason == "ttl_running_stop"


def test_shell_request_of_the_tests_is_whole() -> None:
    assert shell("a", "b").command == b"b"


async def test_a_sandbox_that_cannot_be_reached_at_once_is_not_given_up(node: Node) -> None:
    info = await node.create()
    await node.shell(info.id, "sleep 1000", op_id="s", wait_s=0)
    await node.crash()
    node.backend.knobs.connect_fails = True
    await node.start()
    assert (await node.get(info.id)).state == "running"
    with pytest.raises(Unavailable):
        await node.operation(info.id, "s")
    node.backend.knobs.connect_fails = False
    sandbox = node.edge.sandboxes[info.id]
    while sandbox.unmatched:
        await asyncio.sleep(0.001)
    assert (await node.operation(info.id, "s")).state == "running"


async def test_unreachable_then_dead(node: Node) -> None:
    info = await node.create()
    await node.shell(info.id, "sleep 1000", op_id="s", wait_s=0)
    await node.crash()
    node.backend.knobs.connect_fails = True
    await node.start()
    node.backend.host.kill(info.id, Exit(signal=9))
    sandbox = node.edge.sandboxes[info.id]
    while not sandbox.machine.gone:
        await sandbox.changed()
    assert (await node.operation(info.id, "s")).state == "outcome_unknown"


async def test_connection_lost_again_and_again_while_it_is_mended(node: Node) -> None:
    info = await node.create()
    await node.shell(info.id, "cat", op_id="c", open_input=True, wait_s=0, request={"stdin": True})
    sandbox = node.edge.sandboxes[info.id]
    for i in range(20):
        node.backend.host.disconnect(info.id)
        done = await node.shell(info.id, f"echo {i}", op_id=f"e{i}")
        assert done.stdout == f"{i}\n".encode(), done
        assert len(node.edge.tasks) <= 1
    assert sandbox.running.keys() == {"c"}
    await node.ask("input", m.InputOperation(sandbox_id=info.id, op_id="c", data=b"end", eof=True))
    assert (await node.operation(info.id, "c", wait_s=None)).stdout == b"end"


async def test_connection_lost_between_hello_and_list(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    info = await node.create()
    await node.shell(info.id, "sleep 1000", op_id="s", wait_s=0)
    control, times = FakeAether._control, 0

    def hang_up(self: FakeAether, type_: int, payload: bytes) -> None:
        nonlocal times
        if type_ == w.Type.LIST and times < 1:
            times += 1
            node.backend.host.disconnect(info.id)
        else:
            control(self, type_, payload)

    monkeypatch.setattr(FakeAether, "_control", hang_up)
    node.backend.host.disconnect(info.id)
    assert (await node.shell(info.id, "echo on", op_id="e")).stdout == b"on\n"
    assert times == 1
    await node.crash()
    times = 0
    await node.start()
    sandbox = node.edge.sandboxes[info.id]
    while sandbox.unmatched:
        await asyncio.sleep(0.001)
    assert (await node.operation(info.id, "s")).state == "running"
