"""Which hierarchy is used, from mount tables; and the groups themselves, on this host's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.core.errors import Unsupported
from dsec.core.ids import new_edge_id
from dsec.linux.cgroup import V1, V2, Limits, detect

HYBRID = """cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
"""


def test_detect_hybrid() -> None:
    found = detect("e", HYBRID)
    assert isinstance(found, V1)
    assert found.base["cpu"] == "/sys/fs/cgroup/cpu,cpuacct/dsec/e"


def test_detect_v2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    found = detect("e", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert isinstance(found, V2)


def test_detect_says_what_is_missing() -> None:
    with pytest.raises(Unsupported, match="pids"):
        detect("e", "cgroup /sys/fs/cgroup/memory cgroup rw,memory,cpu 0 0\n")


@pytest.mark.kernel
def test_groups() -> None:
    groups = detect(new_edge_id())
    groups.open()
    groups.open()
    limits = Limits(64 << 20, 32, 0.5)
    group = groups.create("box-1", limits)
    groups.create("box-1", limits).close()
    assert groups.names() == {"box-1"}
    pid = os.fork()
    if pid == 0:
        _join_and_exit(group.join)
    assert os.waitpid(pid, 0)[1] == 0
    usage = groups.usage("box-1")
    assert usage.oom_kills == 0 and usage.pids == 0
    assert b"oom_kill 0" in os.read(group.oom_counter, 4096)
    group.close()
    home = groups.home()
    assert groups.home_pids() == set()
    home.close()
    groups.remove("box-1")
    groups.remove("box-1")
    assert groups.names() == set()
    groups.close()


@pytest.mark.kernel
@pytest.mark.skipif("DSEC_KERNEL_VM" not in os.environ, reason="changes the root group")
def test_controllers_that_are_off_at_the_root_are_turned_on() -> None:
    groups = detect(new_edge_id())
    assert isinstance(groups, V2)
    Path(groups.root, "cgroup.subtree_control").write_text("-cpu -pids")
    groups.open()
    groups.create("box-1", Limits(64 << 20, 32, 0.5)).close()
    assert Path(groups.base, "box/box-1/cpu.max").read_text() == "50000 100000\n"
    assert Path(groups.base, "box/box-1/pids.max").read_text() == "32\n"
    groups.remove("box-1")
    groups.close()


def test_what_cannot_be_turned_on_is_named(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "dsec").mkdir()
    (tmp_path / "dsec/cgroup.controllers").write_text("memory\n")
    with pytest.raises(Unsupported, match="turning on cpu, pids below"):
        V2(str(tmp_path), "e").open()


def _join_and_exit(fds: list[int]) -> None:
    try:
        for fd in fds:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                fd = os.open("cgroup.procs", os.O_WRONLY, dir_fd=fd)
            os.write(fd, b"0")
        os._exit(0)
    finally:
        os._exit(1)
