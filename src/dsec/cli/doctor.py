"""`dsec doctor`: what this host has, what it lacks, and what each lack costs.

Reads; changes nothing. `--fix` names each sysctl that it would raise, then raises it.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from dsec.cli.output import console, print_json, table
from dsec.linux.probe import erofs_file_mount, overlay_by_fd, userns_with_maps

Verdict = Literal["ok", "lacks", "broken"]
SANDBOXES: Final = 10_000
"""Limits of the host are judged for this many."""


class Check(msgspec.Struct, frozen=True):
    name: str
    verdict: Verdict
    found: str
    cost: str = ""
    """What the lack costs, and how to mend it."""


class Sysctl(msgspec.Struct, frozen=True):
    """A kernel limit that a few thousand sandboxes meet first."""

    key: str
    wanted: int
    why: str

    @property
    def path(self) -> Path:
        return Path("/proc/sys") / self.key.replace(".", "/")

    def current(self) -> int | None:
        try:
            return int(self.path.read_text().split()[0])
        except (OSError, ValueError):
            return None


SYSCTLS: Final = (
    Sysctl("kernel.pid_max", 4_194_304, "every process of every sandbox has a host pid"),
    Sysctl("kernel.threads-max", 16 * SANDBOXES, "threads of all sandboxes"),
    Sysctl("fs.mount-max", 100_000, "mounts in one namespace"),
    Sysctl("fs.file-max", 100 * SANDBOXES, "open files of the host"),
    Sysctl("fs.inotify.max_user_instances", 128, "each sandbox's uid has its own count: the default serves"),
    Sysctl("fs.aio-max-nr", 65_536 * 16, "databases inside sandboxes use aio"),
    Sysctl("kernel.keys.maxkeys", 200, "keyrings of a user"),
    Sysctl("user.max_user_namespaces", 2 * SANDBOXES, "one user namespace per sandbox"),
    Sysctl("user.max_net_namespaces", 2 * SANDBOXES, "one network namespace per sandbox"),
    Sysctl("user.max_mnt_namespaces", 2 * SANDBOXES, "one mount namespace per sandbox"),
    Sysctl("user.max_pid_namespaces", 2 * SANDBOXES, "one pid namespace per sandbox"),
)


def _version(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = (done.stdout + done.stderr).strip()
    return text.splitlines()[0] if text else ""


def _kernel() -> Check:
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version >= (6, 15):
        return Check("kernel", "ok", release)
    if version >= (6, 1):
        return Check(
            "kernel",
            "lacks",
            release,
            "older than 6.15: layers are attached in a private staging mount namespace (slower creation)",
        )
    return Check("kernel", "broken", release, "older than 6.1: idmapped overlay layers do not exist")


def _root() -> Check:
    if os.geteuid() == 0:
        return Check("root", "ok", "uid 0")
    return Check("root", "broken", f"uid {os.geteuid()}", "the server needs root for mounts and namespaces")


def _filesystems() -> Iterator[Check]:
    have = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    for name, cost in (
        ("erofs", "layers cannot be mounted: load the module (modprobe erofs)"),
        ("overlay", "no writable layer: load the module (modprobe overlay)"),
    ):
        ok = name in have or _module(name)
        yield Check(f"filesystem {name}", "ok" if ok else "broken", "yes" if ok else "no", "" if ok else cost)
    ok = "btrfs" in have or _module("btrfs")
    yield Check(
        "filesystem btrfs",
        "ok" if ok else "lacks",
        "yes" if ok else "no",
        "" if ok else "writable disk is limited only where the data directory has project quotas",
    )


def _module(name: str) -> bool:
    base = Path("/lib/modules") / platform.release()
    return base.is_dir() and any(base.rglob(f"{name}.ko*"))


def _mount_paths() -> Iterator[Check]:
    if os.geteuid() != 0:
        return
    for name, probe, cost in (
        ("file-backed EROFS", erofs_file_mount, "one loop device per layer is used instead"),
        ("overlay lowers by descriptor", overlay_by_fd, "the older mount path is used (slower creation)"),
        ("user namespaces", userns_with_maps, "no sandbox can start: see user.max_user_namespaces, AppArmor"),
    ):
        why = probe()
        verdict: Verdict = "ok" if not why else ("broken" if name == "user namespaces" else "lacks")
        yield Check(name, verdict, why or "works", "" if not why else cost)


def _cgroups() -> Check:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    v1 = {c for m in mounts if m[2] == "cgroup" for c in m[3].split(",")}
    v2 = [m[1] for m in mounts if m[2] == "cgroup2"]
    controllers = set(Path(v2[0], "cgroup.controllers").read_text().split()) if v2 else set()
    need = {"memory", "pids", "cpu"}
    if need <= controllers:
        return Check("cgroups", "ok", f"v2 with {', '.join(sorted(need))}")
    if need <= v1:
        return Check("cgroups", "ok", "v1 or hybrid: memory, pids, cpu")
    lack = ", ".join(sorted(need - controllers - v1))
    return Check("cgroups", "broken", f"no controller {lack}", "limits cannot be enforced")


def _files() -> Check:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= 4 * SANDBOXES:
        return Check("open files", "ok", str(hard))
    return Check("open files", "lacks", str(hard), f"room for about {hard // 4} sandboxes: raise nofile")


def _tool(name: str, *argv: str, cost: str) -> Check:
    if not shutil.which(name):
        return Check(name, "lacks", "absent", cost)
    return Check(name, "ok", _version(name, *argv) or "yes")


def _tools() -> Iterator[Check]:
    yield _tool("mkfs.erofs", "--version", cost="no layer can be built: install erofs-utils")
    yield _tool("mkfs.btrfs", "--version", cost="no pool for writable layers: install btrfs-progs")
    yield _tool("mmdebstrap", "--version", cost="no base layer from a suite: install mmdebstrap")
    yield _tool("dockerd", "--version", cost="`dsec bench` compares with no Docker")
    yield _tool("qemu-system-x86_64", "--version", cost="`make test-kernels` cannot run; no VM backends")


def _extras() -> Iterator[Check]:
    lsm = Path("/sys/kernel/security/lsm")
    names = lsm.read_text().split(",") if lsm.exists() else []
    yield Check(
        "AppArmor",
        "ok" if "apparmor" in names else "lacks",
        ",".join(names) or "none",
        "" if "apparmor" in names else "one layer of defence less; namespaces, seccomp and ids still hold",
    )
    psi = Path("/proc/pressure/memory").exists()
    yield Check(
        "pressure (PSI)",
        "ok" if psi else "lacks",
        "yes" if psi else "no",
        "" if psi else "admission goes by counts and free memory alone",
    )
    swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
    yield Check(
        "swap",
        "ok" if swap else "lacks",
        "on" if swap else "off",
        "" if swap else "idle memory of paused sandboxes cannot be given back",
    )
    kvm = os.path.exists("/dev/kvm")
    yield Check(
        "KVM",
        "ok" if kvm else "lacks",
        "device present; a guest's boot is tried when VM backends start" if kvm else "absent",
        "" if kvm else "VMs run under emulation",
    )


def _limits() -> Iterator[Check]:
    for item in SYSCTLS:
        value = item.current()
        if value is None:
            continue
        enough = value >= item.wanted
        yield Check(
            item.key,
            "ok" if enough else "lacks",
            str(value),
            "" if enough else f"{item.wanted} serves {SANDBOXES} sandboxes ({item.why}): dsec doctor --fix",
        )


def examine() -> list[Check]:
    """Every check of this host, in the order in which a person should read them."""
    groups: tuple[Callable[[], Iterator[Check]], ...] = (_filesystems, _mount_paths, _tools, _extras, _limits)
    return [_kernel(), _root(), _cgroups(), _files(), *(check for group in groups for check in group())]


def _fix() -> None:
    for item in SYSCTLS:
        value = item.current()
        if value is None or value >= item.wanted:
            continue
        console.print(f"sysctl {item.key}: {value} → {item.wanted} ({item.why})")
        try:
            item.path.write_text(f"{item.wanted}\n")
        except OSError as e:
            console.print(f"[red]  refused: {e.strerror}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--fix", is_flag=True, help="Raise the kernel limits that are too low; each is named first.")
def doctor(as_json: bool, fix: bool) -> None:
    """What this host has, what it lacks, and what each lack costs. Exit 1: no sandbox can run here."""
    if fix:
        _fix()
    checks = examine()
    if as_json:
        print_json(checks)
    else:
        marks = {"ok": "[green]ok[/]", "lacks": "[yellow]lacks[/]", "broken": "[red]broken[/]"}
        table(
            ["", "what", "found", "what it costs"],
            [[marks[c.verdict], c.name, c.found, c.cost] for c in checks],
        )
    if any(c.verdict == "broken" for c in checks):
        raise SystemExit(1)
