"""The writable layer of a sandbox that goes on: what all backends must do, and what containers alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.backends.conftest import CONTAINERS, Rig
from tests.backends.inside import Inside
from tests.backends.root import _libraries, build_root, image_of

from dsec.backends.base import Handle, LayerRef, WritableSnapshot
from dsec.core.errors import SandboxFailed, Unavailable
from dsec.layers.scrub import Rules, Scrub

kernel = pytest.mark.kernel


def is_whiteout(path: Path) -> bool:
    st = path.lstat()
    return stat.S_ISCHR(st.st_mode) and st.st_rdev == 0


def is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, "trusted.overlay.opaque") == b"y"
    except OSError:
        return False


async def _write(rig: Rig, handle: Handle, inside: Inside, text: str) -> None:
    """The fake's shell has no redirections."""
    if rig.kind == "fake":
        rig.host.sandboxes[handle.sandbox_id].aether.files["/tmp/file"] = text.encode() + b"\n"
    else:
        await inside.sh(f"echo {text} > /tmp/file")


async def test_what_was_written_before_is_in_it(rig: Rig) -> None:
    handle, inside = await rig.inside()
    await _write(rig, handle, inside, "first")
    snapshot = await rig.backend.snapshot_writable(handle)
    await _write(rig, handle, inside, "second")
    assert (snapshot.upper / "tmp/file").read_text() == "first\n"
    assert snapshot.frozen_s >= 0
    assert (await inside.sh("cat /tmp/file")).stdout == b"second\n"
    snapshot.close()
    snapshot.close()
    assert not snapshot.upper.exists()
    inside.close()


async def test_of_what_is_gone(rig: Rig) -> None:
    handle, sock = await rig.launch()
    sock.close()
    await rig.backend.destroy(handle)
    with pytest.raises(SandboxFailed):
        await rig.backend.snapshot_writable(handle)


async def test_what_was_never_closed_is_reclaimed(rig: Rig) -> None:
    handle, sock = await rig.launch()
    sock.close()
    kept = await rig.backend.snapshot_writable(handle)
    claimed = frozenset({handle.sandbox_id})
    assert await rig.backend.reclaim(claimed) == []
    assert kept.upper.exists()
    await rig.restart()
    assert len(await rig.backend.reclaim(claimed)) == 1
    assert not kept.upper.exists()


async def test_two_at_once(rig: Rig) -> None:
    handle, inside = await rig.inside()
    await _write(rig, handle, inside, "both")
    two: list[WritableSnapshot] = await asyncio.gather(
        rig.backend.snapshot_writable(handle), rig.backend.snapshot_writable(handle)
    )
    assert two[0].upper != two[1].upper
    for snapshot in two:
        assert (snapshot.upper / "tmp/file").read_text() == "both\n"
        snapshot.close()
    inside.close()


@kernel
async def test_a_writer_goes_on(container: Rig) -> None:
    """It was stopped between two writes: the two files differ by one round at most, as at one instant."""
    handle, inside = await container.inside()
    loop = "i=0; while :; do i=$((i+1)); echo $i > /tmp/a; echo $i > /tmp/b; done"
    await inside.begin("/bin/sh", "-c", loop)
    upper = container.data / "pool" / handle.sandbox_id / "upper"
    await _until(lambda: (upper / "tmp/b").exists())
    for _ in range(5):
        with await container.backend.snapshot_writable(handle) as snapshot:
            a, b = ((snapshot.upper / f"tmp/{name}").read_text() for name in "ab")
            assert not a or not b or int(a) - int(b) in (0, 1)
            last = int(a or b)
        await _until(lambda last=last: int((upper / "tmp/b").read_text() or 0) > last)
    inside.close()


async def _until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@kernel
async def test_nothing_inside_runs_while_it_is_frozen(container: Rig) -> None:
    handle, inside = await container.inside()
    await inside.begin("/bin/sh", "-c", "(while :; do echo x >> /tmp/grows; done) & wait")
    grows = container.data / "pool" / handle.sandbox_id / "upper/tmp/grows"
    await _until(grows.exists)
    freezer = container.backend.packer._freezer
    await asyncio.to_thread(freezer.freeze, handle.sandbox_id)
    size = grows.stat().st_size
    await asyncio.sleep(0.1)
    assert grows.stat().st_size == size
    freezer.thaw(handle.sandbox_id)
    await _until(lambda: grows.stat().st_size > size)
    inside.close()


