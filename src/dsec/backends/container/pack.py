"""The writable layer of a running sandbox, taken at one instant while all that runs inside stands still.

    flush the pool     the sandbox runs; it leaves little to be written while frozen
    freeze             its group, not aether's
    snapshot           of btrfs: some milliseconds, whatever it holds; a plain directory is copied
    thaw               always; after a SIGKILL, by the next life of this edge

With simple quotas a block counts against the sandbox that wrote it, until it is freed: what the sandbox
removes while a snapshot has it counts until that is closed. A snapshot itself has no limit.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Final

from dsec.backends.base import WritableSnapshot
from dsec.backends.container.pool import How, Pool
from dsec.core.errors import DiskFull, DSecError, Internal, SandboxFailed, Unavailable, Unsupported
from dsec.linux import freezer
from dsec.linux.cgroup import V1, V2

log = logging.getLogger(__name__)
END_LIMIT_S: Final = 30.0


class Packer:
    """Thread-safe. Snapshots of one sandbox at a time: that is the caller's to see to."""

    def __init__(self, pool: Pool, groups: V1 | V2) -> None:
        self._pool = pool
        self._groups = groups
        self._freezer: freezer.Freezer | None = None
        self.why_not = ""
        self._changed = threading.Condition()
        self._taking: set[str] = set()
        self._ending: dict[str, int] = {}
        self._open: set[str] = set()
        self._numbers = itertools.count()

    def open(self) -> None:
        try:
            self._freezer = freezer.find(self._groups)
        except Unsupported as e:
            self.why_not = e.message
            return
        for name in self._freezer.thaw_all():
            log.warning("%s was frozen when an earlier server ended; it goes on", name)

    def close(self, *, keep: bool) -> None:
        if keep:
            return
        self.reclaim(all_of_them=True)
        if self._freezer:
            self._freezer.close()

    @property
    def described(self) -> str:
        if not self._freezer:
            return self.why_not
        return "copy" if self._pool.limited_by == "none" else "snapshot"

    def take(self, sandbox_id: str) -> WritableSnapshot:
        """See base.Packs.snapshot_writable."""
        if self._freezer is None:
            raise Unsupported(self.why_not or "taking a writable layer: the backend is not open")
        with self._exclusive(sandbox_id):
            try:
                return self._take(sandbox_id, self._freezer)
            except OSError as e:
                raise self._typed(e, sandbox_id) from e

    def _take(self, sandbox_id: str, freezer: freezer.Freezer) -> WritableSnapshot:
        copy = f"{sandbox_id}.{next(self._numbers)}.{time.time_ns():x}"
        self._pool.flush()
        began = time.perf_counter()
        self._open.add(copy)
        try:
            how = self._frozen_snapshot(sandbox_id, copy, freezer)
        except BaseException:
            self._drop(copy)
            raise
        return WritableSnapshot(
            self._pool.where / f".{copy}" / "upper",
            frozen_s=time.perf_counter() - began,
            how=how,
            close=lambda: self._drop(copy),
        )

    def _frozen_snapshot(self, sandbox_id: str, copy: str, freezer: freezer.Freezer) -> How:
        freezer.freeze(sandbox_id)
        try:
            self._refuse_ending(sandbox_id)
            return self._pool.snapshot(sandbox_id, copy, lambda: sandbox_id in self._ending)
        finally:
            freezer.thaw(sandbox_id)

    def _drop(self, copy: str) -> None:
        self._pool.destroy_snapshot(copy)
        self._open.discard(copy)

    @contextlib.contextmanager
    def _exclusive(self, sandbox_id: str) -> Iterator[None]:
        with self._changed:
            self._refuse_ending(sandbox_id)
            if sandbox_id in self._taking:
                raise Unavailable(f"{sandbox_id}: its writable layer is being taken; try again")
            if not self._pool.has(sandbox_id):
                raise _gone(sandbox_id)
            self._taking.add(sandbox_id)
        try:
            yield
        finally:
            with self._changed:
                self._taking.discard(sandbox_id)
                self._changed.notify_all()

    def _refuse_ending(self, sandbox_id: str) -> None:
        if sandbox_id in self._ending:
            raise _gone(sandbox_id)

    def _typed(self, e: OSError, sandbox_id: str) -> DSecError:
        if e.errno in (errno.ENOENT, errno.EINTR, errno.ENODEV):
            return _gone(sandbox_id)
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"taking the writable layer of {sandbox_id}: the pool is full: stop sandboxes")
        return Internal(f"taking the writable layer of {sandbox_id}: {e}")

    @contextlib.contextmanager
    def ending(self, sandbox_id: str) -> Iterator[None]:
        """While its processes are killed: a frozen one would not die (v1), so it is thawed, and stays so."""
        with self._changed:
            self._ending[sandbox_id] = self._ending.get(sandbox_id, 0) + 1
        try:
            if self._freezer:
                self._freezer.thaw(sandbox_id)
            yield
        finally:
            with self._changed:
                self._ending[sandbox_id] -= 1
                if not self._ending[sandbox_id]:
                    del self._ending[sandbox_id]

    def forget(self, sandbox_id: str) -> None:
        """Of a sandbox whose processes have ended, within `ending`. Idempotent."""
        with self._changed:
            if not self._changed.wait_for(lambda: sandbox_id not in self._taking, END_LIMIT_S):
                raise Unavailable(f"{sandbox_id}: its writable layer is still being taken")
        if self._freezer:
            self._freezer.remove(sandbox_id)

    def names(self) -> set[str]:
        """Sandboxes that have a freezer of their own."""
        return self._freezer.names() if self._freezer else set()

    def reclaim(self, *, all_of_them: bool = False) -> list[str]:
        """Removes snapshots of earlier lives; what they were."""
        kept = set() if all_of_them else set(self._open)
        lost = sorted(self._pool.snapshots() - kept)
        for copy in lost:
            self._drop(copy)
        return [f"snapshot {copy}" for copy in lost]


def _gone(sandbox_id: str) -> SandboxFailed:
    return SandboxFailed(f"taking the writable layer of {sandbox_id}: it is gone, or being destroyed")
