"""What containers alone must do: limits, layers, ids, and what of the host is to be seen inside."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.backends.conftest import CONTAINERS, Rig, make_rig
from tests.backends.inside import Inside
from tests.backends.root import image_of

from dsec.backends.base import LayerRef
from dsec.backends.container import backend, dev
from dsec.core.errors import DSecError, LaunchFailed, LayerCorrupt, Unavailable, UnknownLayer
from dsec.linux.syscalls import MS_BIND, MS_SHARED, mount, umount2

pytestmark = pytest.mark.kernel


async def test_memory_limit_kills_the_hog_alone(container: Rig) -> None:
    handle, inside = await container.inside(memory_limit_mb=32)
    outcome = await inside.sh("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo unreachable")
    assert outcome.ended.reason == "oom" and b"unreachable" not in outcome.stdout
    assert (await inside.sh("echo alive")).stdout == b"alive\n"
    stats = await container.backend.stats(handle)
    assert stats.oom_kills and stats.memory_peak_bytes <= 32 << 20
    inside.close()


async def test_pids_limit(container: Rig) -> None:
    _, inside = await container.inside(pids_limit=8)
    outcome = await inside.sh("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 60 & done; echo unreachable")
    assert outcome.ended.exit_code != 0 and b"unreachable" not in outcome.stdout
    assert (await inside.sh("kill -9 -1")).ended.reason == "exited"  # of all but itself
    assert (await inside.sh("echo alive")).stdout == b"alive\n"
    inside.close()


async def test_cpu_limit(container: Rig) -> None:
    handle, inside = await container.inside(cpu_cores_limit=0.1)
    await inside.sh("i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done")
    group = container.backend.cgroups
    assert _throttled(group, handle.sandbox_id) > 0
    stats = await container.backend.stats(handle)
    assert stats.cpu_us is None or stats.cpu_us > 0  # None: cpuacct is a hierarchy of its own
    inside.close()


def _throttled(groups: Any, name: str) -> int:
    where = f"{groups.base}/box/{name}" if groups.version == 2 else f"{groups.base['cpu']}/box/{name}"
    lines = dict(line.split() for line in Path(where, "cpu.stat").read_text().splitlines())
    return int(lines["nr_throttled"])


async def test_disk_limit(container: Rig) -> None:
    _, inside = await container.inside(disk_limit_mb=16)
    outcome = await inside.sh("dd if=/dev/zero of=/tmp/big bs=1048576 count=64")
    assert outcome.ended.exit_code != 0
    assert b"space" in outcome.stderr or b"uota" in outcome.stderr
    size = int(await inside.text("stat -c %s /tmp/big"))
    assert 8 << 20 <= size <= 16 << 20
    assert (await inside.sh("rm /tmp/big; echo ok > /tmp/small; cat /tmp/small")).stdout == b"ok\n"
    inside.close()


async def test_disk_limit_counts_what_is_used(container: Rig) -> None:
    handle, inside = await container.inside(disk_limit_mb=64)
    await inside.text("dd if=/dev/urandom of=/tmp/some bs=1048576 count=8 2>/dev/null")
    os.sync()  # inside it would do nothing: the writable layer is volatile
    stats = await container.backend.stats(handle)
    assert stats.disk_bytes is None or 8 << 20 <= stats.disk_bytes <= 16 << 20
    inside.close()


async def test_shared_memory_has_its_size(container: Rig) -> None:
    _, inside = await container.inside(shm_mb=4)
    outcome = await inside.sh("dd if=/dev/zero of=/dev/shm/x bs=1048576 count=8 2>&1; stat -c %s /dev/shm/x")
    assert outcome.stdout.split()[-1] == str(4 << 20).encode()
    inside.close()


async def test_names_work_without_the_image(container: Rig) -> None:
    _, inside = await container.inside(hostname="worker-1")
    assert await inside.text("hostname") == "worker-1"
    assert await inside.text("cat /etc/hostname") == "worker-1"
    hosts = await inside.text("cat /etc/hosts")
    assert "127.0.0.1\tlocalhost" in hosts and "worker-1" in hosts
    assert "options" in await inside.text("cat /etc/resolv.conf")
    assert await inside.text("stat -c %u:%g:%a /etc /etc/hosts") == "0:0:755\n0:0:644"
    inside.close()


async def test_etc_of_the_image_shows_through(container: Rig) -> None:
    _, inside = await container.inside()
    assert "user:x:1000" in await inside.text("cat /etc/passwd")
    inside.close()


async def test_writable_layers_are_apart(container: Rig) -> None:
    _, one = await container.inside()
    _, two = await container.inside()
    await one.text("echo mine > /root/file; rm /etc/group; echo changed > /etc/passwd")
    assert await two.text("ls /root") == ""
    assert "user:x" in await two.text("cat /etc/passwd /etc/group")
    one.close()
    two.close()


async def test_ids_on_disk_are_the_images_own(container: Rig) -> None:
    handle, inside = await container.inside()
    await inside.text("touch /root/a; echo b > /home/user/b; chown 1000:1000 /home/user/b")
    assert await inside.text("stat -c %u:%g /home/user /root/a /home/user/b") == "1000:1000\n0:0\n1000:1000"
    upper = container.data / "pool" / handle.sandbox_id / "upper"
    assert (upper / "root/a").stat().st_uid == 0
    assert (upper / "home/user/b").stat().st_uid == 1000
    inside.close()


async def test_layers_stack_bottom_to_top(container: Rig, tmp_path: Path) -> None:
    layers = [container.base]
    for name in ("workspace", "toolkit"):
        tree = tmp_path / name
        (tree / "opt").mkdir(parents=True)
        (tree / "opt" / name).write_text(name)
        (tree / "opt" / "top").write_text(name)
        layers.append(image_of(tree, tmp_path / f"{name}.erofs"))
    _, inside = await container.inside(layers=layers)
    assert await inside.text("cat /opt/workspace; echo; cat /opt/toolkit; echo; cat /opt/top") == (
        "workspace\ntoolkit\ntoolkit"
    )
    inside.close()


async def test_many_layers(container: Rig, tmp_path: Path) -> None:
    layers = [container.base]
    for number in range(20):
        (tree := tmp_path / f"tree{number}").mkdir()
        (tree / f"file{number}").write_text(str(number))
        layers.append(image_of(tree, tmp_path / f"{number}.erofs"))
    _, inside = await container.inside(layers=layers)
    assert len((await inside.text("cat /file* > /all; ls -d /file*")).split()) == 20
    inside.close()


async def test_device_nodes_cannot_be_opened(container: Rig) -> None:
    """Neither one of a layer nor one made inside; those of /dev work."""
    _, inside = await container.inside()
    await inside.text(
        "echo x > /dev/null; head -c 4 /dev/zero > /dev/null; head -c 4 /dev/urandom > /dev/null"
    )
    outcome = await inside.sh("mknod /tmp/disk b 254 0 && cat /tmp/disk")
    assert outcome.ended.exit_code != 0
    outcome = await inside.sh("mknod /dev/disk b 254 0")
    assert outcome.ended.exit_code != 0
    inside.close()


async def test_device_node_of_a_layer(container: Rig, tmp_path: Path) -> None:
    (tree := tmp_path / "tree").mkdir()
    os.mknod(tree / "null", 0o020666, os.makedev(1, 3))
    _, inside = await container.inside(layers=[container.base, image_of(tree, tmp_path / "node.erofs")])
    outcome = await inside.sh("echo x > /null")
    assert outcome.ended.exit_code != 0 and b"denied" in outcome.stderr
    inside.close()


async def test_proc_and_sys(container: Rig) -> None:
    _, inside = await container.inside()
    for path in ("kcore", "keys", "timer_list", "kpagecount", "kpageflags", "kpagecgroup", "interrupts"):
        assert await inside.text(f"cat /proc/{path} 2>/dev/null; true") == "", path
    for path in (
        "/proc/sys/kernel/hostname",
        "/proc/sysrq-trigger",
        "/proc/irq/x",
        "/sys/x",
        "/sys/kernel/x",
    ):
        outcome = await inside.sh(f"echo x > {path}")
        assert outcome.ended.exit_code != 0, path
    assert await inside.text("ls /sys/firmware /proc/acpi /proc/scsi 2>/dev/null; true") in (
        "",
        "/sys/firmware:",
        "/proc/acpi:\n\n/proc/scsi:\n\n/sys/firmware:",
        "/proc/scsi:\n\n/sys/firmware:",
        "/proc/acpi:\n\n/sys/firmware:",
    )
    inside.close()


async def test_only_the_sandboxes_own_is_seen(container: Rig) -> None:
    _, inside = await container.inside()
    assert await inside.text("ls /sys/class/net") == "lo"
    assert "up" in await inside.text("cat /sys/class/net/lo/operstate; cat /sys/class/net/lo/flags; echo up")
    assert {line.split(":")[-1] for line in (await inside.text("cat /proc/self/cgroup")).split()} == {"/"}
    mounts = await inside.text("cat /proc/self/mountinfo")
    assert str(container.data) not in mounts
    assert {int(p) for p in (await inside.text("ls /proc")).split() if p.isdigit()} >= {1}
    assert str(container.data) not in await inside.text("cat /proc/net/unix; cat /proc/1/cmdline; true")
    inside.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory whose mounts are shared, as all are on a host that systemd runs."""
    (where := tmp_path / "shared").mkdir(mode=0o700)
    mount(str(where), where, "", MS_BIND)
    mount("", where, "", MS_SHARED)
    yield where
    umount2(where)


