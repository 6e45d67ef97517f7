"""Freezing processes, by either kind of control groups that this host offers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.leaks import descendants

from dsec.core.errors import Unavailable, Unsupported
from dsec.core.ids import new_edge_id
from dsec.linux import freezer as module
from dsec.linux.cgroup import V1, V2, Limits, detect
from dsec.linux.freezer import Freezer, V1Freezer, V2Freezer, find

COUNT = (
    "import sys\nn = 0\nwhile True:\n    n += 1\n    sys.stdout.write('%d\\n' % n)\n    sys.stdout.flush()\n"
)
FORK = """
import os, sys
sys.stdout.write("up")
sys.stdout.flush()
while True:
    try:
        if os.fork() == 0:
            os._exit(0)
        os.waitpid(-1, 0)
    except OSError:
        pass
"""
V1_MOUNTS = "cgroup /f cgroup rw,freezer 0 0\n"


class Box:
    """A group of one edge, and programs in it."""

    def __init__(self, groups: V1 | V2, freezer: Freezer, join: Callable[[int], None]) -> None:
        self.groups, self.freezer, self.join = groups, freezer, join
        self.programs: list[subprocess.Popen[bytes]] = []

    def run(self, program: str, out: Path) -> subprocess.Popen[bytes]:
        with out.open("wb") as f:
            started = subprocess.Popen([sys.executable, "-c", program], stdout=f)
        self.join(started.pid)
        self.programs.append(started)
        _until(lambda: out.stat().st_size > 0)
        return started


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _stands_still(out: Path) -> bool:
    size = out.stat().st_size
    time.sleep(0.05)
    return out.stat().st_size == size


def _unified() -> str:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return where
    return pytest.skip("no unified hierarchy here")


@contextlib.contextmanager
def _v1() -> Iterator[Box]:
    groups = detect(new_edge_id())
    if not isinstance(groups, V1):
        pytest.skip("v2 alone here")
    groups.open()
    group = groups.create("box", Limits(256 << 20, 64, 4.0))

    def join(pid: int) -> None:
        for fd in group.join:
            os.write(fd, b"%d" % pid)

    with contextlib.closing(group):
        yield Box(groups, find(groups), join)
    groups.remove("box")
    groups.close()


@contextlib.contextmanager
def _v2() -> Iterator[Box]:
    """On a hybrid host too: a group can be frozen without any controller."""
    groups = V2(_unified(), new_edge_id())
    where = Path(groups.base, "box", "box")
    where.mkdir(parents=True)

    def join(pid: int) -> None:
        (where / "cgroup.procs").write_text(str(pid))

    yield Box(groups, find(groups), join)
    for path in (where, where.parent, where.parent.parent):
        path.rmdir()
    with contextlib.suppress(OSError):
        Path(groups.top).rmdir()


@pytest.fixture(params=["v1", "v2"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    before = set(descendants())
    with _v1() if request.param == "v1" else _v2() as made:
        yield made
        made.freezer.thaw("box")
        for program in made.programs:
            program.send_signal(signal.SIGKILL)
            program.wait()
        # Those that they had forked are ours by now, and end by themselves.
        while set(descendants()) - before:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.005)
        made.freezer.remove("box")
        made.freezer.close()


@pytest.mark.kernel
def test_freeze_and_thaw(box: Box, tmp_path: Path) -> None:
    outs = [tmp_path / str(n) for n in range(3)]
    for out in outs:
        box.run(COUNT, out)
    for _ in range(3):
        box.freezer.freeze("box")
        box.freezer.freeze("box")
        assert all(_stands_still(out) for out in outs)
        box.freezer.thaw("box")
        box.freezer.thaw("box")
        sizes = [out.stat().st_size for out in outs]
        _until(lambda sizes=sizes: all(o.stat().st_size > s for o, s in zip(outs, sizes, strict=True)))  # type: ignore[misc]


@pytest.mark.kernel
def test_what_forks_without_end(box: Box, tmp_path: Path) -> None:
    for n in range(4):
        box.run(FORK, tmp_path / str(n))
    for _ in range(5):
        began = time.monotonic()
        box.freezer.freeze("box")
        assert time.monotonic() - began < 2
        box.freezer.thaw("box")


@pytest.mark.kernel
def test_programs_started_later_are_frozen_the_next_time(box: Box, tmp_path: Path) -> None:
    box.run(COUNT, tmp_path / "first")
    box.freezer.freeze("box")
    box.freezer.thaw("box")
    box.run(COUNT, tmp_path / "second")
    box.freezer.freeze("box")
    assert _stands_still(tmp_path / "first") and _stands_still(tmp_path / "second")


@pytest.mark.kernel
def test_another_life_thaws(box: Box, tmp_path: Path) -> None:
    box.run(COUNT, out := tmp_path / "out")
    box.freezer.freeze("box")
    later = find(box.groups)
    assert later.thaw_all() == ["box"]
    size = out.stat().st_size
    _until(lambda: out.stat().st_size > size)
    assert later.thaw_all() == []


@pytest.mark.kernel
def test_an_empty_group(box: Box) -> None:
    box.freezer.freeze("box")
    box.freezer.thaw("box")


@pytest.mark.kernel
def test_what_does_not_stand_still_is_let_go(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time at all for it, nothing is left frozen."""
    for n in range(4):
        box.run(FORK, tmp_path / str(n))
    box.run(COUNT, out := tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(module, "LIMIT_S", -1.0)
        with contextlib.suppress(Unavailable):
            box.freezer.freeze("box")
            box.freezer.thaw("box")
    size = out.stat().st_size
    _until(lambda: out.stat().st_size > size)


@pytest.mark.kernel
def test_of_what_is_not_there(box: Box) -> None:
    box.freezer.thaw("nothing")
    box.freezer.remove("nothing")
    if isinstance(box.freezer, V2Freezer):
        with pytest.raises(FileNotFoundError):
            box.freezer.freeze("nothing")


def test_find() -> None:
    v1 = V1(dict.fromkeys(("memory", "pids", "cpu"), "/x"), "e")
    assert isinstance(find(v1, V1_MOUNTS), V1Freezer)
    assert isinstance(find(V2("/x", "e")), V2Freezer)
    with pytest.raises(Unsupported, match="freezer"):
        find(v1, "cgroup /m cgroup rw,memory 0 0\n")
