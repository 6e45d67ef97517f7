"""The entries of a tar stream, one after the other: ustar, GNU and pax. What is not sound raises BadEntry.

Nothing is sought for and no header is read that is longer than the limit.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

BLOCK: Final = 512
MAX_FILE: Final = 1 << 44
MAX_HEADER: Final = 1 << 20
MAX_TRAILER: Final = 64 << 20
MAX_RUNS: Final = 1 << 20
MAX_GLOBAL: Final = 256
_READ: Final = 1 << 20
_MAX_TIME: Final = 1 << 33
_ZEROS: Final = bytes(BLOCK)
_TIME: Final = re.compile(rb"(-?)(\d{1,30})(?:\.(\d*))?\Z")
_SCHILY: Final = b"SCHILY.xattr."
_LIBARCHIVE: Final = b"LIBARCHIVE.xattr."
FILES: Final = frozenset(b"\x0007S")
_CARRIES: Final = FILES | frozenset(b"xgXLK")
_EXTENDED: Final = frozenset(b"xgXLK")

Records = dict[bytes, bytes]
Run = tuple[int, int]


class BadEntry(Exception):
    """Why an entry is refused."""


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Entry(NamedTuple):
    name: bytes
    type: int
    mode: int
    uid: int
    gid: int
    size: int
    """As it reads, holes and all."""
    stored: int
    """Bytes that follow in the archive."""
    mtime_ns: int
    link: bytes
    device: Run
    pax: Records
    runs: list[Run] | None


class Stream:
    """Read-ahead over a source that cannot seek; `done` counts what was taken from it."""

    def __init__(self, source: Source, progress: Callable[[int], None] | None) -> None:
        self._source = source
        self._progress = progress
        self._data = b""
        self._at = 0
        self.done = 0

    def some(self, size: int) -> bytes:
        """At most that many bytes; none at the end."""
        if self._at == len(self._data):
            self._data, self._at = self._source.read(_READ) or b"", 0
            self.done += len(self._data)
            if self._progress:
                self._progress(self.done)
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def exactly(self, size: int) -> bytes:
        piece = self.some(size)
        while len(piece) < size:
            more = self.some(size - len(piece))
            if not more:
                raise BadEntry("the archive is damaged or cut short here: it ends inside a header")
            piece += more
        return piece

    def skip(self, size: int) -> None:
        while size:
            piece = self.some(size)
            if not piece:
                raise BadEntry("the archive ends inside it: it is cut short")
            size -= len(piece)

    def drain(self) -> None:
        """To the end, so that the checksum of a compressed archive is looked at."""
        rest = 0
        while piece := self.some(_READ):
            rest += len(piece)
            if rest > MAX_TRAILER:
                raise BadEntry("the archive goes on after its end")


class Content:
    """What an entry carries, to be read once."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream = stream
        self.left = size

    def read(self, size: int, /) -> bytes:
        piece = self._stream.some(min(size, self.left))
        if not piece and size and self.left:
            raise BadEntry("the archive ends inside it: it is cut short")
        self.left -= len(piece)
        return piece


