"""What this test run has on the host: taken before and after a kernel test, the two must be the same.

Other programs may run beside the tests, so each thing is told apart by its owner: processes are those that
descend from this one (it is their subreaper, so that no orphan escapes), mounts and loop devices those below
its directories.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SETTLE_S = 10.0
"""The kernel takes down namespaces, groups and loop devices moments after their last user has gone."""


def become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _stat(pid: int) -> tuple[str, str, int] | None:
    """Name, state, parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1])


def descendants() -> dict[int, tuple[str, str]]:
    """Name and state of each process below this one."""
    found = {int(p): s for p in os.listdir("/proc") if p.isdigit() and (s := _stat(int(p)))}
    mine = {os.getpid()}
    while more := {pid for pid, (_, _, parent) in found.items() if parent in mine} - mine:
        mine |= more
    return {pid: found[pid][:2] for pid in mine - {os.getpid()}}


def _reap_orphans() -> None:
    """Aethers whose launcher has gone are ours to wait for, and a gateway whose server was killed."""
    for pid, (name, state) in descendants().items():
        if state == "Z" and name.startswith(("ae", "dsec-gateway")):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _namespaces(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids | {os.getpid()}:
        for link in Path(f"/proc/{pid}/task").glob("*/ns/*"):
            with contextlib.suppress(OSError):
                found.add(f"namespace {os.readlink(link)}")
    return found


def _mounts(below: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in lines]
    return [f"mount {p}" for p in points if p.startswith(str(below)) or "/dsec-" in p]


def _loops(below: Path) -> set[str]:
    found = set()
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if (file := entry.read_text().strip()).startswith(str(below)) or "/dsec-" in file:
                found.add(f"loop device {entry.parts[3]} on {file}")
    return found


def _cgroups(pids: set[int]) -> set[str]:
    """Below `dsec`, but those of edges whose processes are not ours."""
    tops = [*Path("/sys/fs/cgroup").glob("dsec"), *Path("/sys/fs/cgroup").glob("*/dsec")]
    edges = [edge for top in tops for edge in top.iterdir() if edge.is_dir()]
    others = {edge.name for edge in edges if _members(edge / "aether") - pids}
    return {f"group {p}" for edge in edges if edge.name not in others for p, _, _ in os.walk(edge)}


def _members(group: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(p) for p in (group / "cgroup.procs").read_text().split()}
    return set()


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"descriptor {fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
    return {
        f for f in found if "/proc/" not in f and f.split()[1] not in "012"
    }  # pytest swaps the standard ones


def snapshot(below: Path) -> set[str]:
    _reap_orphans()
    processes = descendants()
    pids = set(processes)
    found = {
        f"process {pid} {name}{' (a zombie)' * (state == 'Z')}" for pid, (name, state) in processes.items()
    }
    found |= _namespaces(pids) | _loops(below) | _cgroups(pids) | _descriptors()
    mounts = _mounts(below)
    found |= {f"{m} (times {mounts.count(m)})" for m in mounts}
    return found | {f"interface {name}" for name in os.listdir("/sys/class/net")}


def left_behind(before: set[str], below: Path) -> list[str]:
    """What is there now and was not before; waits a moment for it to go."""
    deadline = time.monotonic() + SETTLE_S
    wait = 0.001
    while (left := snapshot(below) - before) and time.monotonic() < deadline:
        time.sleep(wait)  # the kernel gives no event for the end of all of these
        wait = min(wait * 2, 0.1)
    return sorted(left)
