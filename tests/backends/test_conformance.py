"""What every backend must do, the fake one and the real ones alike."""

from __future__ import annotations

import asyncio

import pytest
from tests.backends.conftest import Rig
from tests.backends.inside import Inside

from dsec.backends.base import Exit
from dsec.core.errors import DSecError, SandboxFailed


async def test_launch_exec_stop_destroy(rig: Rig) -> None:
    spec = rig.spec(env={"GREETING": "hello"})
    handle, sock = await rig.launch(spec)
    assert not sock.getblocking()
    async with Inside(sock) as inside:
        assert inside.hello is not None and inside.hello.sandbox_id == spec.sandbox_id
        outcome = await inside.sh("echo $GREETING; echo err >&2")
        assert (outcome.ended.reason, outcome.ended.exit_code) == ("exited", 0)
        assert (outcome.stdout, outcome.stderr) == (b"hello\n", b"err\n")
    await rig.backend.stop(handle)
    exit_ = await rig.backend.wait_exit(handle)
    assert exit_.signal == 9
    await rig.backend.destroy(handle)


async def test_fingerprint(rig: Rig) -> None:
    fingerprint = await rig.backend.fingerprint()
    assert fingerprint.available and fingerprint.attributes


async def test_destroy_is_idempotent_and_kills(rig: Rig) -> None:
    handle, sock = await rig.launch()
    waiting = asyncio.create_task(rig.backend.wait_exit(handle))
    await asyncio.sleep(0)
    await rig.backend.destroy(handle)
    assert isinstance(await asyncio.wait_for(waiting, 30), Exit)
    await rig.backend.destroy(handle)
    await rig.backend.stop(handle)
    assert isinstance(await asyncio.wait_for(rig.backend.wait_exit(handle), 30), Exit)
    sock.close()


async def test_destroy_of_what_was_never_made(rig: Rig) -> None:
    spec = rig.spec()
    await rig.backend.destroy(rig.backend.half_made(spec.sandbox_id, spec.slot))


async def test_slot_and_id_can_be_used_again(rig: Rig) -> None:
    spec = rig.spec()
    for _ in range(3):
        handle, sock = await rig.launch(spec)
        await rig.backend.destroy(handle)
        sock.close()


async def test_new_connection_replaces_the_old(rig: Rig) -> None:
    handle, first = await rig.inside()
    async with Inside(await rig.backend.connect(handle)) as second:
        assert first.hello and second.hello and first.hello.instance == second.hello.instance
        assert (await second.sh("echo two")).stdout == b"two\n"
        with pytest.raises((EOFError, ConnectionError)):
            await first.sh("echo one")
    first.close()


async def test_recover_after_a_restart(rig: Rig) -> None:
    handle, inside = await rig.inside()
    before = inside.hello
    inside.close()
    await rig.restart()
    async with Inside(await rig.backend.recover(handle)) as again:
        assert before and again.hello and again.hello.instance == before.instance
        assert (await again.sh("echo here")).stdout == b"here\n"
    waiting = asyncio.create_task(rig.backend.wait_exit(handle))
    await asyncio.sleep(0)
    assert not waiting.done()
    await rig.backend.stop(handle)
    await asyncio.wait_for(waiting, 30)
    await rig.backend.destroy(handle)


async def test_recover_of_what_has_ended(rig: Rig) -> None:
    handle, sock = await rig.launch()
    sock.close()
    await rig.backend.stop(handle)
    await rig.restart()
    with pytest.raises(SandboxFailed):
        await rig.backend.recover(handle)
    with pytest.raises(SandboxFailed):
        await rig.backend.connect(handle)
    await rig.backend.destroy(handle)


async def test_reclaim_spares_what_is_claimed(rig: Rig) -> None:
    kept, inside = await rig.inside()
    lost, sock = await rig.launch()
    sock.close()
    rig.handles.remove(lost)
    told = await rig.backend.reclaim(frozenset({kept.sandbox_id}))
    assert told
    assert (await inside.sh("echo alive")).stdout == b"alive\n"
    inside.close()
    assert await rig.backend.reclaim(frozenset({kept.sandbox_id})) == []


async def test_reclaim_after_a_restart(rig: Rig) -> None:
    kept, sock = await rig.launch()
    sock.close()
    lost, sock = await rig.launch()
    sock.close()
    rig.handles.remove(lost)
    await rig.restart()
    assert await rig.backend.reclaim(frozenset({kept.sandbox_id}))
    async with Inside(await rig.backend.recover(kept)) as inside:
        assert (await inside.sh("echo alive")).stdout == b"alive\n"


async def test_stats(rig: Rig) -> None:
    handle, inside = await rig.inside()
    await inside.sh("true")
    stats = await rig.backend.stats(handle)
    assert stats.memory_bytes is not None and stats.memory_bytes >= 0
    assert stats.oom_kills == 0
    assert stats.pids is not None and stats.pids <= 1
    inside.close()


async def test_burst_and_cancellations(rig: Rig) -> None:
    """Some are cancelled at once, some a little later, the rest left alone: none is half-made afterwards."""
    tasks = [asyncio.create_task(rig.backend.launch(rig.spec())) for _ in range(24)]
    tasks[0].cancel()
    await asyncio.sleep(0)
    for task in tasks[1:6]:
        task.cancel()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks[6:12]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    made = [r for r in done if not isinstance(r, BaseException)]
    for failure in done:
        assert not isinstance(failure, DSecError), failure
    for handle, sock in made:
        async with Inside(sock) as inside:
            assert (await inside.sh("echo x")).stdout == b"x\n"
        await rig.backend.destroy(handle)
    assert len(made) >= 12
    assert await rig.backend.reclaim(frozenset()) == []
