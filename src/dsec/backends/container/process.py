"""Processes of the host, told apart for sure: by pid, start time and boot."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
from pathlib import Path
from typing import Final

from dsec.backends.base import Handle
from dsec.linux.syscalls import pidfd_send_signal

NAMED: Final = "ae:"


@functools.cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Field 22 of /proc/pid/stat; the name before it may hold anything."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])


def open_pidfd(handle: Handle) -> int:
    """Of the process that the handle means, and of no later one with its pid. -1: it has ended."""
    if not handle.pid or handle.boot_id != boot_id():
        return -1
    try:
        pidfd = os.pidfd_open(handle.pid)
    except ProcessLookupError:
        return -1
    try:
        same = start_time(handle.pid) == handle.start_time
    except (FileNotFoundError, ProcessLookupError):
        same = False
    if not same:
        os.close(pidfd)
        return -1
    return pidfd


def aether_name(sandbox_id: str) -> str:
    """The name that a sandbox's aether gives its process; before it knows its id it is plain `aether`."""
    return f"{NAMED}{sandbox_id[-12:]}"


def name_and_parent(pid: int) -> tuple[str, int]:
    text = Path(f"/proc/{pid}/stat").read_text()
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, int(rest.split()[1])


def kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd_send_signal(pidfd, signal.SIGKILL)


def end(pidfd: int, limit_s: float) -> bool:
    """Kills it; whether it has ended within the limit."""
    kill(pidfd)
    return bool(select.select([pidfd], [], [], limit_s)[0])
