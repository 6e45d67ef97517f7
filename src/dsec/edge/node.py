"""What the node has: totals once, the rest read anew but no more often than a creation burst needs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from dsec.core.admission import NodeLimits
from dsec.edge.config import EdgeConfig

FRESH_S: Final = 0.25
_PRESSURE: Final = ("cpu", "memory", "io")


class NodeProbe:
    def __init__(self, config: EdgeConfig) -> None:
        memory = _meminfo()
        self.memory_total_mb = memory["MemTotal"] // 1024
        self.limits = NodeLimits(
            max_sandboxes=config.max_sandboxes,
            memory_total_mb=self.memory_total_mb,
            memory_overcommit=config.memory_overcommit,
            memory_reserve_mb=config.memory_reserve_mb,
            pids_total=_pid_max(),
            pids_overcommit=config.pids_overcommit,
        )
        self._available_mb = 0
        self._read_at = -1e9

    def memory_available_mb(self) -> int:
        """As of the last quarter of a second."""
        now = time.monotonic()
        if now - self._read_at > FRESH_S:
            self._available_mb = _meminfo()["MemAvailable"] // 1024
            self._read_at = now
        return self._available_mb

    def pressure(self) -> dict[str, float]:
        """PSI some avg10 in percent; empty where the kernel has none."""
        found = {}
        for what in _PRESSURE:
            try:
                line = Path("/proc/pressure", what).read_text().splitlines()[0]
                found[what] = float(line.split("avg10=")[1].split()[0])
            except (OSError, IndexError, ValueError):
                continue
        return found


def load() -> float:
    return os.getloadavg()[0]


def _meminfo() -> dict[str, int]:
    """KiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def _pid_max() -> int:
    return int(Path("/proc/sys/kernel/pid_max").read_text())
