"""The edge's side of the protocol with aether: one connection of one sandbox.

Everything that arrives is hostile. A breach is a ProtocolError, which ends the connection and nothing else:
who owns the connection decides what follows. While idle it holds its transport and a handful of slots.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import msgspec

from dsec.core.errors import AetherLost, DSecError, ProtocolError, from_code
from dsec.wire import aether as w
from dsec.wire.frames import FrameReader, frame, message
from dsec.wire.transport import connect

log = logging.getLogger(__name__)
Type = w.Type

_hello = msgspec.msgpack.Decoder(w.Hello)
_failure = msgspec.msgpack.Decoder(w.Failure)
_event = msgspec.msgpack.Decoder(w.Event)
_known = msgspec.msgpack.Decoder(list[w.Known])
OUR_HELLO: Final = message(0, Type.HELLO, w.Hello(w.VERSION, w.VERSION, "", b"", []))
MAX_TEXT: Final = 4096
MAX_EVENTS: Final = 1000


class Channel(Protocol):
    """What a channel is bound to. A method raises ProtocolError for a frame that cannot be."""

    def frame(self, type: int, flags: int, payload: bytes) -> None: ...


class Owner(Protocol):
    def connection_ended(self, connection: AetherConnection, error: DSecError) -> None:
        """Called once, after HELLO was seen. What was on its channels is to be attached again."""

    def event(self, event: w.Event) -> None: ...


def decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    """Raises ProtocolError for anything that is not exactly what the decoder is for."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise ProtocolError(f"a message that can't be read: {str(e)[:200]}") from None


def failure_of(payload: bytes) -> DSecError:
    """The error that aether reports. Its text is the sandbox's: cut, and never more than text."""
    f: w.Failure = decode(_failure, payload)
    return from_code(f.code[:64], f.message[:MAX_TEXT], **({"errno": f.errno} if f.errno else {}))


