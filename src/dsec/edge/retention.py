"""Ended sandboxes are looked up and repeated for a while; then their records and output go."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from dsec.edge.config import EdgeConfig
from dsec.edge.operations import Operations
from dsec.edge.sandbox import Sandbox


class Retention:
    """The oldest go first, by number, by age, and by what their output takes on disk."""

    def __init__(self, operations: Operations, config: EdgeConfig, forget: Callable[[Sandbox], None]) -> None:
        self._operations = operations
        self._config = config
        self._forget = forget
        self._ended: OrderedDict[str, tuple[Sandbox, float, int]] = OrderedDict()
        """Sandbox, when it ended on the loop's clock, bytes in its spool."""
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, sandbox: Sandbox) -> None:
        """Nothing of it is left but what is kept for lookups."""
        now = asyncio.get_running_loop().time()
        size = self._operations.spooled(sandbox.id)
        self._ended[sandbox.id] = (sandbox, now, size)
        self._bytes += size
        while len(self._ended) > self._config.stopped_kept or (
            self._bytes > self._config.spool_kept and len(self._ended) > 1
        ):
            self._drop_oldest()
        self._arm()

    def _drop_oldest(self) -> None:
        _, (sandbox, _, size) = self._ended.popitem(last=False)
        self._bytes -= size
        self._operations.drop(sandbox.id)
        self._forget(sandbox)

    def _arm(self) -> None:
        if self._timer is None and self._ended:
            _, ended, _ = next(iter(self._ended.values()))
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(ended + self._config.stopped_kept_s, self._look)

    def _look(self) -> None:
        self._timer = None
        late = asyncio.get_running_loop().time() - self._config.stopped_kept_s
        while self._ended and next(iter(self._ended.values()))[1] <= late:
            self._drop_oldest()
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
