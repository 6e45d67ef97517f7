"""The bytes of an operation: output that is kept, input on its way.

aether holds what was not ACKed, and an edge may be killed at any instant. So output is ACKed only once it is
in a file; what fits below SPOOL_AT never is ACKed, and goes into the operation log with the result.
"""

from __future__ import annotations

import os
from typing import Final

from dsec.wire.aether import UPLOAD_WINDOW, WINDOW

SPOOL_AT: Final = WINDOW // 2
"""Held in memory up to here; half the window, so that aether goes on reading while it is written."""
CHUNK: Final = 64 << 10


class Output:
    """One stream of output: [0, base) in the spool (or passed on and dropped), [base, received) in memory."""

    __slots__ = ("_chunks", "_fd", "acked", "base", "eof", "held", "path", "received")

    def __init__(self, path: str, start: int = 0) -> None:
        self.path = path
        self.base = self.acked = self.received = start
        self.held = 0
        self.eof = False
        self._chunks: list[bytes] = []
        self._fd = -1

    def append(self, data: bytes) -> None:
        self._chunks.append(data)
        self.held += len(data)
        self.received += len(data)

    def spill(self) -> None:
        """Move what is in memory to the spool. Raises OSError; nothing is lost then."""
        if self._fd < 0:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        view, at = memoryview(b"".join(self._chunks)), self.base
        while view:
            n = os.pwrite(self._fd, view, at)
            view, at = view[n:], at + n
        self._forget_held()

    def drop(self) -> None:
        """What was in memory is wanted no more."""
        self._forget_held()

    def release(self, offset: int) -> None:
        """What is below `offset` was passed on: forget it."""
        drop, n = offset - self.base, 0
        while drop > 0 and drop >= len(self._chunks[n]):
            drop -= len(self._chunks[n])
            n += 1
        del self._chunks[:n]
        if drop > 0:
            self._chunks[0] = self._chunks[0][drop:]
        self.held -= offset - self.base
        self.base = offset

    def _forget_held(self) -> None:
        self._chunks.clear()
        self.base, self.held = self.received, 0

    def read(self, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes from `offset`; fewer only at the end or at the edge of the spool."""
        if offset < self.base:
            return self._read_spool(offset, min(limit, self.base - offset))
        skip, parts = offset - self.base, []
        for chunk in self._chunks:
            if limit <= 0:
                break
            if skip >= len(chunk):
                skip -= len(chunk)
                continue
            part = chunk[skip : skip + limit] if skip or len(chunk) > limit else chunk
            skip = 0
            parts.append(part)
            limit -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_all(self, offset: int, limit: int) -> bytes:
        """As `read`, over the edge of the spool."""
        first = self.read(offset, limit)
        if offset + len(first) >= self.received or len(first) >= limit or not first:
            return first
        return first + self.read(offset + len(first), limit - len(first))

    def _read_spool(self, offset: int, limit: int) -> bytes:
        fd, opened = self._fd, False
        if fd < 0:
            fd, opened = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), True
        try:
            return os.pread(fd, limit, offset)
        finally:
            if opened:
                os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Input:
    """Bytes towards aether: those sent but not ACKed, then those that wait for room in the window."""

    __slots__ = (
        "_adopting",
        "_unacked",
        "_waiting",
        "_waiting_bytes",
        "acked",
        "eof",
        "eof_sent",
        "resync",
        "sent",
    )

    def __init__(self, *, adopting: bool = False) -> None:
        self._adopting = adopting
        """What an edge before this one has sent is not known until aether says it."""
        self.acked = 0
        """What aether has taken for good."""
        self.sent = 0
        self._unacked: list[bytes] = []
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.eof = False
        self.eof_sent = False
        self.resync = adopting
        """Until aether says, on a new connection, what it has taken."""

    @property
    def total(self) -> int:
        """Bytes that were accepted from callers."""
        return self.sent + self._waiting_bytes

    @property
    def full(self) -> bool:
        return self._waiting_bytes > 0

    def put(self, data: bytes) -> None:
        for at in range(0, len(data), CHUNK):
            self._waiting.append(data[at : at + CHUNK])
        self._waiting_bytes += len(data)

    def sendable(self) -> list[bytes]:
        """The chunks that may go out now; they count as sent."""
        if self.resync or not self._waiting:
            return []
        out: list[bytes] = []
        room = UPLOAD_WINDOW - (self.sent - self.acked)
        for chunk in self._waiting:
            if len(chunk) > room:
                break
            room -= len(chunk)
            out.append(chunk)
        del self._waiting[: len(out)]
        size = sum(map(len, out))
        self.sent += size
        self._waiting_bytes -= size
        self._unacked += out
        return out

    def acknowledge(self, offset: int) -> bool:
        """False when that can't be: below the last ACK, or past what was sent."""
        if offset < self.acked or offset > self.sent:
            return False
        self._trim(offset)
        return True

    def resume(self, offset: int) -> bool:
        """On a new connection aether has taken `offset` bytes: the rest is to be sent again."""
        if self._adopting:
            self._adopting, self.acked, self.sent = False, offset, offset
        if not self.acked <= offset <= self.sent:
            return False
        self._trim(offset)
        self._waiting[:0] = self._unacked
        self._waiting_bytes += sum(map(len, self._unacked))
        self._unacked.clear()
        self.sent = offset
        self.resync = self.eof_sent = False
        return True

    def restart(self) -> None:
        """The operation is started anew: all from the first byte (nothing of it was ACKed)."""
        self.resume(self.acked)

    def _trim(self, offset: int) -> None:
        drop, n = offset - self.acked, 0
        while drop and drop >= len(self._unacked[n]):
            drop -= len(self._unacked[n])
            n += 1
        del self._unacked[:n]
        if drop:
            self._unacked[0] = self._unacked[0][drop:]
        self.acked = offset
