"""The first frame of a new aether: HELLO, or what went wrong inside."""

from __future__ import annotations

import socket
from typing import Final

import msgspec

from dsec.core.errors import LaunchFailed
from dsec.wire.aether import HEADER, MAX_PAYLOAD, Failure, Type

READY_LIMIT_S: Final = 30.0


def await_hello(control: socket.socket) -> None:
    """Leaves the HELLO to be read. An ERROR says which step failed."""
    try:
        head = control.recv(HEADER.size, socket.MSG_PEEK | socket.MSG_WAITALL)
    except TimeoutError:
        raise LaunchFailed(f"aether did not enter the sandbox within {READY_LIMIT_S:.0f} s") from None
    if len(head) < HEADER.size:
        raise LaunchFailed("aether ended before it had entered the sandbox")
    length, _, kind, _, _ = HEADER.unpack(head)
    if kind == Type.HELLO:
        return
    if kind != Type.ERROR or length > MAX_PAYLOAD:
        raise LaunchFailed(f"aether began with a frame of type {kind}")
    body = control.recv(HEADER.size + length, socket.MSG_WAITALL)[HEADER.size :]
    failure = msgspec.msgpack.decode(body, type=Failure)
    raise LaunchFailed(failure.message, errno=failure.errno)