@kernel
async def test_a_new_edge_thaws_what_the_last_one_left_frozen(container: Rig) -> None:
    handle, inside = await container.inside()
    await inside.begin("/bin/sh", "-c", "while :; do echo x >> /tmp/grows; done")
    grows = container.data / "pool" / handle.sandbox_id / "upper/tmp/grows"
    await _until(grows.exists)
    await asyncio.to_thread(container.backend.packer._freezer.freeze, handle.sandbox_id)
    inside.close()
    size = grows.stat().st_size
    await container.restart()
    async with Inside(await container.backend.recover(handle)):
        await _until(lambda: grows.stat().st_size > size)


@kernel
async def test_destroyed_while_frozen(container: Rig) -> None:
    handle, inside = await container.inside()
    await inside.begin("/bin/sh", "-c", "sleep 1000 & sleep 1000")
    await asyncio.to_thread(container.backend.packer._freezer.freeze, handle.sandbox_id)
    async with asyncio.timeout(15):
        await container.backend.destroy(handle)
    inside.close()


@kernel
async def test_destroyed_meanwhile(container: Rig) -> None:
    """Whichever comes first: a snapshot that can be closed, or word that the sandbox is gone."""
    for _ in range(8):
        handle, inside = await container.inside()
        await inside.begin("/bin/sh", "-c", "sleep 1000 & while :; do echo x > /tmp/x; done")
        taking = asyncio.create_task(_take_and_close(container, handle))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await container.backend.destroy(handle)
            await taking
        inside.close()


async def _take_and_close(rig: Rig, handle: Handle) -> None:
    try:
        (await rig.backend.snapshot_writable(handle)).close()
    except (SandboxFailed, Unavailable):
        pass


@kernel
async def test_cancelled(container: Rig) -> None:
    handle, inside = await container.inside()
    for turns in range(6):
        task = asyncio.create_task(container.backend.snapshot_writable(handle))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert container.backend.pool.snapshots() == set()
    assert await inside.text("echo on > /tmp/x; cat /tmp/x") == "on"
    inside.close()


CHANGES = """
rm /etc/group
rm -r /home/user; mkdir /home/user; echo new > /home/user/new
mv /usr/share/old /usr/share/moved || { mkdir /usr/share/moved; }
mkdir -p /var/tmp/d; echo d > /var/tmp/d/f; ln /var/tmp/d/f /var/tmp/d/g; ln -s nowhere /var/tmp/link
chmod 4755 /var/tmp/d/f
"""


def _check_changes(upper: Path) -> None:
    assert is_whiteout(upper / "etc/group")
    assert is_opaque(upper / "home/user") and (upper / "home/user/new").read_text() == "new\n"
    assert not is_opaque(upper / "etc")
    assert (upper / "var/tmp/d/f").stat().st_ino == (upper / "var/tmp/d/g").stat().st_ino
    assert stat.S_IMODE((upper / "var/tmp/d/f").stat().st_mode) == 0o4755
    assert os.readlink(upper / "var/tmp/link") == "nowhere"


@kernel
async def test_whiteouts_opaque_directories_and_links(container: Rig) -> None:
    handle, inside = await container.inside()
    await inside.sh(CHANGES)
    with await container.backend.snapshot_writable(handle) as snapshot:
        assert snapshot.how == "snapshot"
        _check_changes(snapshot.upper)
    inside.close()


def _layer_with_mv(tmp_path: Path) -> LayerRef:
    """With what mv is linked with here, whatever the base has."""
    mv = Path(shutil.which("mv") or "")
    (tmp_path / "tree/opt").mkdir(parents=True)
    build_root(tmp_path / "tree", {"/opt/mv": mv})
    for library in _libraries(str(mv)):
        shutil.copy2(library, tmp_path / "tree" / library.lstrip("/"))
    return image_of(tmp_path / "tree", tmp_path / "mv.erofs")


