"""The operation log: what was asked of a sandbox, and what came of it. One append-only file per sandbox.

An intent is written before START is sent, an outcome before FORGET. So after a crash of the edge a repeated
operation id finds its recorded result, and an intent without outcome is either still known to aether, or was
never started, or has died with its sandbox.

Entry: `<crc32 u32><length u32><kind u8>`, payload in msgpack. The checksum covers all that follows it; an
entry that fails it ends the file (a torn tail). Written without fsync: it outlives the process, not the
power.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from dsec.core.errors import DiskFull
from dsec.wire.edge import ErrorInfo

HEAD: Final = struct.Struct("<IIB")
INTENT: Final = 1
OUTCOME: Final = 2
WITHDRAWN: Final = 3
OPEN_FILES: Final = 512
MAX_ENTRY: Final = 64 << 20
SHARD_AT: Final = 1024
SHARDS: Final = 128


class Intent(msgspec.Struct, frozen=True, array_like=True):
    op_id: str
    kind: str
    digest: bytes
    session: str
    command: str
    started_at: float
    output_limit: int
    streamed: bool
    """Its content is passed on and not kept."""
    terminal: bool = False


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    op_id: str
    state: Literal["ended", "outcome_unknown"]
    pid: int
    result: bytes
    """In msgpack, the struct of its kind; empty: none."""
    error: ErrorInfo | None
    stdout: bytes
    stderr: bytes
    """Output that is in no spool file."""
    stdout_spooled: int
    stderr_spooled: int
    """Bytes in the spool file, before those above."""
    ended_at: float


class Withdrawn(msgspec.Struct, frozen=True, array_like=True):
    """The intent was never carried out: its id is free again."""

    op_id: str


class Entry(msgspec.Struct, frozen=True):
    intent: Intent
    outcome: Outcome | None


class OperationLog(Protocol):
    """Raises DiskFull when an entry can't be written."""

    def intent(self, sandbox_id: str, intent: Intent) -> None: ...
    def outcome(self, sandbox_id: str, outcome: Outcome) -> None: ...
    def withdraw(self, sandbox_id: str, op_id: str) -> None: ...
    def find(self, sandbox_id: str, op_id: str) -> Entry | None: ...
    def unfinished(self, sandbox_id: str) -> list[Intent]: ...
    def entries(self, sandbox_id: str) -> list[Entry]: ...
    def drop(self, sandbox_id: str) -> None: ...
    def sync(self, sandbox_id: str) -> None: ...
    def close(self) -> None: ...


Payload = Intent | Outcome | Withdrawn
_KINDS: Final[dict[int, msgspec.msgpack.Decoder[Payload]]] = {
    INTENT: msgspec.msgpack.Decoder(Intent),
    OUTCOME: msgspec.msgpack.Decoder(Outcome),
    WITHDRAWN: msgspec.msgpack.Decoder(Withdrawn),
}
_encode = msgspec.msgpack.Encoder().encode


def _key(op_id: str) -> bytes:
    return blake2b(op_id.encode(), digest_size=8).digest()


class _Index:
    """Where the entries of each operation are: 16 bytes an entry, (hash of the id, offset), searched in C."""

    __slots__ = ("_entries", "_shards", "size")

    def __init__(self) -> None:
        self._shards = [bytearray()]
        self._entries = 0
        self.size = 0
        """Of the file."""

    def add(self, op_id: str, offset: int) -> None:
        key = _key(op_id)
        self._shards[key[0] % len(self._shards)] += key + offset.to_bytes(8, "little")
        self._entries += 1
        if self._entries == SHARD_AT:
            self._split()

    def _split(self) -> None:
        whole, self._shards = self._shards[0], [bytearray() for _ in range(SHARDS)]
        for at in range(0, len(whole), 16):
            self._shards[whole[at] % SHARDS] += whole[at : at + 16]

    def offsets(self, op_id: str) -> list[int]:
        key = _key(op_id)
        shard, found = self._shards[key[0] % len(self._shards)], []
        at = shard.find(key)
        while at >= 0:
            if at % 16 == 0:
                found.append(int.from_bytes(shard[at + 8 : at + 16], "little"))
            at = shard.find(key, at + 1)
        return found