@pytest.fixture(params=CONTAINERS)
async def shared_rig(
    request: pytest.FixtureRequest, shared: Path, base_layer: LayerRef, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    """With a /dev that has a place on the host, as before Linux 6.15."""

    def refuse(_: int) -> int:
        raise OSError(errno.EINVAL, "only what has a place is cloned")

    monkeypatch.setattr(dev, "clone", refuse)
    async for rig in make_rig(request.param, shared, base_layer):
        yield rig


async def test_mounts_of_a_sandbox_are_seen_nowhere_else(shared_rig: Rig) -> None:
    sandboxes = [await shared_rig.inside() for _ in range(3)]
    for _, inside in sandboxes:
        for place in ("/dev/pts", "/dev/shm"):
            assert await inside.text(f"grep -c ' {place} ' /proc/self/mountinfo") == "1"
        inside.close()
    assert f"{shared_rig.data}/run/dev/" not in Path("/proc/self/mountinfo").read_text()


async def test_open_files_limit_and_no_core(container: Rig) -> None:
    _, inside = await container.inside(open_files_limit=100)
    assert await inside.text("ulimit -n; ulimit -c") == "100\n0"
    inside.close()


async def test_init_user(container: Rig) -> None:
    _, inside = await container.inside(init_user="user", workdir="/home/user")
    assert await inside.text("id -u; id -g; pwd") == "1000\n1000\n/home/user"
    inside.close()


async def test_damaged_layers(container: Rig, damaged: Path) -> None:
    whole = damaged.read_bytes()

    async def refused(content: bytes, digest: str, error: type[DSecError]) -> None:
        damaged.write_bytes(content)
        with pytest.raises(error):
            await container.launch(layers=[LayerRef(digest=digest, path=str(damaged))])

    await refused(b"", "empty", LayerCorrupt)
    await refused(whole[:1000], "short", LayerCorrupt)
    await refused(whole[:8192], "cut", LayerCorrupt)
    await refused(whole[: len(whole) // 2], "half", LayerCorrupt)
    await refused(whole[:1024] + b"\0" * 128 + whole[1152:], "superblock", LayerCorrupt)
    await refused(b"not an image at all" * 1000, "other", LayerCorrupt)
    with pytest.raises(UnknownLayer):
        await container.launch(layers=[LayerRef(digest="gone", path="/no/such/image")])
    damaged.write_bytes(whole)
    _, inside = await container.inside(layers=[LayerRef(digest="half", path=str(damaged))])
    assert (await inside.sh("echo mended")).stdout == b"mended\n"
    inside.close()
    assert not [p for p in (container.data / "layers").iterdir() if not os.path.ismount(p)]


STEPS = [
    "layers.use",
    "cgroups.create",
    "pool.create",
    "_map_ids",
    "overlay.build",
    "_configure",
    "await_hello",
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("a bug")], ids=["os", "bug"]
)
async def test_failed_launch_is_undone(
    container: Rig, step: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails at each step; afterwards nothing of it is there, and the next launch works."""
    _, sock = await container.launch()
    sock.close()
    before = container.files()
    target: Any = backend if step == "await_hello" else container.backend
    *way, name = step.split(".")
    for part in way:
        target = getattr(target, part)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(target, name, fail)
        with pytest.raises((DSecError, ValueError)):
            await container.backend.launch(container.spec())
    assert container.files() == before
    assert await container.backend.reclaim(frozenset(h.sandbox_id for h in container.handles)) == []
    _, inside = await container.inside()
    assert (await inside.sh("echo works")).stdout == b"works\n"
    inside.close()


async def test_failed_step_inside_is_told(container: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsec.backends.container import policy
    from dsec.wire.aether import Step

    with monkeypatch.context() as patch:
        patch.setattr(policy, "steps", lambda *_: [Step("mount", "/nowhere", "tmpfs", 0, "")])
        with pytest.raises(LaunchFailed, match="mount /nowhere"):
            await container.launch()


async def test_image_that_leads_mounts_astray(container: Rig, tmp_path: Path) -> None:
    """/proc, /dev and /etc of an image may be links out of it; every step resolves below the root."""
    (tree := tmp_path / "tree").mkdir()
    for name in ("bin", "lib", "lib64", "usr", "tmp"):
        (tree / name).mkdir()
    (tree / "proc").symlink_to("/../../../../tmp")
    (tree / "dev").symlink_to("../../../../../tmp")
    (tree / "etc").symlink_to("/../../../../../../etc")
    host = set(os.listdir("/etc"))
    try:
        _, sock = await container.launch(layers=[image_of(tree, tmp_path / "astray.erofs")])
        sock.close()
    except LaunchFailed:
        pass
    assert set(os.listdir("/etc")) == host
    assert not os.path.exists("/tmp/self")


async def test_ended_from_outside_is_told(container: Rig) -> None:
    handle, sock = await container.launch()
    os.kill(handle.pid, 9)
    exit_ = await container.backend.wait_exit(handle)
    assert exit_.signal == 9 and not exit_.host_oom
    sock.close()


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_data_directory_with_a_long_path(tmp_path: Path, base_layer: LayerRef, kind: str) -> None:
    """A socket's path holds 107 bytes; the data directory's may be longer."""
    data = tmp_path / ("x" * 150)
    data.mkdir(mode=0o700)
    rig = Rig(kind, data, base_layer)
    await rig.backend.open()
    handle, sock = await rig.launch()
    sock.close()
    async with Inside(await rig.backend.connect(handle)) as inside:
        assert (await inside.sh("echo far")).stdout == b"far\n"
    await rig.finish()


async def test_two_edges_beside_each_other(container: Rig, tmp_path: Path, base_layer: LayerRef) -> None:
    (data := tmp_path / "other").mkdir(mode=0o700)
    other = Rig(container.kind, data, base_layer)
    await other.backend.open()
    handle, inside = await container.inside()
    theirs, sock = await other.launch()
    assert await other.backend.reclaim(frozenset({theirs.sandbox_id})) == []
    sock.close()
    await other.finish()
    assert (await inside.sh("echo here")).stdout == b"here\n"
    assert isinstance(inside._sock, socket.socket) and handle.pid
    inside.close()


async def test_a_launcher_that_ends_is_replaced(container: Rig) -> None:
    handle, inside = await container.inside()
    for launcher in list(container.backend._launchers):
        os.kill(launcher.pid, 9)
    outcomes = await asyncio.gather(*(container.launch() for _ in range(4)), return_exceptions=True)
    assert all(isinstance(o, tuple | DSecError) for o in outcomes)
    while True:
        with contextlib.suppress(Unavailable):
            _, other = await container.inside()
            break
    assert (await other.sh("echo new")).stdout == b"new\n"
    assert (await inside.sh("echo old")).stdout == b"old\n"
    await container.backend.destroy(handle)


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_plain_directories_where_there_is_no_btrfs(
    tmp_path: Path, base_layer: LayerRef, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (data := tmp_path / "data").mkdir(mode=0o700)
    rig = Rig(kind, data, base_layer)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda _: None)
        await rig.backend.open()
    fingerprint = await rig.backend.fingerprint()
    assert fingerprint.attributes["disk_limit"].startswith("none: there is no mkfs.btrfs")
    _, inside = await rig.inside()
    assert await inside.text("echo x > /root/x; mkdir -p /a/b/c; chmod 0 /a/b; cat /root/x") == "x"
    await rig.restart()
    assert (await rig.backend.fingerprint()).attributes["disk_limit"].startswith("none")
    await rig.finish()
