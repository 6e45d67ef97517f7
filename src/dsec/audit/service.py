"""The audit record of one machine: others hand entries in, the Bus asks for them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from dsec.audit.log import AuditLog
from dsec.wire.audit import AuditEntry, AuditPage, AuditQuery
from dsec.wire.bus import Bus

SYNC_EVERY_S: Final = 1.0
SUBJECT: Final = "audit.query"


class AuditService:
    """`start`, `record`, `stop`."""

    def __init__(self, directory: Path) -> None:
        self.log = AuditLog(directory)
        self._syncing: asyncio.Task[None] | None = None

    def record(self, entry: AuditEntry) -> None:
        self.log.record(entry)

    def start(self, bus: Bus) -> None:
        bus.serve(SUBJECT, self.query)
        self._syncing = asyncio.create_task(self._sync())

    async def query(self, msg: AuditQuery) -> AuditPage:
        return await asyncio.to_thread(self.log.query, msg)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.log.sync)

    async def stop(self) -> None:
        if self._syncing:
            self._syncing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._syncing
        self.log.close()