class FileOperationLog:
    """`<directory>/<sandbox id>.log`. At most OPEN_FILES of them are held open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files: OrderedDict[str, int] = OrderedDict()
        self._indices: dict[str, _Index] = {}

    # --- writing ---

    def intent(self, sandbox_id: str, intent: Intent) -> None:
        self._append(sandbox_id, INTENT, intent)

    def outcome(self, sandbox_id: str, outcome: Outcome) -> None:
        self._append(sandbox_id, OUTCOME, outcome)

    def withdraw(self, sandbox_id: str, op_id: str) -> None:
        self._append(sandbox_id, WITHDRAWN, Withdrawn(op_id))

    def _append(self, sandbox_id: str, kind: int, payload: Payload) -> None:
        index = self._index(sandbox_id)
        body = _encode(payload)
        head = HEAD.pack(0, len(body), kind)[4:]
        entry = zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little") + head + body
        fd = self._file(sandbox_id)
        try:
            n = os.pwrite(fd, entry, index.size)
        except OSError as e:
            raise DiskFull(f"operation log of {sandbox_id}: {e.strerror}") from e
        if n != len(entry):
            os.ftruncate(fd, index.size)
            raise DiskFull(f"operation log of {sandbox_id}: the disk is full")
        index.add(payload.op_id, index.size)
        index.size += n

    def sync(self, sandbox_id: str) -> None:
        """Make it outlive the power as well. Not called on the ordinary path."""
        if self._path(sandbox_id).exists():
            os.fdatasync(self._file(sandbox_id))

    # --- reading ---

    def find(self, sandbox_id: str, op_id: str) -> Entry | None:
        index = self._indices.get(sandbox_id) or self._index(sandbox_id)
        offsets = index.offsets(op_id)
        if not offsets:
            return None
        fd = self._file(sandbox_id)
        found: Entry | None = None
        for offset in offsets:
            payload, _ = _read(fd, offset)
            if payload is not None and payload.op_id == op_id:
                found = _merge(found, payload)
        return found

    def unfinished(self, sandbox_id: str) -> list[Intent]:
        return [e.intent for e in self.entries(sandbox_id) if e.outcome is None]

    def entries(self, sandbox_id: str) -> list[Entry]:
        """All, in the order of their intents."""
        if not self._path(sandbox_id).exists():
            return []
        self._index(sandbox_id)
        found: dict[str, Entry] = {}
        for _, _, payload in _walk(self._file(sandbox_id)):
            merged = _merge(found.get(payload.op_id), payload)
            if merged is None:
                found.pop(payload.op_id, None)
            else:
                found[payload.op_id] = merged
        return list(found.values())

    def drop(self, sandbox_id: str) -> None:
        if (fd := self._files.pop(sandbox_id, None)) is not None:
            os.close(fd)
        if self._indices.pop(sandbox_id, None) is not None or self._path(sandbox_id).exists():
            self._path(sandbox_id).unlink(missing_ok=True)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        self._indices.clear()

    def _path(self, sandbox_id: str) -> Path:
        return self._directory / f"{sandbox_id}.log"

    def _index(self, sandbox_id: str) -> _Index:
        index = self._indices.get(sandbox_id)
        if index is None:
            index = _Index()
            path = self._path(sandbox_id)
            if path.exists():
                fd = self._file(sandbox_id)
                for offset, index.size, payload in _walk(fd):
                    index.add(payload.op_id, offset)
                os.ftruncate(fd, index.size)
            self._indices[sandbox_id] = index
        return index

    def _file(self, sandbox_id: str) -> int:
        fd = self._files.get(sandbox_id)
        if fd is not None:
            self._files.move_to_end(sandbox_id)
            return fd
        if len(self._files) >= OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        fd = os.open(self._path(sandbox_id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._files[sandbox_id] = fd
        return fd


def _read(fd: int, offset: int) -> tuple[Payload | None, int]:
    """The entry at `offset` and where the next one begins; (None, offset) when it is not whole."""
    head = os.pread(fd, HEAD.size, offset)
    if len(head) < HEAD.size:
        return None, offset
    crc, length, kind = HEAD.unpack(head)
    if length > MAX_ENTRY or kind not in _KINDS:
        return None, offset
    body = os.pread(fd, length, offset + HEAD.size)
    if len(body) < length or zlib.crc32(body, zlib.crc32(head[4:])) != crc:
        return None, offset
    try:
        return _KINDS[kind].decode(body), offset + HEAD.size + length
    except msgspec.DecodeError:
        return None, offset


def _walk(fd: int) -> Iterator[tuple[int, int, Payload]]:
    """(offset, end, payload) of each whole entry, up to the first that is not."""
    at = 0
    while True:
        payload, end = _read(fd, at)
        if payload is None:
            return
        yield at, end, payload
        at = end


def _merge(entry: Entry | None, payload: Payload) -> Entry | None:
    """What is known of an operation after one more of its entries."""
    if isinstance(payload, Intent):
        return Entry(payload, None)
    if isinstance(payload, Outcome) and entry is not None:
        return Entry(entry.intent, payload)
    return None