class Watchdog:
    """Finds connections whose aether owes an answer for too long, and asks whether it lives.

    One timer, only while there are any.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._owing: set[AetherConnection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: AetherConnection) -> None:
        self._owing.add(connection)
        if self._timer is None:
            self._arm()

    def unwatch(self, connection: AetherConnection) -> None:
        self._owing.discard(connection)

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.deadline_s / 4, self._look)

    def _look(self) -> None:
        self._timer = None
        late = asyncio.get_running_loop().time() - self.deadline_s
        for connection in [c for c in self._owing if c.owing_since < late]:
            connection.probe()
        if self._owing:
            self._arm()

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()


class AetherConnection(asyncio.Protocol):
    __slots__ = (
        "_channels",
        "_error",
        "_events",
        "_events_since",
        "_hello",
        "_lists",
        "_next",
        "_owed",
        "_owner",
        "_probed",
        "_reader",
        "_transport",
        "_watchdog",
        "_write",
        "hello",
        "owing_since",
        "since",
    )

    def __init__(self, owner: Owner, watchdog: Watchdog) -> None:
        self._owner = owner
        self._watchdog = watchdog
        self._reader = FrameReader()
        self._channels: dict[int, Channel] = {}
        self._next = 1
        self._transport: asyncio.Transport | None = None
        self._write: Callable[[bytes], None] = _nowhere
        self._hello: asyncio.Future[w.Hello] | None = None
        self._lists: list[asyncio.Future[list[w.Known]]] | None = None
        self._error: DSecError | None = None
        self._events = 0
        self._events_since = 0.0
        self._owed = 0
        """Answers that aether owes: to START, ATTACH and LIST."""
        self._probed = False
        """A PING is on its way."""
        self.owing_since = 0.0
        self.since = 0.0
        """When HELLO was seen, on the loop's clock."""
        self.hello: w.Hello | None = None

    @classmethod
    async def open(
        cls, sock: socket.socket, owner: Owner, watchdog: Watchdog, *, deadline_s: float
    ) -> AetherConnection:
        """Over a connected, non-blocking socket, which it takes. Returns after both HELLOs.

        Raises ProtocolError, AetherLost (no HELLO by the deadline, or closed), or the error that aether
        reports.
        """
        loop = asyncio.get_running_loop()
        self = cls(owner, watchdog)
        hello = self._hello = loop.create_future()
        try:
            await _connect(self, sock)
        except (OSError, RuntimeError) as e:
            raise AetherLost(f"the sandbox closed its connection at once: {e}") from e
        self._write(OUR_HELLO)
        timer = loop.call_later(
            deadline_s, self.drop, AetherLost(f"no HELLO from the sandbox for {deadline_s:.0f} s")
        )
        try:
            answer = await hello
            if self._error is not None:
                raise self._error
        except BaseException:
            self.drop(AetherLost("given up before HELLO"))
            raise
        finally:
            timer.cancel()
            self._hello = None
        self.hello, self.since = answer, loop.time()
        return self

    # --- towards aether ---

    def start(self, channel: Channel, request: bytes) -> int:
        """Send a START whose payload is `request`; the number of its channel."""
        number = self._bind(channel)
        self._owe()
        self._write(frame(number, Type.START, request))
        return number

    def attach(self, channel: Channel, attach: w.Attach) -> int:
        number = self._bind(channel)
        self._owe()
        self._write(message(number, Type.ATTACH, attach))
        return number

    def send(self, data: bytes) -> None:
        """Whole frames."""
        self._write(data)

    def forget(self, number: int) -> None:
        """Drop the channel here and the operation there."""
        self._channels.pop(number, None)
        self._write(frame(number, Type.FORGET))

    def answered(self) -> None:
        """A channel has had the first answer to its START or ATTACH."""
        self._owed -= 1
        if self._owed > 0:
            self.owing_since = asyncio.get_running_loop().time()
        else:
            self._watchdog.unwatch(self)

    async def list(self) -> list[w.Known]:
        """What aether knows: running, and ended but not forgotten."""
        future: asyncio.Future[list[w.Known]] = asyncio.get_running_loop().create_future()
        if self._error is not None:
            raise self._error
        if self._lists is None:
            self._lists = []
        self._lists.append(future)
        self._owe()
        self._write(frame(0, Type.LIST))
        return await future

    def probe(self) -> None:
        """An answer is late: PING, and if there is no PONG by the next time, give it up."""
        if self._probed:
            self.drop(AetherLost(f"no answer from the sandbox for {2 * self._watchdog.deadline_s:g} s"))
            return
        self._probed = True
        self.owing_since = asyncio.get_running_loop().time()
        self._write(frame(0, Type.PING))

    def drop(self, error: DSecError) -> None:
        """End the connection because of `error`. Idempotent."""
        if self._error is None:
            self._error = error
            if self._transport is not None:
                self._transport.abort()

    def close(self) -> None:
        """End it without telling the owner."""
        self._owner = _NOBODY
        self.drop(AetherLost("the connection was closed"))

    @property
    def open_channels(self) -> int:
        return len(self._channels)

    def _bind(self, channel: Channel) -> int:
        number = self._next
        self._next = number + 1 if number < 0xFFFFFFFE else 1
        while self._next in self._channels:
            self._next += 1
        self._channels[number] = channel
        return number

    def _owe(self) -> None:
        if self._owed == 0:
            self.owing_since = asyncio.get_running_loop().time()
            self._watchdog.watch(self)
        self._owed += 1

    # --- from aether ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._write = self._transport.write

    def data_received(self, data: bytes) -> None:
        try:
            for number, type_, flags, payload in self._reader.feed(data):
                if number:
                    channel = self._channels.get(number)
                    if channel is None:
                        self._stray(number, type_)
                    else:
                        channel.frame(type_, flags, payload)
                else:
                    self._control(type_, payload)
                if self._error is not None:
                    return
        except ProtocolError as e:
            self.drop(e)
        except Exception:
            log.exception("a frame from a sandbox could not be handled")
            self.drop(ProtocolError("a frame could not be handled"))

    def _stray(self, number: int, type_: int) -> None:
        """A channel that was forgotten may still have an ACK or an ERROR on its way; nothing else."""
        if number >= self._next or type_ not in (Type.ACK, Type.ERROR):
            raise ProtocolError(f"a frame of type {type_} on channel {number}, which is not open")

    def _control(self, type_: int, payload: bytes) -> None:
        waiter = self._hello
        if waiter is not None and not waiter.done():
            self._first(waiter, type_, payload)
        elif type_ == Type.EVENT:
            self._count_event()
            self._owner.event(decode(_event, payload))
        elif type_ == Type.OPERATIONS:
            if not self._lists:
                raise ProtocolError("OPERATIONS that was not asked for")
            future = self._lists.pop(0)
            self.answered()
            if not future.done():
                future.set_result(decode(_known, payload))
        elif type_ == Type.ERROR:
            raise ProtocolError(f"the sandbox reports {failure_of(payload).message[:200]}")
        elif type_ == Type.PONG and self._probed:
            self._probed = False
            self.owing_since = asyncio.get_running_loop().time()
        else:
            raise ProtocolError(f"a frame of type {type_} on channel 0")

    def _count_event(self) -> None:
        """Nobody asks for events, so their rate has a bound of its own."""
        now = asyncio.get_running_loop().time()
        if now - self._events_since > 1:
            self._events_since, self._events = now, 0
        self._events += 1
        if self._events > MAX_EVENTS:
            raise ProtocolError(f"more than {MAX_EVENTS} events in a second")

    def _first(self, waiter: asyncio.Future[w.Hello], type_: int, payload: bytes) -> None:
        if type_ == Type.ERROR:
            self.drop(failure_of(payload))
            return
        if type_ != Type.HELLO:
            raise ProtocolError(f"a frame of type {type_} before HELLO")
        hello: w.Hello = decode(_hello, payload)
        if hello.oldest > w.VERSION or hello.version < hello.oldest:
            raise ProtocolError(f"version_mismatch: aether speaks {hello.oldest} to {hello.version}")
        if len(hello.instance) != 16:
            raise ProtocolError("an instance that is not 16 bytes")
        waiter.set_result(hello)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._error is None:
            self._error = AetherLost("the sandbox closed its connection" + (f": {exc}" if exc else ""))
        self._write = _nowhere
        self._transport = None
        self._watchdog.unwatch(self)
        for future in self._lists or ():
            if not future.done():
                future.set_exception(self._error)
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(self._error)
        owner, self._owner, self._channels = self._owner, _NOBODY, {}
        if self.hello is not None:
            owner.connection_ended(self, self._error)


def _nowhere(data: bytes) -> None:
    """What is written after the end; the operations are attached again on the next connection."""


class _Nobody:
    def connection_ended(self, connection: AetherConnection, error: DSecError) -> None:
        pass

    def event(self, event: w.Event) -> None:
        pass


_NOBODY: Final = _Nobody()


async def _connect(protocol: AetherConnection, sock: Any) -> None:
    if isinstance(sock, socket.socket):
        await connect(protocol, sock)
    else:
        sock.open_transport(protocol)  # memory-only, of backends/fake.py
