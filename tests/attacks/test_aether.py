"""As root inside a sandbox: reach, signal, trace, limit, starve, read or overwrite aether, its socket, its
binary and the edge's files. All must fail, and aether must answer afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.backends.conftest import CONTAINERS, Rig, make_rig, pytest_asyncio_loop_factories
from tests.backends.inside import Inside
from tests.backends.root import build_root, image_of

from dsec.backends.base import Handle, LayerRef

__all__ = ["pytest_asyncio_loop_factories"]
pytestmark = pytest.mark.kernel
SOURCE = Path(__file__).with_name("attack.c")
F_GET_SEALS = 1034
HARMLESS = {"prlimit-read"}


@pytest.fixture(scope="session")
def armed_layer(tmp_path_factory: pytest.TempPathFactory) -> LayerRef:
    """The base, with the attacking program in it."""
    where = tmp_path_factory.mktemp("armed")
    compiler = shutil.which("musl-gcc") or "gcc"
    command = [compiler, "-O1", "-static", "-o", str(where / "attack"), str(SOURCE)]
    subprocess.run(command, check=True)
    build_root(where / "root", {"/bin/attack": where / "attack"})
    (where / "root/etc/inside-marker").touch()
    return image_of(where / "root", where / "armed.erofs")


@pytest.fixture(params=CONTAINERS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path, armed_layer: LayerRef) -> AsyncIterator[Rig]:
    async for made in make_rig(request.param, tmp_path, armed_layer):
        yield made


@pytest.fixture
async def victim(rig: Rig) -> AsyncIterator[tuple[Handle, Inside]]:
    """A sandbox whose aether must be as it was when the test is over."""
    handle, inside = await rig.inside(pids_limit=64, memory_limit_mb=64)
    before = _state_of(handle.pid)
    yield handle, inside
    assert (await inside.sh("echo alive")).stdout == b"alive\n"
    assert _state_of(handle.pid) == before
    async with Inside(await rig.backend.connect(handle)) as again:
        assert again.hello and inside.hello and again.hello.instance == inside.hello.instance


def _state_of(pid: int) -> tuple[object, ...]:
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    keep = ("Name", "TracerPid", "Uid", "Cpus_allowed", "SigIgn", "Seccomp")
    return (
        *(status[k].strip() for k in keep),
        (proc / "limits").read_text(),
        (proc / "oom_score_adj").read_text(),
        (proc / "cgroup").read_text(),
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getscheduler(pid),
    )


async def test_nothing_of_aether_can_be_had(victim: tuple[Handle, Inside]) -> None:
    _, inside = victim
    outcome = await inside.run("/bin/attack")
    lines = dict(line.split(" ", 1) for line in outcome.stdout.decode().splitlines())
    assert outcome.ended.exit_code == 0, outcome
    assert len(lines) > 70
    assert {name for name, result in lines.items() if result == "done"} <= HARMLESS


async def test_an_unprivileged_user_has_no_more(victim: tuple[Handle, Inside]) -> None:
    _, inside = victim
    outcome = await inside.run("/bin/attack", user="user")
    done = [line for line in outcome.stdout.decode().splitlines() if line.endswith(" done")]
    assert {line.split()[0] for line in done} <= HARMLESS


async def test_signals(victim: tuple[Handle, Inside]) -> None:
    _, inside = victim
    outcome = await inside.run("/bin/attack", "signals")
    assert outcome.ended.reason in ("exited", "signaled", "killed")


async def test_fork_bomb(rig: Rig, victim: tuple[Handle, Inside]) -> None:
    handle, inside = victim
    bomb = await inside.begin("/bin/attack", "bomb", timeout_ms=3000)
    outcome = await inside.end(bomb)
    assert b"full" in outcome.stdout
    assert outcome.ended.reason == "timed_out"
    assert (await rig.backend.stats(handle)).pids is not None
    assert (await inside.run("/bin/attack", "signals")).ended is not None


async def test_memory_hogs(victim: tuple[Handle, Inside]) -> None:
    """The sandbox's limit takes what runs inside, and aether is not among it."""
    _, inside = victim
    for _ in range(3):
        outcome = await inside.sh("x=$(head -c 200000000 /dev/zero | tr '\\0' x)")
        assert outcome.ended.reason == "oom"


async def test_full_disk_and_shm(victim: tuple[Handle, Inside]) -> None:
    _, inside = victim
    await inside.sh(
        "dd if=/dev/zero of=/big bs=1048576 count=400; dd if=/dev/zero of=/dev/shm/x bs=1048576 count=80"
    )
    assert (await inside.sh("rm -f /big /dev/shm/x; echo ok")).stdout == b"ok\n"


async def test_the_binary_is_sealed(victim: tuple[Handle, Inside]) -> None:
    handle, _ = victim
    fd = os.open(f"/proc/{handle.pid}/exe", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert fcntl.fcntl(fd, F_GET_SEALS) == 0x1 | 0x2 | 0x4 | 0x8
    finally:
        os.close(fd)


async def test_aether_holds_no_descriptor_of_the_host(victim: tuple[Handle, Inside]) -> None:
    """What it has open is its own: nothing that leads to the host's files."""
    handle, _ = victim
    for fd in Path(f"/proc/{handle.pid}/fd").iterdir():
        target = os.readlink(fd)
        allowed = ("socket:", "anon_inode:", "pipe:", "/dev/null", "/tasks", "/memory.", "/", "/box/")
        assert target.startswith(allowed) and "/data/" not in target, target


async def test_names_inside_do_not_tell_of_the_host(rig: Rig, victim: tuple[Handle, Inside]) -> None:
    _, inside = victim
    seen = await inside.sh(
        "cat /proc/self/mountinfo /proc/self/cgroup /proc/net/unix /proc/1/status; ls -la /proc/1"
    )
    assert str(rig.data).encode() not in seen.stdout


async def test_one_sandbox_does_not_reach_another(rig: Rig, victim: tuple[Handle, Inside]) -> None:
    _, inside = victim
    _, other = await rig.inside()
    marker = await other.begin("sleep", "4321")
    outcome = await inside.sh("cat /proc/*/cmdline | tr '\\0' ' '; kill -9 -1; echo sent")
    assert b"4321" not in outcome.stdout
    await inside.sh("ps aux 2>/dev/null; true")
    assert (await other.sh("cat /proc/*/cmdline | tr '\\0' ' '")).stdout.count(b"sleep 4321") == 1
    assert marker
