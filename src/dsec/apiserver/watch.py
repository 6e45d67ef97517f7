"""The content of a watch: msgpack arrays [event, path], cut from the stream as they come whole."""

from __future__ import annotations

from typing import Final

from dsec.core.errors import ProtocolError

MAX_ITEM: Final = 64 << 10
_WIDTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Of the length that follows: bin 8, 16, 32, str 8, 16, 32."""


class WatchReader:
    """From inside the sandbox, so hostile. Raises ProtocolError."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        data = self._held + data
        at, out = 0, []
        while (item := _item(data, at)) is not None:
            event, path, at = item
            out.append((event.decode(errors="replace"), path))
        self._held = data[at:]
        if len(self._held) > MAX_ITEM:
            raise ProtocolError("a watch event that does not end")
        return out


def _item(data: bytes, at: int) -> tuple[bytes, bytes, int] | None:
    if at >= len(data):
        return None
    if data[at] != 0x92:
        raise ProtocolError("a watch event that is no pair")
    event = _bytes(data, at + 1)
    path = _bytes(data, event[1]) if event else None
    return (event[0], path[0], path[1]) if event and path else None


def _bytes(data: bytes, at: int) -> tuple[bytes, int] | None:
    """A string or binary: its bytes, and where it ends. None: not all here yet."""
    if at >= len(data):
        return None
    kind = data[at]
    if 0xA0 <= kind <= 0xBF:
        start, size = at + 1, kind & 0x1F
    elif kind in _WIDTHS:
        width = _WIDTHS[kind]
        start, size = at + 1 + width, int.from_bytes(data[at + 1 : at + 1 + width], "big")
        if len(data) < start:
            return None
    else:
        raise ProtocolError("a watch event that is no pair of strings")
    return (data[start : start + size], start + size) if len(data) >= start + size else None