@kernel
async def test_renamed_directory_of_a_lower_layer(container: Rig, tmp_path: Path) -> None:
    """Overlay has no redirects: rename says EXDEV, so mv copies and leaves a whiteout."""
    layers = [container.base, _layer_with_mv(tmp_path)]
    handle, inside = await container.inside(layers=layers)
    await inside.text("echo f > /home/user/f")
    await inside.text("/opt/mv /etc /elsewhere && /opt/mv /home/user /home/moved")
    with await container.backend.snapshot_writable(handle) as snapshot:
        assert is_whiteout(snapshot.upper / "home/user")
        assert (snapshot.upper / "home/moved/f").read_text() == "f\n"
        assert is_whiteout(snapshot.upper / "etc") and (snapshot.upper / "elsewhere/passwd").is_file()
        for path in snapshot.upper.rglob("*"):
            names = os.listxattr(path, follow_symlinks=False)
            assert "trusted.overlay.redirect" not in names and "trusted.overlay.metacopy" not in names
    inside.close()


@kernel
async def test_at_its_limit_of_disk(container: Rig) -> None:
    handle, inside = await container.inside(disk_limit_mb=16)
    full = await inside.sh("dd if=/dev/urandom of=/tmp/big bs=65536 count=1024")
    assert full.ended.exit_code != 0
    with await container.backend.snapshot_writable(handle) as snapshot:
        assert (snapshot.upper / "tmp/big").stat().st_size > 8 << 20
    await inside.text("rm /tmp/big")
    await _until(lambda: _fits(container, handle))
    await inside.text("echo small > /tmp/small")
    inside.close()


def _fits(rig: Rig, handle: Handle) -> bool:
    os.sync()
    used = rig.backend.pool.usage(handle.sandbox_id)
    return used is None or used < 4 << 20


@kernel
async def test_many_files_just_written(container: Rig) -> None:
    """The issue's own: 100 MB in 1,000 files, just written."""
    handle, inside = await container.inside(disk_limit_mb=1024, memory_limit_mb=1024)
    for turn in range(3):
        await inside.text(
            f"mkdir /tmp/{turn}; head -c 100000 /dev/urandom > /tmp/one; "
            f"for i in $(seq 1000); do cat /tmp/one > /tmp/{turn}/$i; done"
        )
        with await container.backend.snapshot_writable(handle) as snapshot:
            one = (snapshot.upper / "tmp/one").read_bytes()
            files = list((snapshot.upper / f"tmp/{turn}").iterdir())
            assert len(files) == 1000 and all(f.read_bytes() == one for f in files)
            assert (
                snapshot.how == "snapshot"
            )  # no byte is copied while it is frozen; bench pack-diff has the time
    inside.close()


@kernel
async def test_many_sandboxes_at_once(container: Rig) -> None:
    sandboxes = [await container.inside() for _ in range(12)]
    for number, (_, inside) in enumerate(sandboxes):
        await inside.text(f"echo {number} > /tmp/number")
        await inside.begin("/bin/sh", "-c", "while :; do echo x > /tmp/x; done")
    snapshots = await asyncio.gather(*(container.backend.snapshot_writable(h) for h, _ in sandboxes))
    for number, (snapshot, (_, inside)) in enumerate(zip(snapshots, sandboxes, strict=True)):
        assert (snapshot.upper / "tmp/number").read_text() == f"{number}\n"
        assert (await inside.sh("echo on")).stdout == b"on\n"
        snapshot.close()
        inside.close()


@kernel
async def test_it_outlives_its_sandbox(container: Rig) -> None:
    handle, inside = await container.inside()
    await inside.text("echo kept > /tmp/file")
    with await container.backend.snapshot_writable(handle) as snapshot:
        await container.backend.destroy(handle)
        assert (snapshot.upper / "tmp/file").read_text() == "kept\n"
        assert snapshot.upper.exists()
    inside.close()


@kernel
async def test_of_a_stopped_sandbox(container: Rig) -> None:
    handle, inside = await container.inside()
    await inside.text("echo kept > /tmp/file")
    await container.backend.stop(handle)
    with await container.backend.snapshot_writable(handle) as snapshot:
        assert (snapshot.upper / "tmp/file").read_text() == "kept\n"
    inside.close()


