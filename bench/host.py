"""Reads this host: what it is, its memory, the time its processors spent, and what a server holds of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


def describe() -> dict[str, str | int | float]:
    """The machine that figures were measured on."""
    return {
        "kernel": platform.release(),
        "cores": os.cpu_count() or 1,
        "cpu": _cpu_model(),
        "memory_gib": round(meminfo()["MemTotal"] / 2**20, 1),
        "system": _system(),
        "python": platform.python_version(),
        "cgroup": "v1" if (CGROUP_ROOT / "memory").is_dir() else "v2",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _system() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return platform.system()


# --- memory ---


def meminfo() -> dict[str, int]:
    """KiB by name."""
    pairs = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(rest.split()[0]) for name, rest in pairs}


@dataclass(frozen=True)
class Memory:
    """MiB of the whole host. `used` counts everything but the page cache of files, slab included."""

    used: float
    available: float
    slab: float
    page_cache: float

    @staticmethod
    def now() -> Memory:
        m = meminfo()
        cache = m["Buffers"] + m["Cached"] - m["Shmem"]
        return Memory(
            used=(m["MemTotal"] - m["MemFree"] - cache) / 1024,
            available=m["MemAvailable"] / 1024,
            slab=m["Slab"] / 1024,
            page_cache=cache / 1024,
        )


def rss_mb(pids: Iterable[int]) -> float:
    """Resident memory of these processes together, in MiB; shared pages count in each."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KB
    return total / 1024


def written_mb(pids: Iterable[int]) -> float:
    """What these processes, and those that they have waited for, gave to disks, in MB (10^6 bytes)."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            total += int(fields["write_bytes"])
    return total / 1e6


def peak_mb(pid: int) -> float:
    """The highest resident memory since `reset_peak`, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


# --- processes ---


def parents() -> dict[int, int]:
    """Each process's parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def descendants(root: int) -> set[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += children.get(pid, [])
    return found


def kernel_threads() -> set[int]:
    """Children of kthreadd, and itself."""
    return {pid for pid, parent in parents().items() if parent == 2 or pid == 2}


def cpu_seconds(pids: Iterable[int]) -> float:
    """Time that these processes have run, to the nanosecond; of those that are still there."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def host_busy_seconds() -> float:
    """Time that all processors were not idle."""
    fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


# --- what a server holds ---


def groups_of(edge: str) -> list[Path]:
    """All control groups below a parent that is named after the edge."""
    found = []
    for pattern in (f"*/dsec*/{edge}*", f"dsec*/{edge}*"):
        for top in CGROUP_ROOT.glob(pattern):
            found += [Path(path) for path, _, _ in os.walk(top)]
    return found


def members(groups: Iterable[Path]) -> set[int]:
    """Processes in these groups."""
    pids: set[int] = set()
    for group in groups:
        with suppress(OSError):
            pids.update(int(p) for p in (group / "cgroup.procs").read_text().split())
    return pids


def _links(pids: Iterable[int], name: str) -> set[str]:
    found = set()
    for pid in pids:
        with suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/{name}"))
    return found


def _backing_files() -> Iterator[str]:
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            yield path.read_text().strip()


def holdings(server: int, edge: str, data: Path) -> dict[str, int]:
    """How many things of the host a server holds; what a cycle adds to it has leaked."""
    groups = groups_of(edge)
    pids = descendants(server) | members(groups)
    return {
        "mounts": len(Path(f"/proc/{server}/mountinfo").read_text().splitlines()),
        "cgroups": len(groups),
        "processes": len(pids),
        "net_namespaces": len(_links(pids, "net")),
        "mount_namespaces": len(_links(pids, "mnt")),
        "loop_devices": sum(f.startswith(str(data)) for f in _backing_files()),
        "server_fds": len(list(Path(f"/proc/{server}/fd").iterdir())),
    }
