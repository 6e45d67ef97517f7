"""What runs in a sandbox stands still for a moment, and goes on. aether, in another group, is not touched.

v2: the sandbox's own group can be frozen. v1: the freezer is a hierarchy of its own; a sandbox gets a group
there when it is first frozen (a group costs time and memory), and its tasks are moved into it each time.

    <freezer>/dsec/<edge>/<sandbox>
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import time
from pathlib import Path
from typing import Final, Protocol

from dsec.core.errors import Unavailable, Unsupported
from dsec.linux.cgroup import V1, V2, _mkdir, _read, _rmdir, _write

LIMIT_S: Final = 2.0
"""How long all that runs inside may take to stand still."""
LET_GO_EVERY: Final = 20
"""Requests after which all may run a moment: one may wait for another that stands still already."""


class Freezer(Protocol):
    """Of one edge. By sandbox; every method may be called from any thread."""

    def freeze(self, name: str) -> None:
        """Returns when all stand still. Raises Unavailable past LIMIT_S, and has thawed them then.

        A program that aether starts afterwards may run (v1) or waits for the thaw (v2).
        """

    def thaw(self, name: str) -> None:
        """Idempotent; a sandbox that is gone is no error."""

    def thaw_all(self) -> list[str]:
        """What an earlier life of this edge left frozen; which those were."""

    def remove(self, name: str) -> None:
        """Idempotent. As Cgroups.remove."""

    def names(self) -> set[str]:
        """Sandboxes that have a group of this freezer's own."""

    def close(self) -> None:
        """Remove the parents, as far as they are empty."""


class V1Freezer:
    def __init__(self, hierarchy: str, groups: V1) -> None:
        self._top = f"{hierarchy}/dsec"
        self._base = f"{self._top}/{os.path.basename(groups.base['pids'])}"
        self._members = f"{groups.base['pids']}/box"

    def freeze(self, name: str) -> None:
        path = f"{self._base}/{name}"
        for directory in (self._top, self._base, path):
            _mkdir(directory)
        deadline = time.monotonic() + LIMIT_S
        try:
            # Frozen first: what is moved in stands still at once, and what it forks meanwhile is in here too.
            _write(f"{path}/freezer.state", "FROZEN")
            self._gather(name, deadline)
            self._await_frozen(name, deadline)
        except BaseException:
            self.thaw(name)
            raise

    def _gather(self, name: str, deadline: float) -> None:
        while outside := self._pids(f"{self._members}/{name}") - self._pids(f"{self._base}/{name}"):
            moved = [self._move(name, pid) for pid in outside]
            if not any(moved):
                return  # all of them were ending
            if time.monotonic() > deadline:
                raise _too_slow(name)

    @staticmethod
    def _pids(group: str) -> set[str]:
        return set((_read(f"{group}/cgroup.procs") or "").split())

    def _move(self, name: str, pid: str) -> bool:
        try:
            _write(f"{self._base}/{name}/cgroup.procs", pid)
        except ProcessLookupError:
            return False
        return True

    def _await_frozen(self, name: str, deadline: float) -> None:
        """Asks again and again: one that slept in vfork between the request and its sleep was passed over."""
        state = f"{self._base}/{name}/freezer.state"
        for turn in itertools.count(1):
            if (_read(state) or "").strip() == "FROZEN":
                return
            if time.monotonic() > deadline:
                raise _too_slow(name)
            if turn % LET_GO_EVERY == 0:
                _write(state, "THAWED")
            time.sleep(min(0.0002 * turn, 0.005))  # v1 has no event, and looks at tasks only when it is read
            _write(state, "FROZEN")

    def thaw(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            _write(f"{self._base}/{name}/freezer.state", "THAWED")

    def thaw_all(self) -> list[str]:
        frozen = [n for n in sorted(self.names()) if not self._is_thawed(n)]
        for name in frozen:
            self.thaw(name)
        return frozen

    def _is_thawed(self, name: str) -> bool:
        return (_read(f"{self._base}/{name}/freezer.state") or "").strip() == "THAWED"

    def remove(self, name: str) -> None:
        _rmdir(f"{self._base}/{name}")

    def names(self) -> set[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._base) as entries:
            return {e.name for e in entries if e.is_dir()}
        return set()

    def close(self) -> None:
        _rmdir(self._base)
        with contextlib.suppress(OSError):  # other edges of this host
            os.rmdir(self._top)


class V2Freezer:
    def __init__(self, groups: V2) -> None:
        self._groups = groups
        self._base = f"{groups.base}/box"

    def freeze(self, name: str) -> None:
        path = f"{self._base}/{name}"
        try:
            _write(f"{path}/cgroup.freeze", "1")
            self._await_frozen(name, time.monotonic() + LIMIT_S)
        except BaseException:
            self.thaw(name)
            raise

    def _await_frozen(self, name: str, deadline: float) -> None:
        events = os.open(f"{self._base}/{name}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        try:
            poll = select.poll()
            poll.register(events, select.POLLPRI)
            while b"frozen 1" not in os.pread(events, 4096, 0):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _too_slow(name)
                poll.poll(left * 1000)
        finally:
            os.close(events)

    def thaw(self, name: str) -> None:
        try:
            _write(f"{self._base}/{name}/cgroup.freeze", "0")
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENODEV):
                raise

    def thaw_all(self) -> list[str]:
        names = sorted(self._groups.names())
        frozen = [n for n in names if (_read(f"{self._base}/{n}/cgroup.freeze") or "").strip() == "1"]
        for name in frozen:
            self.thaw(name)
        return frozen

    def remove(self, name: str) -> None:
        """The group is the sandbox's own, and goes with it."""

    def names(self) -> set[str]:
        return set()

    def close(self) -> None:
        pass


def _too_slow(name: str) -> Unavailable:
    return Unavailable(
        f"freezing {name}: something in it did not stand still in {LIMIT_S:g} s (it waits for a disk, say); "
        "all goes on as before: try again"
    )


def find(groups: V1 | V2, mounts: str | None = None) -> Freezer:
    """The freezer that goes with these groups. Raises Unsupported that says what this host lacks."""
    if isinstance(groups, V2):
        return V2Freezer(groups)
    for line in (mounts or Path("/proc/self/mounts").read_text()).splitlines():
        _, where, fstype, options, *_ = line.split()
        if fstype == "cgroup" and "freezer" in options.split(","):
            return V1Freezer(where, groups)
    raise Unsupported("freezing sandboxes: of the v1 control groups the host has no freezer: mount it")
