"""The load: so many calls in flight, each one timed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from bench.result import percentile
from bench.server import Target
from dsec.client import DSecClient, DSecContainerRunArgs, Sandbox
from dsec.core.errors import DSecError

CREATE_TIMEOUT_S = 120


@dataclass
class Timings:
    """Of one run of the load."""

    ms: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def rate(self) -> float:
        """Calls that succeeded, per second."""
        return len(self.ms) / self.seconds if self.seconds else 0.0

    @property
    def p50(self) -> float:
        return percentile(self.ms, 0.5)

    @property
    def p99(self) -> float:
        return percentile(self.ms, 0.99)

    def complain(self, what: str) -> None:
        """Failures are shown, not only counted."""
        for why, times in self.failures.most_common(5):
            print(f"{what}: failed {times} times: {why}", file=sys.stderr)


async def flight(count: int, concurrency: int, one: Callable[[int], Awaitable[object]]) -> Timings:
    """`one(0)` to `one(count - 1)`, at most `concurrency` at a time."""
    timings = Timings()
    numbers = iter(range(count))

    async def lane() -> None:
        for i in numbers:
            start = time.perf_counter()
            try:
                await one(i)
            except DSecError as e:
                timings.failures[f"{e.code}: {e.message}"] += 1
            else:
                timings.ms.append((time.perf_counter() - start) * 1e3)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(lane())
    timings.seconds = time.perf_counter() - begin
    return timings


def arguments(target: Target, **changes: object) -> DSecContainerRunArgs:
    """The benchmark's sandbox: base, workspace and toolkit, with limits on everything."""
    options: dict[str, object] = {
        "container_image": target.image,
        "layers": list(target.layers),
        "memory_limit_mb": 2048,
        "cpu_cores_limit": 1,
        **changes,
    }
    return DSecContainerRunArgs(**options)  # type: ignore[arg-type]


class Fleet:
    """Sandboxes that the load made; it stops them when asked."""

    def __init__(self, client: DSecClient, target: Target, **changes: object) -> None:
        self.client = client
        self.args = arguments(target, **changes)
        self.sandboxes: list[Sandbox] = []

    async def make(self) -> Sandbox:
        sandbox = await self.client.run_container(self.args, timeout=CREATE_TIMEOUT_S)
        self.sandboxes.append(sandbox)
        return sandbox

    async def grow(self, count: int, concurrency: int) -> Timings:
        timings = await flight(count, concurrency, lambda _: self.make())
        timings.complain("create")
        return timings

    async def stop(self, concurrency: int = 32) -> Timings:
        sandboxes, self.sandboxes = self.sandboxes, []
        timings = await flight(len(sandboxes), concurrency, lambda i: sandboxes[i].stop())
        timings.complain("stop")
        return timings
