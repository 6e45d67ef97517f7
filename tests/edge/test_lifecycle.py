"""Creation, failure and end of sandboxes, with the fake's knobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from dsec.backends.base import Exit, Seen
from dsec.core.errors import (
    AdmissionRefused,
    Cancelled,
    DeadlineExceeded,
    DSecError,
    IdempotencyMismatch,
    InvalidArgument,
    KilledFromInside,
    LaunchFailed,
    ProtocolError,
    SandboxNotFound,
    Unavailable,
    UnknownLayer,
    WrongEdge,
    WrongState,
)
from dsec.core.ids import new_sandbox_id
from dsec.core.network import NetworkRule
from dsec.core.sandbox_state import State
from dsec.edge.config import EdgeConfig
from dsec.wire import edge as m

from .conftest import Node


def settings(node: Node, **changes: object) -> None:
    """Change the configuration of the edge that runs."""
    fields = {f: getattr(node.config, f) for f in EdgeConfig.__struct_fields__}
    config = EdgeConfig(**{**fields, **changes})
    node.edge.config = node.edge.link._config = node.edge.lifecycle._config = config
    node.edge.operations._config = node.edge.retention._config = config


async def until(node: Node, sandbox_id: str, ready: Callable[[], bool]) -> None:
    while not ready():
        await node.edge.sandboxes[sandbox_id].changed()


async def failed(node: Node, sandbox_id: str) -> m.SandboxInfo:
    sandbox = node.edge.sandboxes[sandbox_id]
    await until(node, sandbox_id, lambda: sandbox.state is State.FAILED and sandbox.machine.gone)
    return await node.get(sandbox_id)


async def test_create_get_stop(node: Node) -> None:
    info = await node.create(labels={"a": "b"}, project="p", ttl_max=60)
    assert info.state == "running" and info.ready_at is not None and info.timings_ms["total"] > 0
    assert await node.get(info.id) == info
    ended = await node.stop_sandbox(info.id)
    assert (ended.state, ended.reason) == ("stopped", "requested")
    assert await node.stop_sandbox(info.id) == ended
    with pytest.raises(WrongState):
        await node.shell(info.id, "true")


async def test_repeat_of_creation(node: Node) -> None:
    node.backend.knobs.launch_gate = gate = asyncio.Event()
    one = new_sandbox_id("e1")
    both = asyncio.gather(node.create(one), node.create(one))
    gate.set()
    first, second = await both
    assert first == second and node.backend.launches == 1
    with pytest.raises(IdempotencyMismatch):
        await node.create(one, memory_limit_mb=100)
    await node.stop_sandbox(one)
    assert (await node.create(one)).state == "stopped"


async def test_repeat_of_a_failed_creation_fails_the_same(node: Node) -> None:
    node.backend.knobs.refuse_launch = "disk_full"
    one = new_sandbox_id("e1")
    for _ in range(2):
        with pytest.raises(DSecError) as e:
            await node.create(one)
        assert e.value.code == "disk_full"
    assert node.backend.launches == 1


@pytest.mark.parametrize("stage", ["record", "process", "socket"])
@pytest.mark.parametrize("leave", [False, True])
async def test_failure_at_each_stage(node: Node, stage: str, leave: bool) -> None:
    node.backend.knobs.fail_stage, node.backend.knobs.leave_behind = stage, leave
    one = new_sandbox_id("e1")
    with pytest.raises(LaunchFailed, match=stage):
        await node.create(one)
    info = await failed(node, one)
    assert info.reason == "launch_failed" and info.error is not None and info.error.retry == "safe"
    assert node.backend.host.sandboxes == {}


async def test_unknown_layer(node: Node) -> None:
    with pytest.raises(UnknownLayer):
        await node.create(image="unknown")


async def test_bad_specs(node: Node) -> None:
    for bad in ({"memory_limit_mb": -1}, {"backend": "container"}, {"hostname": "?"}, {"ttl_max": 0}):
        with pytest.raises(InvalidArgument):
            await node.create(**bad)
    with pytest.raises(WrongEdge):
        await node.create("sbx-e2-aaaaaaaaaaaa")
    with pytest.raises(SandboxNotFound):
        await node.get("sbx-e1-aaaaaaaaaaaa")
    assert node.edge.slots.held == frozenset()


async def test_deadline_undoes_the_creation(node: Node) -> None:
    node.backend.knobs.launch_gate = asyncio.Event()
    one = new_sandbox_id("e1")
    with pytest.raises(DeadlineExceeded):
        await node.create(one, deadline_s=0.01)
    assert (await failed(node, one)).reason == "deadline_exceeded"


async def test_cancellation_undoes_the_creation(node: Node) -> None:
    node.backend.knobs.launch_gate = asyncio.Event()
    one = new_sandbox_id("e1")
    creating = [asyncio.ensure_future(node.create(one)) for _ in range(2)]
    while node.backend.launches == 0:
        await asyncio.sleep(0)
    creating[0].cancel()
    await asyncio.wait([creating[0]])
    assert node.edge.sandboxes[one].state is State.CREATING, "another caller still waits"
    creating[1].cancel()
    await asyncio.wait(creating)
    await until(node, one, lambda: node.edge.sandboxes[one].machine.gone)
    assert (await node.get(one)).reason == "cancelled"


async def test_cancelled_before_the_launch_began(node: Node) -> None:
    one = new_sandbox_id("e1")
    creating = asyncio.ensure_future(node.create(one))
    await asyncio.sleep(0)
    creating.cancel()
    await asyncio.wait([creating])
    await until(node, one, lambda: node.edge.sandboxes[one].machine.gone)


async def test_stop_while_creating(node: Node) -> None:
    node.backend.knobs.launch_gate = asyncio.Event()
    one = new_sandbox_id("e1")
    creating = asyncio.ensure_future(node.create(one))
    while node.backend.launches == 0:
        await asyncio.sleep(0)
    assert (await node.stop_sandbox(one)).state == "stopped"
    with pytest.raises(Cancelled):
        await creating


async def test_no_hello(node: Node) -> None:
    settings(node, hello_deadline_s=0.01)
    node.backend.knobs.no_hello = True
    with pytest.raises(LaunchFailed):
        await node.create()


async def test_wrong_version(node: Node) -> None:
    node.backend.knobs.wrong_hello = True
    with pytest.raises(LaunchFailed, match="version_mismatch"):
        await node.create()


async def test_dies_after_launch(node: Node) -> None:
    node.backend.knobs.die_after_launch = True
    with pytest.raises(LaunchFailed):
        await node.create()


async def test_killed_from_inside(node: Node) -> None:
    info = await node.create()
    done = await node.shell(info.id, "kill 1")
    assert done.state == "outcome_unknown"
    assert done.error is not None and done.error.code == "killed_from_inside"
    assert (await failed(node, info.id)).reason == "killed_from_inside"
    with pytest.raises(KilledFromInside):
        await node.shell(info.id, "true")
    assert (await node.operation(info.id, done.op_id)).state == "outcome_unknown"


async def test_host_out_of_memory_is_the_nodes_fault(node: Node) -> None:
    info = await node.create()
    node.backend.host.kill(info.id, Exit(signal=9, host_oom=True))
    assert (await failed(node, info.id)).reason == "node_failed"


async def test_corrupt_frames_fail_it_after_three(node: Node) -> None:
    info = await node.create()
    node.backend.knobs.corrupt = True
    node.backend.host.sandboxes[info.id].aether.corrupt = True
    done = await node.shell(info.id, "true")
    assert done.state == "outcome_unknown"
    assert (await failed(node, info.id)).reason == "protocol_error"
    with pytest.raises(ProtocolError):
        await node.shell(info.id, "true")


async def test_silent_aether_is_lost(node: Node) -> None:
    info = await node.create()
    settings(node, lost_after_s=0.05)
    node.edge.watchdog.deadline_s = 0.02
    node.backend.knobs.connect_fails = True
    node.backend.host.sandboxes[info.id].aether.silent = True
    done = await node.shell(info.id, "true")
    assert done.error is not None and done.error.code == "aether_lost"
    assert (await failed(node, info.id)).reason == "aether_lost"


async def test_lost_connection_is_mended(node: Node) -> None:
    info = await node.create()
    node.backend.host.disconnect(info.id)
    assert (await node.shell(info.id, "echo on")).stdout == b"on\n"


async def test_failed_stop_and_destroy_are_tried_again(node: Node) -> None:
    settings(node, retry_s=0.001)
    info = await node.create()
    node.backend.knobs.stop_fails, node.backend.knobs.destroy_fails = 2, 2
    assert (await node.stop_sandbox(info.id)).state == "stopped"
    assert node.backend.host.sandboxes == {}


async def test_slot_is_held_until_destroyed(node: Node) -> None:
    info = await node.create()
    node.backend.knobs.destroy_gate = gate = asyncio.Event()
    stopping = asyncio.ensure_future(node.stop_sandbox(info.id))
    await asyncio.sleep(0)
    assert node.edge.slots.held == {0}
    gate.set()
    await stopping
    assert node.edge.slots.held == frozenset()


async def test_idle_ttl(node: Node) -> None:
    info = await node.create(ttl_running_stop=1)
    sandbox = node.edge.sandboxes[info.id]
    await node.shell(info.id, "sleep 1000", op_id="s", wait_s=0)
    now = asyncio.get_running_loop().time
    sandbox.last_used -= 100
    node.edge.ttls._judge(sandbox, now())
    assert sandbox.due > now() and sandbox.state is State.RUNNING, "never while an operation runs"
    await node.ask("signal", m.SignalOperation(sandbox_id=info.id, op_id="s"))
    await node.operation(info.id, "s", wait_s=None)
    sandbox.last_used -= 2
    node.edge.ttls._judge(sandbox, now())
    await until(node, info.id, lambda: sandbox.machine.gone)
    assert (await node.get(info.id)).reason == "ttl_running_stop"


async def test_idle_ttl_by_the_clock(node: Node) -> None:
    info = await node.create(ttl_running_stop=1)
    await until(node, info.id, lambda: node.edge.sandboxes[info.id].machine.gone)
    assert (await node.get(info.id)).reason == "ttl_running_stop"


@pytest.mark.parametrize("jump", [1e9, -1e9])
async def test_a_jump_of_the_wall_clock_ends_no_sandbox(
    node: Node, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    info = await node.create(ttl_max=1000, ttl_running_stop=100)
    sandbox, wall = node.edge.sandboxes[info.id], time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    now = asyncio.get_running_loop().time
    node.edge.ttls._judge(sandbox, now())
    assert sandbox.state is State.RUNNING and now() < sandbox.due <= now() + 100
    assert sandbox.ends_at is not None
    sandbox.ends_at -= 1000
    node.edge.ttls._judge(sandbox, now())
    await until(node, info.id, lambda: sandbox.machine.gone)
    assert (await node.get(info.id)).reason == "ttl_max"


async def test_ttl_max_ends_what_is_busy(node: Node) -> None:
    info = await node.create(ttl_max=1)
    done = await node.shell(info.id, "sleep 1000")
    assert done.state == "outcome_unknown"
    assert (await node.get(info.id)).reason == "ttl_max"


async def test_admission(node: Node) -> None:
    node.edge.node.limits = type(node.edge.node.limits)(
        max_sandboxes=2,
        memory_total_mb=1000,
        memory_overcommit=2.0,
        memory_reserve_mb=0,
        pids_total=10_000,
        pids_overcommit=1.0,
    )
    first = await node.create(memory_limit_mb=1500)
    with pytest.raises(AdmissionRefused, match="memory"):
        await node.create(memory_limit_mb=501)
    await node.create(memory_limit_mb=500)
    with pytest.raises(AdmissionRefused, match="2 sandboxes"):
        await node.create(memory_limit_mb=8)
    await node.stop_sandbox(first.id)
    await node.create(memory_limit_mb=1500)


async def test_list(node: Node) -> None:
    made = [await node.create(project=f"p{i % 2}", labels={"n": str(i)}) for i in range(7)]
    ask = m.ListSandboxes
    page = await node.ask("list", ask(project="p0", limit=3))
    rest = await node.ask("list", ask(project="p0", limit=3, after=page.next))
    assert [*page.sandboxes, *rest.sandboxes] == sorted(made[::2], key=lambda i: i.id) and not rest.next
    assert [i.id for i in (await node.ask("list", ask(labels={"n": "3"}))).sandboxes] == [made[3].id]
    await node.stop_sandbox(made[0].id)
    assert [i.id for i in (await node.ask("list", ask(states=["stopped"]))).sandboxes] == [made[0].id]


async def test_stopped_are_kept_for_a_while(node: Node) -> None:
    settings(node, stopped_kept=1)
    first, second = await node.create(), await node.create()
    await node.shell(first.id, "count 1000000")
    for info in (first, second):
        await node.stop_sandbox(info.id)
    with pytest.raises(SandboxNotFound):
        await node.get(first.id)
    assert (await node.get(second.id)).state == "stopped"
    left = list((node.data / "edge" / "spool").iterdir()) + list(
        (node.data / "edge" / "operations").iterdir()
    )
    assert left == []


async def test_secrets_reach_the_sandbox_and_nothing_else(node: Node) -> None:
    info = await node.create(secrets={"TOKEN": "hunter2hunter2"})
    assert (await node.shell(info.id, "echo $TOKEN > /dev/null", op_id="e")).state == "ended"
    assert node.backend.host.sandboxes[info.id].aether.environment["TOKEN"] == "hunter2hunter2"
    assert "hunter2hunter2" not in repr(info) and "hunter2" not in repr(node.edge.sandboxes[info.id].record)
    for path in (node.data / "edge").glob("sandboxes.db*"):
        assert b"hunter2" not in path.read_bytes()


async def test_network_rules(node: Node) -> None:
    """Compiled at creation, changed in the record before they are in force, refused by name."""
    info = await node.create(network_rules={"pypi": True})
    assert [n.pattern for n in node.backend.policies[info.id].names] == ["pypi.example"]
    assert node.backend.host.sandboxes[info.id].aether.environment["PIP_INDEX_URL"] == "http://pypi.example"
    rules = {"allow": [NetworkRule(cidr="192.0.2.0/24", ports=[80])]}
    answer = await node.ask("set_network_rules", m.SetNetworkRules(sandbox_id=info.id, rules=rules))
    assert answer.rules == rules
    assert [a.network for a in node.backend.policies[info.id].addresses] == ["192.0.2.0/24"]
    node.backend.knobs.refuse_rules = "unavailable"
    with pytest.raises(Unavailable):
        await node.ask("set_network_rules", m.SetNetworkRules(sandbox_id=info.id, rules={}))
    assert node.edge.sandboxes[info.id].record.spec.network_rules == {}, "a new life puts these in force"
    for bad in ({"npm": True}, {"nowhere": True}, {"allow": [NetworkRule(cidr="192.0.2.1/24")]}):
        with pytest.raises(InvalidArgument, match="network_rules"):
            await node.create(network_rules=bad)


async def test_rules_are_in_force_again_after_a_restart(node: Node) -> None:
    info = await node.create(network_rules={"pypi": True})
    node.backend.policies.clear()
    await node.crash()
    await node.start()
    assert [n.pattern for n in node.backend.policies[info.id].names] == ["pypi.example"]


async def test_without_a_network_there_are_no_rules_to_change(node: Node) -> None:
    info = await node.create()
    with pytest.raises(WrongState, match="network_rules"):
        await node.ask("set_network_rules", m.SetNetworkRules(sandbox_id=info.id, rules={}))


async def test_what_was_refused_is_an_event(node: Node) -> None:
    info = await node.create(network_rules={})
    ask = m.EventsQuery(sandbox_id=info.id, wait_s=20)
    waiting = asyncio.create_task(node.ask("events", ask))
    await asyncio.sleep(0)
    node.backend.on_seen(info.id, Seen(what="dns", reason="not_allowed", name="evil.example"))
    page = await waiting
    assert [(e.position, e.kind, e.name) for e in page.events] == [(1, "network_denied", "evil.example")]
    for i in range(1500):
        node.backend.on_seen(info.id, Seen(what="flow", reason="not_allowed", port=i))
    page = await node.ask("events", m.EventsQuery(sandbox_id=info.id, after=1, limit=10))
    assert page.lost == 500 and page.events[0].position == 502 and page.next == 511


async def test_node_and_stats(node: Node) -> None:
    info = await node.create()
    stats = await node.ask("sandbox_stats", m.SandboxId(sandbox_id=info.id))
    assert stats.memory_bytes and stats.uptime_s >= 0
    about = await node.ask("node", m.NodeQuery())
    assert about.counts == {"running": 1} and about.memory_total_mb > 0 and about.backends[0].available
    node.edge.drain()
    with pytest.raises(Unavailable):
        await node.create()
    assert (await node.shell(info.id, "echo still")).stdout == b"still\n"
