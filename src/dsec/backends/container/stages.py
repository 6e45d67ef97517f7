"""Where the time of launches goes."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stages:
    """How long each stage of launches took, in all: seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.launches = 0

    def clock(self) -> Callable[[str], None]:
        last = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal last
            now = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + now - last
            last = now

        return lap
