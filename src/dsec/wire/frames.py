"""Frames cut from a byte stream, and put on one. No I/O; no buffer is held between whole frames."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dsec.core.errors import ProtocolError
from dsec.wire.aether import HEADER, MAX_PAYLOAD

HEADER_SIZE: Final = HEADER.size
Frame = tuple[int, int, int, bytes]
"""channel, type, flags, payload"""

_pack = HEADER.pack
_unpack = HEADER.unpack_from
_encode = msgspec.msgpack.Encoder().encode


def frame(channel: int, type: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return _pack(len(payload), channel, type, flags, 0) + payload


def message(channel: int, type: int, body: Any) -> bytes:
    """A frame whose payload is `body` in msgpack. Raises ValueError when it is too large for one."""
    payload = _encode(body)
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a frame of {len(payload)} bytes; at most {MAX_PAYLOAD}")
    return _pack(len(payload), channel, type, 0, 0) + payload


class FrameReader:
    """What was received goes in, whole frames come out. The part of a frame is kept till its rest comes."""

    __slots__ = ("_need", "_part")

    def __init__(self) -> None:
        self._part: bytearray | None = None
        self._need = 0
        """Bytes that `_part` must reach before it is looked at again."""

    def feed(self, data: bytes) -> list[Frame]:
        """Raises ProtocolError for a frame over the limit or with bits set that mean nothing."""
        part = self._part
        if part is not None:
            part += data
            if len(part) < self._need:
                return []
            data, self._part = bytes(part), None
        frames: list[Frame] = []
        at, end = 0, len(data)
        while end - at >= HEADER_SIZE:
            length, channel, type_, flags, zero = _unpack(data, at)
            if length > MAX_PAYLOAD:
                raise ProtocolError(f"a frame of {length} bytes; at most {MAX_PAYLOAD}")
            if zero:
                raise ProtocolError("a frame header whose reserved bits are set")
            stop = at + HEADER_SIZE + length
            if stop > end:
                self._hold(data, at, HEADER_SIZE + length)
                return frames
            frames.append((channel, type_, flags, data[at + HEADER_SIZE : stop]))
            at = stop
        if at < end:
            self._hold(data, at, HEADER_SIZE)
        return frames

    def _hold(self, data: bytes, at: int, need: int) -> None:
        self._part, self._need = bytearray(data[at:] if at else data), need
