"""A connection to a TCP port inside a sandbox, carried over its channel with aether.

It lives as long as the stream of its caller: neither logged nor taken up again by a later edge, which lets
aether drop what it finds. Bytes are acknowledged as the caller takes them, so a slow reader stops the sender.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

import msgspec

from dsec.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DSecError,
    InvalidArgument,
    PortRefused,
    PortReset,
    ProtocolError,
    TooManyOperations,
    Unavailable,
)
from dsec.core.ids import new_operation_id
from dsec.edge.aether import AetherConnection, decode, failure_of
from dsec.edge.operation import CONTENT, STDIN
from dsec.edge.output import Input
from dsec.edge.sandbox import Sandbox
from dsec.wire import aether as w
from dsec.wire import edge as m
from dsec.wire.bus import Stream
from dsec.wire.frames import frame, message

Type = w.Type
CHUNK: Final = 128 << 10
FIRST_PAUSE_S: Final = 0.02
MAX_PAUSE_S: Final = 0.25
MAX_WAIT_S: Final = 600.0
MAX_TIMEOUT_S: Final = 120.0
SAYABLE: Final = (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    PortRefused,
    PortReset,
    TooManyOperations,
    Unavailable,
)
"""Errors that a sandbox can make a caller's; another one could pass for the server's own word."""
_U64: Final = struct.Struct("<Q")
_started = msgspec.msgpack.Decoder(w.Started)
_done = msgspec.msgpack.Decoder(w.Done)
_encode = msgspec.msgpack.Encoder().encode


def check(msg: m.DialPort) -> None:
    """Raises InvalidArgument. What a loopback address is, aether decides: it alone connects."""
    if not 1 <= msg.port <= 65535:
        raise InvalidArgument(f"port {msg.port}: not in 1..65535")
    if len(msg.address) > 45:
        raise InvalidArgument("address: a loopback address, such as 127.0.0.1 or ::1")
    if not 0 <= msg.wait_s <= MAX_WAIT_S:
        raise InvalidArgument(f"wait: not in 0..{MAX_WAIT_S:g} s")
    if not 0 < msg.timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"timeout: not in 0..{MAX_TIMEOUT_S:g} s")


async def dial(sandbox: Sandbox, msg: m.DialPort, limit: int) -> Dial:
    """A connection that stands, one of `limit` of the sandbox; a port where nothing listens is tried again for `wait_s`.

    Raises PortRefused, DeadlineExceeded, Unavailable (no connection with the sandbox), TooManyOperations.
    """
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + msg.wait_s, FIRST_PAUSE_S
    while True:
        made = Dial(sandbox)
        try:
            await made.open(msg, limit)
            return made
        except PortRefused:
            if loop.time() + pause > until:
                raise
        except BaseException:
            made.abandon()
            raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


class Dial:
    """Bound to a channel until aether has said its end."""

    __slots__ = (
        "_acked",
        "_changed",
        "_channel",
        "_chunks",
        "_connection",
        "_eof",
        "_error",
        "_held",
        "_input",
        "_left",
        "_open",
        "_over",
        "_passed",
        "_received",
        "_sandbox",
    )

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._connection: AetherConnection | None = None
        self._channel = 0
        self._open = self._eof = self._over = self._left = False
        """It stands; no more comes from the port; aether has said its end; nobody wants it any more."""
        self._error: DSecError | None = None
        self._chunks: list[bytes] = []
        self._held = self._received = self._passed = self._acked = 0
        self._input = Input()
        self._changed: list[asyncio.Future[None]] = []

    async def open(self, msg: m.DialPort, limit: int) -> None:
        connection = self._sandbox.connection
        if connection is None:
            raise Unavailable(f"{self._sandbox.id} is being connected again")
        request = w.Dial(new_operation_id(), msg.address, msg.port, max(1, int(msg.timeout_s * 1000)))
        self._sandbox.dialled(self, limit)
        self._connection = connection
        self._channel = connection.start(self, _encode(request))
        while not self._open and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error

    async def run(self, stream: Stream) -> None:
        """Carry bytes until both ways have ended or the caller has gone. Raises PortReset, Unavailable."""
        incoming = asyncio.ensure_future(self._incoming(stream))
        outgoing = asyncio.ensure_future(self._outgoing(stream))
        try:
            await stream.send(m.Dialed())
            await asyncio.wait({incoming, outgoing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (incoming, outgoing):
                if task.done():
                    task.result()
        finally:
            incoming.cancel()
            outgoing.cancel()
            await asyncio.gather(incoming, outgoing, return_exceptions=True)
            self.abandon()

    async def _outgoing(self, stream: Stream) -> None:
        """Until aether has said the end."""
        told = False
        while True:
            if self._chunks:
                offset, data = self._passed, self._take()
                await stream.send(m.Output(CONTENT, offset, data))
                self._acknowledge()
            elif self._error is not None:
                raise self._error
            elif self._eof and not told:
                told = True
                await stream.send(m.OutputEnd(CONTENT))
            elif self._over:
                return
            else:
                await self._change()

    async def _incoming(self, stream: Stream) -> None:
        """Until the caller has gone."""
        async for sent in stream:
            match sent:
                case m.Input(data) if not self._input.eof:
                    self._input.put(data)
                    self._pump()
                    while self._input.full and not self._over:
                        await self._change()
                case m.InputEnd():
                    self._input.eof = True
                    self._pump()
                case _:
                    raise InvalidArgument("a frame that does not go this way")

    def _take(self) -> bytes:
        parts, size = [], 0
        while self._chunks and size < CHUNK:
            parts.append(self._chunks.pop(0))
            size += len(parts[-1])
        self._passed += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _acknowledge(self) -> None:
        if self._passed - self._acked >= w.WINDOW // 4:
            self._acked = self._passed
            self._send(frame(self._channel, Type.ACK, _U64.pack(self._acked), CONTENT))

    def _pump(self) -> None:
        if self._over:
            return
        for chunk in self._input.sendable():
            self._send(frame(self._channel, Type.DATA, chunk, STDIN))
        if self._input.eof and not self._input.eof_sent and not self._input.full:
            self._input.eof_sent = True
            self._send(frame(self._channel, Type.EOF, b"", STDIN))

    def _send(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.send(data)

    # --- its end ---

    def abandon(self) -> None:
        """Nobody wants it any more. Idempotent."""
        if self._left:
            return
        self._left = True
        self._chunks.clear()
        if not self._over:
            self._send(message(self._channel, Type.SIGNAL, w.Signal(9, True)))

    def lost(self, error: DSecError) -> None:
        """The connection with the sandbox has ended, and this one with it."""
        self._finish(error)

    def _finish(self, error: DSecError | None) -> None:
        if self._over:
            return
        self._over, self._error, self._connection = True, error, None
        self._sandbox.hung_up(self)
        self._wake()

    # --- frames ---

    def frame(self, type: int, flags: int, payload: bytes) -> None:
        connection = self._connection
        if connection is None:
            raise ProtocolError("a frame after the end of a connection to a port")
        if type == Type.STARTED:
            self._on_started(connection, payload)
        elif type == Type.DATA:
            self._on_data(flags, payload)
        elif type == Type.EOF:
            if flags != CONTENT or self._eof or not self._open:
                raise ProtocolError("EOF twice, before STARTED, or on a stream that is not there")
            self._eof = True
        elif type == Type.ACK:
            if len(payload) != 8 or not self._input.acknowledge(_U64.unpack(payload)[0]):
                raise ProtocolError("an ACK of what was not sent")
            self._pump()
        elif type == Type.RESULT:
            decode(_done, payload)
            self._answered(connection)
            connection.forget(self._channel)
            self._eof = True
            self._finish(None)
        elif type == Type.ERROR:
            error = failure_of(payload)
            if not isinstance(error, SAYABLE):
                error = PortReset(f"the sandbox reports {error.message}")
            self._answered(connection)
            connection.forget(self._channel)
            self._finish(error)
        else:
            raise ProtocolError(f"a frame of type {type} on the channel of a port")
        self._wake()

    def _on_started(self, connection: AetherConnection, payload: bytes) -> None:
        started: w.Started = decode(_started, payload)
        if self._open or started.known:
            raise ProtocolError("STARTED twice")
        self._answered(connection)

    def _answered(self, connection: AetherConnection) -> None:
        if not self._open:
            self._open = True
            connection.answered()

    def _on_data(self, stream: int, data: bytes) -> None:
        if stream != CONTENT or not self._open or self._eof:
            raise ProtocolError("DATA before STARTED, after EOF, or on a stream that is not there")
        self._received += len(data)
        if self._received - self._acked > w.WINDOW:
            raise ProtocolError("more bytes from a port than the window allows")
        if not self._left:
            self._chunks.append(data)

    # --- waiting ---

    async def _change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.append(future)
        await future

    def _wake(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)