class Tar:
    """Iterates over entries. What `content` leaves of one is passed over."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._global: Records = {}
        self.content = Content(stream, 0)
        self._padding = 0
        self.name = b""
        """Of the entry that was read last, or is being read."""

    def __iter__(self) -> Iterator[Entry]:
        pax: Records = {}
        names: dict[int, bytes] = {}
        headers = 0
        while (block := self._stream.exactly(BLOCK)) != _ZEROS:
            _check(block)
            kind = block[156]
            if kind not in _EXTENDED:
                yield self._entry(block, self._global | pax if self._global else pax, names)
                self._pass()
                pax, names, headers = {}, {}, 0
                continue
            headers += 1
            if headers > 16:
                raise BadEntry("more than 16 extended headers before one entry")
            self._extended(block, pax, names)

    def _extended(self, block: bytes, pax: Records, names: dict[int, bytes]) -> None:
        data, kind = self._header(block), block[156]
        if kind in b"LK":
            names[kind] = data.split(b"\0", 1)[0]
        elif kind in b"xX":
            pax.update(records(data))
        else:
            self._global.update(records(data))
            if len(self._global) > MAX_GLOBAL:  # each entry takes them all
                raise BadEntry(f"global headers of more than {MAX_GLOBAL} records")

    def _header(self, block: bytes) -> bytes:
        size = number(block[124:136])
        if not 0 <= size <= MAX_HEADER:
            raise BadEntry(f"an extended header of {size} bytes")
        return self._stream.exactly(size + -size % BLOCK)[:size]

    def _pass(self) -> None:
        self._stream.skip(self.content.left + self._padding)

    def _entry(self, block: bytes, pax: Records, names: dict[int, bytes]) -> Entry:
        kind = block[156]
        stored = _decimal(pax, b"size", MAX_FILE) if pax.get(b"size") else number(block[124:136])
        if not 0 <= stored <= MAX_FILE:
            raise BadEntry(f"a size of {stored} bytes")
        name = pax.get(b"path") or names.get(ord("L")) or _name(block)
        self.name = name
        size, runs = stored, None
        if kind == ord("S"):
            size, runs = number(block[483:495]), self._old_runs(block)
        self._carry(stored if kind in _CARRIES else 0)
        if b"GNU.sparse.major" in pax or b"GNU.sparse.map" in pax or b"GNU.sparse.offsets" in pax:
            name = pax.get(b"GNU.sparse.name") or name
            self.name = name
            size, runs = self._pax_runs(pax)
        if runs is not None:
            runs = _checked(runs, size, self.content.left)
        if kind == 0 and name.endswith(b"/"):
            kind = ord("5")
        return Entry(
            name,
            kind,
            number(block[100:108]) & 0o7777,
            _decimal(pax, b"uid", 1 << 64) if pax.get(b"uid") else number(block[108:116]),
            _decimal(pax, b"gid", 1 << 64) if pax.get(b"gid") else number(block[116:124]),
            size,
            stored,
            _mtime(pax.get(b"mtime") or b"%d" % number(block[136:148])),
            pax.get(b"linkpath") or names.get(ord("K")) or block[157:257].split(b"\0", 1)[0],
            (number(block[329:337]), number(block[337:345])) if kind in b"34" else (0, 0),
            pax,
            runs,
        )

    def _carry(self, stored: int) -> None:
        self.content = Content(self._stream, stored)
        self._padding = -stored % BLOCK

    def _old_runs(self, block: bytes) -> list[Run]:
        runs, more = _pairs(block[386:482]), block[482]
        while more:
            block = self._stream.exactly(BLOCK)
            runs += _pairs(block[:504])
            more = block[504]
            if len(runs) > MAX_RUNS:
                raise BadEntry(f"a map of holes of more than {MAX_RUNS} pieces")
        return runs

    def _pax_runs(self, pax: Records) -> tuple[int, list[Run]]:
        key = b"GNU.sparse.realsize" if pax.get(b"GNU.sparse.realsize") else b"GNU.sparse.size"
        size = _decimal(pax, key, MAX_FILE)
        if pax.get(b"GNU.sparse.major") == b"1":
            return size, self._map_before_data()
        text = pax.get(b"GNU.sparse.map") or pax.get(b"GNU.sparse.offsets") or b""
        numbers = [_digits(part) for part in text.split(b",")] if text else []
        return size, _paired(numbers)

    def _map_before_data(self) -> list[Run]:
        """Format 1.0: decimal lines, padded to a block, count first."""
        lines, rest = self._lines(b"", 1)
        count = _digits(lines[0])
        if count > MAX_RUNS:
            raise BadEntry(f"a map of holes of more than {MAX_RUNS} pieces")
        lines, _ = self._lines(rest, 2 * count)
        return _paired([_digits(line) for line in lines])

    def _lines(self, text: bytes, wanted: int) -> tuple[list[bytes], bytes]:
        parts, found = [text], text.count(b"\n")
        while found < wanted:
            if self.content.left < BLOCK:
                raise BadEntry("a map of holes that does not end")
            block = b""
            while len(block) < BLOCK:
                block += self.content.read(BLOCK - len(block))
            if b"\n" not in block:
                raise BadEntry("a map of holes that is none")
            parts.append(block)
            found += block.count(b"\n")
        lines = b"".join(parts).split(b"\n", wanted)
        return lines[:wanted], lines[wanted]


def _check(block: bytes) -> None:
    wanted = number(block[148:156])
    field = block[148:156]
    if sum(block) - sum(field) + 256 == wanted:
        return
    signed = sum(b - 256 if b > 127 else b for b in block[:148] + block[156:]) + 256
    if signed != wanted:
        raise BadEntry("the archive is damaged or cut short here: a header's checksum is wrong")


def number(field: bytes) -> int:
    """Octal, or base 256 where the first bit is set."""
    if field[0] in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big")
        return value - (1 << 8 * (len(field) - 1)) if field[0] == 0xFF else value
    text = field.split(b"\0", 1)[0].strip(b" ")
    if not text:
        return 0
    try:
        if not text.isdigit():
            raise ValueError
        return int(text, 8)
    except ValueError:
        raise BadEntry("the archive is damaged or cut short here: a header's number is none") from None


def _name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and block[345]:
        end = 476 if block[508:512] == b"tar\0" else 500
        return block[345:end].split(b"\0", 1)[0] + b"/" + name
    return name


def records(data: bytes) -> Records:
    """Of a pax header. The two old forms of a map of holes become one, under `GNU.sparse.offsets`."""
    found: Records = {}
    offsets: list[bytes] = []
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 9)
        size = _digits(data[at:space]) if space > 0 else 0
        end = at + size
        equals = data.find(b"=", space, end)
        if size < 4 or end > len(data) or data[end - 1] != 10 or equals <= space + 1:
            raise BadEntry("the archive is damaged or cut short here: a pax header makes no sense")
        key, value = data[space + 1 : equals], data[equals + 1 : end - 1]
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            offsets.append(value)
        else:
            found[key] = value
        at = end
    if offsets:
        found[b"GNU.sparse.offsets"] = b",".join(offsets)
    return found


def xattrs(pax: Records) -> Records:
    found: Records = {}
    for key, value in pax.items():
        if key.startswith(_LIBARCHIVE):
            try:
                name = unquote_to_bytes(key[len(_LIBARCHIVE) :])
                found.setdefault(name, base64.b64decode(value + b"=" * (-len(value) % 4), validate=True))
            except binascii.Error:
                raise BadEntry("an attribute that is no base 64") from None
        elif key.startswith(_SCHILY):
            found[key[len(_SCHILY) :]] = value
    return found


def _digits(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise BadEntry(f"{text[:30]!r} where a number is to be")
    return int(text)


def _decimal(pax: Records, key: bytes, limit: int) -> int:
    value = _digits(pax.get(key, b""))
    if value > limit:
        raise BadEntry(f"a {key.decode()} of {value}")
    return value


def _mtime(text: bytes) -> int:
    """Nanoseconds, within what file systems hold."""
    match = _TIME.match(text)
    if match is None:
        raise BadEntry("a time that is no number")
    sign, whole, part = match.groups()
    if sign:
        return 0
    ns = int(whole) * 10**9 + int(((part or b"") + b"0" * 9)[:9])
    return min(ns, _MAX_TIME * 10**9)


def _pairs(data: bytes) -> list[Run]:
    runs = []
    for at in range(0, len(data) - 23, 24):
        if not data[at]:
            break
        runs.append((number(data[at : at + 12]), number(data[at + 12 : at + 24])))
    return runs


def _paired(numbers: list[int]) -> list[Run]:
    if len(numbers) % 2 or len(numbers) > 2 * MAX_RUNS:
        raise BadEntry("a map of holes of half a pair, or of too many")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _checked(runs: list[Run], size: int, stored: int) -> list[Run]:
    if not 0 <= size <= MAX_FILE:
        raise BadEntry(f"a size of {size} bytes")
    runs = [run for run in runs if run[1]]
    end = total = 0
    for offset, length in runs:
        if offset < end or length < 0 or offset + length > size:
            raise BadEntry("a map of holes that is out of order or beyond its end")
        end = offset + length
        total += length
    if total > stored:
        raise BadEntry("a map of holes of more data than there is")
    return runs


__all__ = ["FILES", "BadEntry", "Content", "Entry", "Stream", "Tar"]
