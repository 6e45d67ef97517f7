"""Times to live: one heap, one timer. A use of a sandbox costs nothing here; only a look that is due does."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

from dsec.edge.sandbox import Sandbox

Expired = Callable[[Sandbox, str], None]


class TTLs:
    """`expired(sandbox, reason)` is called once for each, with `ttl_running_stop` or `ttl_max`."""

    def __init__(self, sandboxes: dict[str, Sandbox], expired: Expired) -> None:
        self._sandboxes = sandboxes
        self._expired = expired
        self._heap: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, sandbox: Sandbox) -> None:
        """From its start, or its recovery, on. The wall clock, which may jump, is asked here alone."""
        if (longest := sandbox.record.spec.ttl_max) is not None:
            left = sandbox.record.created_at + longest - time.time()
            sandbox.ends_at = asyncio.get_running_loop().time() + min(left, longest)
        due = self._due(sandbox)
        if due is not None:
            self._push(sandbox, due[0])

    def _push(self, sandbox: Sandbox, due: float) -> None:
        sandbox.due = due
        heapq.heappush(self._heap, (due, sandbox.id))
        if self._heap[0][1] == sandbox.id or self._timer is None:
            self._arm()

    def _due(self, sandbox: Sandbox) -> tuple[float, str] | None:
        """When it ends if nothing happens, on the loop's clock. A busy one is idle no sooner than now."""
        now = asyncio.get_running_loop().time()
        spec, found = sandbox.record.spec, []
        if spec.ttl_running_stop is not None:
            since = now if sandbox.busy else sandbox.last_used
            found.append((since + spec.ttl_running_stop, "ttl_running_stop"))
        if sandbox.ends_at is not None:
            found.append((sandbox.ends_at, "ttl_max"))
        return min(found, default=None)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer = asyncio.get_running_loop().call_at(self._heap[0][0], self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now:
            due, sandbox_id = heapq.heappop(self._heap)
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is not None and sandbox.machine.live and sandbox.due == due:
                self._judge(sandbox, now)
        self._arm()

    def _judge(self, sandbox: Sandbox, now: float) -> None:
        due = self._due(sandbox)
        if due is None:
            return
        if due[0] <= now + 0.001:
            self._expired(sandbox, due[1])
        else:
            sandbox.due = due[0]
            heapq.heappush(self._heap, (due[0], sandbox.id))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
