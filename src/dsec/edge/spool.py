"""Files for output that is too large for memory: `<directory>/<sandbox id>/<operation id>.<1 or 2>`.

Bounded for each sandbox: past the cap the output of its oldest ended operations goes, their results stay.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path

Settled = deque[tuple[str, int]]
"""Operation and bytes, oldest first."""


class Spool:
    def __init__(self, directory: Path, per_sandbox: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = str(directory)
        self._per_sandbox = per_sandbox
        self._settled: dict[str, Settled] = {}
        """Of the few sandboxes that have any."""

    def of(self, sandbox_id: str) -> str:
        return f"{self._directory}/{sandbox_id}"

    def settle(self, sandbox_id: str, op_id: str, size: int) -> None:
        """An operation has ended and left so many bytes here."""
        settled = self._settled.get(sandbox_id)
        if settled is None:
            settled = self._settled[sandbox_id] = self._found(sandbox_id, op_id)
        settled.append((op_id, size))
        total = sum(size for _, size in settled)
        while total > self._per_sandbox and len(settled) > 1:
            oldest, size = settled.popleft()
            total -= size
            for stream in (1, 2):
                Path(self.of(sandbox_id), f"{oldest}.{stream}").unlink(missing_ok=True)

    def _found(self, sandbox_id: str, but: str) -> Settled:
        """What an earlier edge left; running operations among them are settled again when they end."""
        files = sorted(os.scandir(self.of(sandbox_id)), key=lambda f: f.stat().st_mtime_ns)
        sizes: dict[str, int] = {}
        for file in files:
            op_id = file.name.rpartition(".")[0]
            sizes[op_id] = sizes.get(op_id, 0) + file.stat().st_size
        sizes.pop(but, None)
        return deque(sizes.items())

    def size(self, sandbox_id: str) -> int:
        try:
            return sum(file.stat().st_size for file in os.scandir(self.of(sandbox_id)))
        except FileNotFoundError:
            return 0

    def drop(self, sandbox_id: str) -> None:
        self._settled.pop(sandbox_id, None)
        shutil.rmtree(self.of(sandbox_id), ignore_errors=True)
