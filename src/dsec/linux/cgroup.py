"""Control groups behind one interface: v2, and v1 as hybrid hosts have it.

    <hierarchy>/dsec/<edge>/aether         all aethers of a node: the sandboxes' limits do not reach them
    <hierarchy>/dsec/<edge>/box/<sandbox>  what runs inside

Our groups lie under a parent of our own; no other group is touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Final, Protocol

import msgspec

from dsec.core.errors import Unsupported

CONTROLLERS: Final = ("memory", "pids", "cpu")
PERIOD_US: Final = 100_000
REMOVE_LIMIT_S: Final = 5.0


class Limits(msgspec.Struct, frozen=True):
    memory_bytes: int
    pids: int
    cpu_cores: float


class Usage(msgspec.Struct, frozen=True):
    memory_bytes: int | None
    memory_peak_bytes: int | None
    cpu_us: int | None
    pids: int | None
    oom_kills: int | None


class Group(msgspec.Struct):
    """Descriptors of one group that aether takes with it. The caller closes them."""

    join: list[int]
    oom_counter: int

    def close(self) -> None:
        for fd in (*self.join, self.oom_counter):
            if fd >= 0:
                os.close(fd)
        self.join, self.oom_counter = [], -1


class Cgroups(Protocol):
    """The groups of one edge."""

    version: int

    def open(self) -> None:
        """Make the parents. Idempotent."""

    def close(self) -> None:
        """Remove the parents, as far as they are empty."""

    def home(self) -> Group: ...

    def create(self, name: str, limits: Limits) -> Group:
        """Make a group, or find it as it is, with these limits."""

    def remove(self, name: str) -> None:
        """Idempotent. Waits a moment for processes that are still being reaped; OSError EBUSY past it."""

    def usage(self, name: str) -> Usage: ...

    def names(self) -> set[str]: ...

    def home_pids(self) -> set[int]: ...

    def home_oom_kills(self) -> int: ...


def _write(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as f:
            return f.read()
    except OSError:
        return None


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text and text.strip().isdigit() else None


def _field(path: str, key: str) -> int | None:
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return None


def _mkdir(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def _rmdir(path: str) -> None:
    """A group is busy until the kernel has let go of its last task, moments after that was reaped."""
    deadline = time.monotonic() + REMOVE_LIMIT_S
    wait = 0.0005
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError as e:
            if e.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(wait)
            wait = min(wait * 2, 0.05)
        else:
            return


class V1:
    version = 1

    def __init__(self, hierarchies: dict[str, str], edge: str) -> None:
        self.roots = {c: f"{hierarchies[c]}/dsec" for c in CONTROLLERS}
        self.base = {c: f"{root}/{edge}" for c, root in self.roots.items()}

    def open(self) -> None:
        for controller in CONTROLLERS:
            for path in (self.roots[controller], self.base[controller]):
                _mkdir(path)
            for name in ("aether", "box"):
                _mkdir(f"{self.base[controller]}/{name}")

    def close(self) -> None:
        for controller in CONTROLLERS:
            base = self.base[controller]
            for path in (f"{base}/aether", f"{base}/box", base):
                _rmdir(path)
            with contextlib.suppress(OSError):  # other edges of this host
                os.rmdir(self.roots[controller])

    def _group(self, name: str) -> Group:
        flags = os.O_WRONLY | os.O_CLOEXEC
        join = [os.open(f"{self.base[c]}/{name}/tasks", flags) for c in CONTROLLERS]
        counter = os.open(f"{self.base['memory']}/{name}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        return Group(join, counter)

    def home(self) -> Group:
        return self._group("aether")

    def create(self, name: str, limits: Limits) -> Group:
        paths = {c: f"{self.base[c]}/box/{name}" for c in CONTROLLERS}
        for path in paths.values():
            _mkdir(path)
        _write(f"{paths['memory']}/memory.limit_in_bytes", str(limits.memory_bytes))
        _write(f"{paths['pids']}/pids.max", str(limits.pids))
        _write(f"{paths['cpu']}/cpu.cfs_quota_us", str(max(1000, int(limits.cpu_cores * PERIOD_US))))
        return self._group(f"box/{name}")

    def remove(self, name: str) -> None:
        for controller in CONTROLLERS:
            _rmdir(f"{self.base[controller]}/box/{name}")

    def usage(self, name: str) -> Usage:
        memory, pids, cpu = (f"{self.base[c]}/box/{name}" for c in CONTROLLERS)
        nanos = _number(f"{cpu}/cpuacct.usage")
        return Usage(
            _number(f"{memory}/memory.usage_in_bytes"),
            _number(f"{memory}/memory.max_usage_in_bytes"),
            nanos // 1000 if nanos is not None else None,
            _number(f"{pids}/pids.current"),
            _field(f"{memory}/memory.oom_control", "oom_kill"),
        )

    def names(self) -> set[str]:
        found: set[str] = set()
        for controller in CONTROLLERS:
            with (
                contextlib.suppress(FileNotFoundError),
                os.scandir(f"{self.base[controller]}/box") as entries,
            ):
                found |= {e.name for e in entries if e.is_dir()}
        return found

    def home_pids(self) -> set[int]:
        return {int(p) for p in (_read(f"{self.base['pids']}/aether/cgroup.procs") or "").split()}

    def home_oom_kills(self) -> int:
        return _field(f"{self.base['memory']}/aether/memory.oom_control", "oom_kill") or 0


class V2:
    version = 2

    def __init__(self, root: str, edge: str) -> None:
        self.root = root
        self.top = f"{root}/dsec"
        self.base = f"{self.top}/{edge}"

    def open(self) -> None:
        enable = " ".join(f"+{c}" for c in CONTROLLERS)
        _mkdir(self.top)
        self._enable_at_root()
        for path in (self.base, f"{self.base}/box", f"{self.base}/aether"):
            _mkdir(path)
        for path in (self.top, self.base, f"{self.base}/box"):
            _write(f"{path}/cgroup.subtree_control", enable)

    def _enable_at_root(self) -> None:
        """systemd turns on only what its units ask for, and often none asks for cpu. What is on stays on."""
        missing = set(CONTROLLERS) - set((_read(f"{self.top}/cgroup.controllers") or "").split())
        if not missing:
            return
        names = sorted(missing)
        try:
            _write(f"{self.root}/cgroup.subtree_control", " ".join(f"+{c}" for c in names))
        except OSError as e:
            raise Unsupported(
                f"control groups: turning on {', '.join(names)} below {self.root}: {e.strerror}"
            ) from e

    def close(self) -> None:
        for path in (f"{self.base}/aether", f"{self.base}/box", self.base):
            _rmdir(path)
        with contextlib.suppress(OSError):
            os.rmdir(self.top)

    def _group(self, path: str) -> Group:
        # A process without rights of its own joins by a file that we opened; clone3 into the group would ask
        # for its own rights.
        procs = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        return Group([procs], os.open(f"{path}/memory.events", os.O_RDONLY | os.O_CLOEXEC))

    def home(self) -> Group:
        return self._group(f"{self.base}/aether")

    def create(self, name: str, limits: Limits) -> Group:
        path = f"{self.base}/box/{name}"
        _mkdir(path)
        _write(f"{path}/memory.max", str(limits.memory_bytes))
        _write(f"{path}/pids.max", str(limits.pids))
        _write(f"{path}/cpu.max", f"{max(1000, int(limits.cpu_cores * PERIOD_US))} {PERIOD_US}")
        return self._group(path)

    def remove(self, name: str) -> None:
        _rmdir(f"{self.base}/box/{name}")

    def usage(self, name: str) -> Usage:
        path = f"{self.base}/box/{name}"
        return Usage(
            _number(f"{path}/memory.current"),
            _number(f"{path}/memory.peak"),
            _field(f"{path}/cpu.stat", "usage_usec"),
            _number(f"{path}/pids.current"),
            _field(f"{path}/memory.events", "oom_kill"),
        )

    def names(self) -> set[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{self.base}/box") as entries:
            return {e.name for e in entries if e.is_dir()}
        return set()

    def home_pids(self) -> set[int]:
        return {int(p) for p in (_read(f"{self.base}/aether/cgroup.procs") or "").split()}

    def home_oom_kills(self) -> int:
        return _field(f"{self.base}/aether/memory.events", "oom_kill") or 0


def detect(edge: str, mounts: str | None = None) -> V1 | V2:
    """The interface that this host offers. Raises Unsupported that names what is missing."""
    v1: dict[str, str] = {}
    v2 = ""
    for line in (mounts or Path("/proc/self/mounts").read_text()).splitlines():
        _, where, fstype, options, *_ = line.split()
        if fstype == "cgroup":
            for controller in options.split(","):
                v1.setdefault(controller, where)
        elif fstype == "cgroup2":
            v2 = v2 or where
    if v2 and set(CONTROLLERS) <= set((_read(f"{v2}/cgroup.controllers") or "").split()):
        return V2(v2, edge)
    if set(CONTROLLERS) <= set(v1):
        return V1(v1, edge)
    raise Unsupported(f"control groups: {', '.join(sorted(set(CONTROLLERS) - set(v1)))} are in no hierarchy")
