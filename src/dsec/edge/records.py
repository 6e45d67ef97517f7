"""Durable records of sandboxes, and the slots that they hold.

SQLite in WAL mode, no fsync: a record outlives the process, not the power (after which no sandbox lives
either). Secrets are in no record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import apsw
import msgspec

from dsec.backends.base import Handle
from dsec.core.errors import AdmissionRefused
from dsec.core.images import ImageConfig
from dsec.core.sandbox_state import Failure, State
from dsec.core.specs import SandboxSpec


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the edge knows of a sandbox after it was killed. Times are Unix seconds."""

    id: str
    slot: int
    spec: SandboxSpec
    """Without the values of secrets."""
    digest: bytes
    """Of the spec, to tell a repeated request from another one of the same id."""
    principal: str = ""
    state: State = State.CREATING
    reason: str = ""
    failure: Failure | None = None
    gone: bool = False
    handle: Handle | None = None
    instance: bytes = b""
    """Of its aether."""
    created_at: float = 0.0
    ready_at: float | None = None
    ended_at: float | None = None
    layers: list[str] = []
    """Digests of what it stands on, bottom to top."""
    image: ImageConfig | None = None
    """What its images ask for together."""
    warnings: list[str] = []
    timings_ms: dict[str, float] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class RecordStore:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = apsw.Connection(str(path))
        self._db.set_busy_timeout(5000)
        for pragma in ("journal_mode=WAL", "synchronous=OFF", "cache_size=-2048", "wal_autocheckpoint=4000"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("CREATE TABLE IF NOT EXISTS sandbox (id TEXT PRIMARY KEY, body BLOB) WITHOUT ROWID")

    def save(self, record: Record) -> None:
        self._db.execute("INSERT OR REPLACE INTO sandbox VALUES (?, ?)", (record.id, _encode(record)))

    def drop(self, sandbox_id: str) -> None:
        self._db.execute("DELETE FROM sandbox WHERE id = ?", (sandbox_id,))

    def load(self) -> Iterator[Record]:
        for (body,) in self._db.execute("SELECT body FROM sandbox"):
            yield _decode(body)

    def close(self) -> None:
        self._db.close()


class Slots:
    """Small numbers, each held by at most one sandbox. The one freed longest ago comes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = 0
        self._free: deque[int] = deque()
        self._held: set[int] = set()

    def take(self) -> int:
        """Raises AdmissionRefused when all are held."""
        if len(self._free) > 64 or (self._free and self._next >= self._limit):
            slot = self._free.popleft()
        elif self._next < self._limit:
            slot, self._next = self._next, self._next + 1
        else:
            raise AdmissionRefused(f"all {self._limit} slots of the node are held")
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self._held.remove(slot)
        self._free.append(slot)

    def restore(self, held: set[int]) -> None:
        """At the start, before the first `take`: these are held already."""
        self._held = set(held)
        self._next = max(held, default=-1) + 1
        self._free = deque(s for s in range(self._next) if s not in held)

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self._held)
