"""The record on disk: segments of JSON lines, each line chained to the one before by SHA-256.

    DATA/audit/00000000000000000001.jsonl      named by the position of its first entry

Appended with one write(2) an entry, so a SIGKILL of the server loses none; fdatasync once a second, so a
power cut loses a second at most. A torn last line is cut off at the next start, and the record says so. A
line that was changed or taken out breaks the chain: `dsec audit verify` finds it. Whoever can write all the
files can forge the whole chain, unless its head was noted elsewhere; that is why verify prints it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import AuditDamaged, InvalidArgument
from dsec.wire.audit import MAX_PAGE, AuditEntry, AuditPage, AuditQuery

log = logging.getLogger(__name__)
SEGMENT_BYTES: Final = 16 << 20
SEGMENTS: Final = 64
"""Kept; the oldest goes when there are more."""
LOOKED_AT: Final = 200_000
"""Lines read for one page at most; the next page goes on from there."""
_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(AuditEntry).decode


class AuditLog:
    """One writer, any number of readers; all methods may be called from any thread."""

    def __init__(
        self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, segments: int = SEGMENTS
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segments = segments
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0
        self._dirty = False
        self._lost = 0
        """Entries that could not be written since the last one that could."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.position, self.head, torn = _last(directory)
        self._open(self.position + 1 if not _firsts(directory) else _firsts(directory)[-1])
        if torn:
            self.record(AuditEntry(kind="record", what="recovered", detail={"bytes_cut_off": torn}))

    def _open(self, first: int) -> None:
        if self._fd >= 0:
            os.fdatasync(self._fd)
            os.close(self._fd)
        path = _path(self._directory, first)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def record(self, entry: AuditEntry) -> None:
        """Append. What cannot be written is logged, and counted in the next entry that can."""
        with self._lock:
            if self._fd < 0:
                return
            try:
                if self._lost:
                    self._append(AuditEntry(kind="record", what="lost", detail={"entries": self._lost}))
                    self._lost = 0
                self._append(entry)
            except OSError as e:
                if not self._lost:
                    log.error("the audit record cannot be written: %s", e)
                self._lost += 1

    def _append(self, entry: AuditEntry) -> None:
        if self._size >= self._segment_bytes:
            self._open(self.position + 1)
            self._drop_old()
        entry, line = chained(entry, self.position + 1, entry.time or time.time(), self.head)
        written = os.write(self._fd, line)
        if written < len(line):  # a full disk: half a line is no line
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written
        self.position, self.head = entry.position, entry.chain
        self._dirty = True

    def _drop_old(self) -> None:
        for first in _firsts(self._directory)[: -self._segments]:
            _path(self._directory, first).unlink(missing_ok=True)

    def sync(self) -> None:
        """Make durable what was recorded. Blocks: call it in a thread."""
        with self._lock:
            if self._fd < 0 or not self._dirty:
                return
            fd, self._dirty = os.dup(self._fd), False
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def query(self, query: AuditQuery) -> AuditPage:
        """Entries after a position. Raises InvalidArgument. Blocks: call it in a thread."""
        limit = query.limit
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidArgument(f"limit: {limit} is not in 1..{MAX_PAGE}")
        found: list[AuditEntry] = []
        last, end = query.after, self.position
        for looked, entry in enumerate(entries(self._directory, query.after)):
            if entry.position > end or len(found) == limit or looked >= LOOKED_AT:
                break
            last = entry.position
            if matches(entry, query):
                found.append(entry)
        return AuditPage(entries=found, next=last)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.fdatasync(self._fd)
                os.close(self._fd)
                self._fd = -1


def chained(entry: AuditEntry, position: int, when: float, head: str) -> tuple[AuditEntry, bytes]:
    """The entry in its place, and its line."""
    bare = msgspec.structs.replace(entry, position=position, time=round(when, 6), chain="")
    whole = msgspec.structs.replace(bare, chain=sha256(head.encode() + _encode(bare)).hexdigest())
    return whole, _encode(whole) + b"\n"


def matches(entry: AuditEntry, query: AuditQuery) -> bool:
    wanted = query.what
    named = entry.what.startswith(wanted.rstrip("*")) if wanted[-1:] in (".", "*") else entry.what == wanted
    return (
        (not query.sandbox or entry.sandbox == query.sandbox)
        and (not query.project or entry.project == query.project)
        and (not query.who or query.who in (entry.who, entry.name))
        and (not query.kind or entry.kind == query.kind)
        and (not wanted or named)
        and entry.time >= query.since
    )


def entries(directory: Path, after: int = 0) -> Iterator[AuditEntry]:
    """All whole entries after a position, oldest first."""
    firsts = _firsts(directory)
    for first in firsts[max(0, bisect_right(firsts, after + 1) - 1) :]:
        with contextlib.suppress(FileNotFoundError), open(_path(directory, first), "rb") as file:
            for line in file:
                if line.endswith(b"\n") and (entry := _decode(line)).position > after:
                    yield entry


def verify(directory: Path) -> tuple[int, str]:
    """How many entries, and the chain's head. Raises AuditDamaged that names the place."""
    count, head, expected = 0, "", 0
    for entry in _checked(directory):
        bare = msgspec.structs.replace(entry, chain="")
        if expected and entry.position != expected:
            raise AuditDamaged(f"{directory}: entry {expected} is missing; {entry.position} follows")
        # The oldest segments are dropped in time: what the first kept entry follows is not known then.
        if (expected or entry.position == 1) and sha256(
            head.encode() + _encode(bare)
        ).hexdigest() != entry.chain:
            raise AuditDamaged(f"{directory}: entry {entry.position} was changed, or the one before it was")
        count, head, expected = count + 1, entry.chain, entry.position + 1
    return count, head


def _checked(directory: Path) -> Iterator[AuditEntry]:
    try:
        yield from entries(directory)
    except msgspec.MsgspecError as e:
        raise AuditDamaged(f"{directory}: a line is no entry: {e}") from None


def _path(directory: Path, first: int) -> Path:
    return directory / f"{first:020d}.jsonl"


def _firsts(directory: Path) -> list[int]:
    return sorted(int(p.stem) for p in directory.glob("*.jsonl") if p.stem.isdigit())


def _last(directory: Path) -> tuple[int, str, int]:
    """Position and chain of the last whole entry; how many bytes after it were cut off."""
    firsts, torn = _firsts(directory), 0
    for first in reversed(firsts):
        path = _path(directory, first)
        entry, good = _last_in(path)
        if (size := path.stat().st_size) > good:
            os.truncate(path, good)
            torn += size - good
        if entry is not None:
            return entry.position, entry.chain, torn
        if first != firsts[0]:
            path.unlink()
    return (firsts[0] - 1 if firsts else 0), "", torn


def _last_in(path: Path) -> tuple[AuditEntry | None, int]:
    """The last whole entry, and where it ends."""
    last, end, at = None, 0, 0
    with open(path, "rb") as f:
        for line in f:
            at += len(line)
            try:
                if line.endswith(b"\n"):
                    last, end = _decode(line), at
            except msgspec.MsgspecError:
                break
    return last, end