@kernel
async def test_nothing_can_write_to_it(container: Rig) -> None:
    handle, inside = await container.inside()
    snapshot = await container.backend.snapshot_writable(handle)
    with snapshot, pytest.raises(OSError, match="Read-only"):
        (snapshot.upper / "x").touch()
    inside.close()


USE = """
mkdir -p /var/cache/apt /var/log/app /root/.cache/pip /opt /root/keep
for f in /var/cache/apt/x /var/log/app/log /root/.cache/pip/x /root/.bash_history /tmp/x /opt/kept; do
  echo $f > $f
done
rm -r /var/tmp /home/user; rm /etc/group
"""


@kernel
async def test_scrubbed(container: Rig) -> None:
    """What the platform put there goes, what the sandbox used goes, what it made and removed stays."""
    handle, inside = await container.inside()
    await inside.text(USE)
    with await container.backend.snapshot_writable(handle) as snapshot:
        scrub = Scrub(snapshot.upper, Rules(), snapshot.platform)
        assert _left(snapshot.upper, scrub) == {
            *("etc", "etc/group", "home", "home/user", "opt", "opt/kept", "root", "root/keep", "root/.cache"),
            *("tmp", "var", "var/cache", "var/cache/apt", "var/tmp", "var/log", "var/log/app"),
        }
        assert is_whiteout(snapshot.upper / "var/tmp")
    inside.close()


def _left(upper: Path, scrub: Scrub) -> set[str]:
    found = set()
    for top, directories, files in os.walk(os.fsencode(upper)):
        here = os.path.relpath(top, os.fsencode(upper))
        paths = {name: os.path.normpath(os.path.join(here, name)) for name in (*directories, *files)}
        out = {name for name, path in paths.items() if scrub(path)}
        directories[:] = [d for d in directories if d not in out]
        found |= {os.fsdecode(path) for name, path in paths.items() if name not in out}
    return found


@contextmanager
def no_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda _: None)
        yield


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_of_plain_directories(
    tmp_path: Path, base_layer: LayerRef, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (data := tmp_path / "data").mkdir(mode=0o700)
    rig = Rig(kind, data, base_layer)
    with no_programs(monkeypatch):
        await rig.backend.open()
    handle, inside = await rig.inside()
    await inside.sh(CHANGES)
    await inside.text(
        "head -c 300000 /dev/urandom > /tmp/r; dd if=/tmp/r of=/tmp/holes seek=5000 bs=4096 2>/dev/null"
    )
    snapshot = await rig.backend.snapshot_writable(handle)
    assert snapshot.how in ("reflink", "copy")
    _check_changes(snapshot.upper)
    original = data / "pool" / handle.sandbox_id / "upper"
    for name in ("tmp/r", "tmp/holes"):
        assert (snapshot.upper / name).read_bytes() == (original / name).read_bytes()
    assert (snapshot.upper / "tmp/holes").stat().st_blocks < 4096
    await rig.restart()
    assert await rig.backend.reclaim(frozenset({handle.sandbox_id}))
    inside.close()
    await rig.finish()


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_plain_directories_destroyed_meanwhile(
    tmp_path: Path, base_layer: LayerRef, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The copy ends early: the sandbox need not stay frozen until it is whole."""
    (data := tmp_path / "data").mkdir(mode=0o700)
    rig = Rig(kind, data, base_layer)
    with no_programs(monkeypatch):
        await rig.backend.open()
    handle, inside = await rig.inside()
    await inside.text("for i in $(seq 3000); do echo $i > /tmp/$i; done")
    await inside.begin("/bin/sh", "-c", "sleep 1000 & sleep 1000")
    taking = asyncio.create_task(_take_and_close(rig, handle))
    await _until(lambda: rig.backend.pool.snapshots() or taking.done())
    async with asyncio.timeout(15):
        await rig.backend.destroy(handle)
        await taking
    assert rig.backend.pool.snapshots() == set()
    inside.close()
    await rig.finish()
