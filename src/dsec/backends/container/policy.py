"""What every sandbox gets inside, as data for aether: mounts, masks, capabilities, limits, environment."""

from __future__ import annotations

import functools
import resource
from collections.abc import Iterable
from typing import Final

from dsec.backends.base import LaunchSpec
from dsec.linux import seccomp
from dsec.linux.syscalls import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY
from dsec.wire.aether import VERSION, Config, RLimit, Step

SAFE: Final = MS_NOSUID | MS_NODEV | MS_NOEXEC

MASKED: Final = (  # OCI runtime specification and Docker; kpage* let a reader crash older kernels
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READ_ONLY: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

# Docker's default set: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service,
# net_raw, sys_chroot, mknod, audit_write, setfcap.
CAPABILITIES: Final = sum(1 << c for c in (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))

SHELLS: Final = ["/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh"]
DEFAULT_ENV: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
OOM_SCORE: Final = 500
"""What runs inside goes before what runs the node, should the host itself run out of memory."""


def steps(spec: LaunchSpec, dev: int) -> list[Step]:
    """In order. `dev` is the index of the prepared /dev among the descriptors."""
    return [
        Step("mkdir", "/proc", "", 0o755, ""),
        Step("mkdir", "/sys", "", 0o755, ""),
        Step("mkdir", "/dev", "", 0o755, ""),
        Step("mount", "/proc", "proc", SAFE, ""),
        Step("mount", "/sys", "sysfs", SAFE | MS_RDONLY, ""),
        Step("attach", "/dev", "", dev, ""),
        Step(
            "mount", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"
        ),
        Step("mount", "/dev/shm", "tmpfs", SAFE, f"mode=1777,size={spec.spec.shm_mb}m"),
        *(Step("readonly", path, "", SAFE, "") for path in READ_ONLY),
        *(Step("mask", path, "", 0, "") for path in MASKED),
    ]


@functools.cache
def seccomp_program() -> bytes:
    return seccomp.program()


def rlimits(spec: LaunchSpec) -> list[RLimit]:
    files = spec.spec.open_files_limit
    return [RLimit(resource.RLIMIT_NOFILE, files, files), RLimit(resource.RLIMIT_CORE, 0, 0)]


def hostname(spec: LaunchSpec) -> str:
    return spec.spec.hostname or spec.sandbox_id.rsplit("-", 1)[-1]


NO_NETWORK: Final = "# this sandbox has no network but loopback\noptions timeout:1 attempts:1\n"


def etc_files(name: str, own: Iterable[object] = (), resolvers: Iterable[object] = ()) -> dict[str, str]:
    """Files of /etc that belong to the sandbox, not to its image; they lie in the writable layer.

    name: the sandbox's hostname. own: its addresses, where it has a network; resolvers: those that it asks.
    """
    named = "".join(f"{address}\t{name}\n" for address in own) or f"127.0.1.1\t{name}\n"
    servers = "".join(f"nameserver {address}\n" for address in resolvers)
    return {
        "hostname": f"{name}\n",
        "hosts": f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{named}",
        "resolv.conf": f"{servers}options timeout:3 attempts:2\n" if servers else NO_NETWORK,
    }


def environment(spec: LaunchSpec) -> dict[str, str]:
    return {**DEFAULT_ENV, **spec.image.env, **spec.network_env, **spec.spec.env, **spec.spec.secrets}


ROOT, LISTEN, DEV, OOM_COUNTER, GROUPS = range(5)
"""Indices of descriptors; from GROUPS on those of the sandbox's groups, and then of aether's own."""


def config(spec: LaunchSpec, joins: int, homes: int, *, v2: bool) -> Config:
    """All of it. `joins` and `homes`: how many descriptors there are of each kind of group."""
    return Config(
        version=VERSION,
        sandbox_id=spec.sandbox_id,
        root=ROOT,
        listen=LISTEN,
        cgroup_join=list(range(GROUPS, GROUPS + joins)),
        cgroup_home=list(range(GROUPS + joins, GROUPS + joins + homes)),
        cgroup_v2=v2,
        oom_counter=OOM_COUNTER,
        hostname=hostname(spec),
        steps=steps(spec, DEV),
        seccomp=seccomp_program(),
        capabilities=CAPABILITIES,
        rlimits=rlimits(spec),
        env=environment(spec),
        user=spec.spec.init_user or spec.image.user or "",
        workdir=spec.spec.workdir or spec.image.workdir or "",
        shell=spec.image.shell or SHELLS,
        oom_score_adj=OOM_SCORE,
        umask=0o022,
        max_operations=1024,
        loopback=True,
    )
