"""An aether in Python, without I/O: the protocol of docs/protocol.md for a few commands and a dict of files.

Bytes come in by `received`, leave by the `write` given to `connected`. Operations live on between
connections. Commands, joined by `;` and `&&`: true, false, echo (with >&2 and $NAME), cat [FILE], sleep S,
exit N, yes, cd, pwd, export, count N (N bytes of output), and `kill 1`, which ends the sandbox from inside.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import struct
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dsec.wire import aether as w
from dsec.wire.frames import FrameReader, frame, message

Type = w.Type
_U64: Final = struct.Struct("<Q")
_request = msgspec.msgpack.Decoder(w.AnyRequest | w.Dial)
_attach = msgspec.msgpack.Decoder(w.Attach)
_signal = msgspec.msgpack.Decoder(w.Signal)
_hello = msgspec.msgpack.Decoder(w.Hello)
CHUNK: Final = 32 << 10
HOME: Final = "/root"
ECHO_PORT: Final = 7
"""The one port where something listens: all that comes goes back."""


class Breach(Exception):
    """The edge broke the protocol: the connection is closed."""


class FakeStream:
    """Output that is retained until it is ACKed."""

    __slots__ = ("acked", "data", "ended", "eof_told", "limit", "sent", "total")

    def __init__(self, limit: int) -> None:
        self.data = bytearray()
        """From `acked` on."""
        self.acked = self.sent = self.total = 0
        self.limit = limit
        self.ended = self.eof_told = False

    @property
    def kept(self) -> int:
        return self.acked + len(self.data)

    @property
    def room(self) -> int:
        return w.WINDOW - len(self.data)

    def write(self, data: bytes) -> None:
        self.total += len(data)
        self.data += data[: max(0, self.limit - self.kept)]


class FakeOperation:
    def __init__(self, aether: FakeAether, request: Any) -> None:
        self.aether = aether
        self.request = request
        self.kind = str(request.__struct_config__.tag)
        self.channel = 0
        content = self.kind in ("read_file", "get_tree", "watch", "dial")
        limit = getattr(request, "output_limit", 1 << 62)
        first = w.Stream.CONTENT if content else w.Stream.STDOUT
        self.streams: dict[int, FakeStream] = {}
        if content or self.kind in ("exec", "shell"):
            self.streams[int(first)] = FakeStream(limit)
        if self.kind in ("exec", "shell"):
            self.streams[int(w.Stream.STDERR)] = FakeStream(limit)
        self.taken = 0
        self.input_ended = False
        self.upload = bytearray()
        self.ending: bytes | None = None
        """The frame, without its channel's number, that ends it."""
        self.ending_told = False
        self.started_ns, self.began = time.time_ns(), time.monotonic_ns()
        self.on_input: Callable[[bytes], None] | None = None
        self.on_input_end: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.timers: list[asyncio.TimerHandle] = []

    # --- output ---

    def out(self, data: bytes, stream: int = w.Stream.STDOUT) -> None:
        self.streams[int(stream)].write(data)

    def flush(self) -> None:
        """Tell the edge what it does not know and may hear."""
        if not self.channel:
            return
        for number, s in self.streams.items():
            while s.sent < s.kept and s.sent - s.acked < w.WINDOW:
                at = s.sent - s.acked
                part = bytes(s.data[at : at + CHUNK])
                self.aether.say(frame(self.channel, Type.DATA, part, number))
                s.sent += len(part)
            if s.ended and s.sent == s.kept and not s.eof_told:
                s.eof_told = True
                self.aether.say(frame(self.channel, Type.EOF, b"", number))
        if (
            self.ending is not None
            and not self.ending_told
            and all(s.eof_told for s in self.streams.values())
        ):
            self.ending_told = True
            type_ = self.ending[0]
            self.aether.say(frame(self.channel, type_, self.ending[1:]))

    def end(self, type: int, body: Any) -> None:
        if self.ending is not None:
            return
        for timer in self.timers:
            timer.cancel()
        self.on_room = self.on_input = self.on_input_end = None
        for s in self.streams.values():
            s.ended = True
        self.ending = bytes([type]) + msgspec.msgpack.encode(body)
        self.flush()

    def fail(self, code: str, text: str) -> None:
        self.end(Type.ERROR, w.Failure(code, text, 0))

    def done(self, result: Any) -> None:
        self.end(Type.RESULT, result)

    def exited(self, code: int = 0, reason: str = "exited", signal: int = 0) -> None:
        out, err = (self.streams[int(s)] for s in (w.Stream.STDOUT, w.Stream.STDERR))
        session = self.aether.sessions.get(getattr(self.request, "session", ""))
        self.done(
            w.Ended(
                reason=reason,
                exit_code=code if reason in ("exited", "shell_ended") else -1,
                signal=signal,
                stdout_total=out.total,
                stderr_total=err.total,
                stdout_kept=out.kept,
                stderr_kept=err.kept,
                started_ns=self.started_ns,
                duration_ns=time.monotonic_ns() - self.began,
                cpu_user_us=0,
                cpu_system_us=0,
                max_rss_kib=0,
                oom_kills=0,
                session_replaced=False,
                cwd=session.cwd if session and self.kind == "shell" else "",
            )
        )

    def kill(self, signal: int, reason: str = "killed") -> None:
        if self.kind in ("exec", "shell"):
            self.exited(-1, reason, signal)
        elif self.kind == "watch":
            self.done(w.Done(True))
        else:
            self.fail("cancelled", "ended by a signal")

    # --- frames ---

    def acked(self, stream: int, offset: int) -> None:
        s = self.streams.get(stream)
        if s is None or not s.acked <= offset <= s.sent:
            raise Breach("ACK of what was not sent")
        del s.data[: offset - s.acked]
        s.acked = offset
        if self.on_room is not None:
            self.on_room()
        self.flush()

    def input(self, data: bytes) -> None:
        if self.input_ended:
            raise Breach("DATA after EOF")
        self.taken += len(data)
        if self.on_input is not None:
            self.on_input(data)
        self.aether.say(frame(self.channel, Type.ACK, _U64.pack(self.taken), w.Stream.STDIN))
        self.flush()

    def end_input(self) -> None:
        if not self.input_ended:
            self.input_ended = True
            if self.on_input_end is not None:
                self.on_input_end()

    def rebind(self, channel: int, offsets: dict[int, int] | None) -> None:
        """On a new channel, from what was ACKed or from given offsets. Raises ValueError for one below."""
        for number, s in self.streams.items():
            at = s.acked if offsets is None else offsets.get(number, s.acked)
            if not s.acked <= at <= s.kept:
                raise ValueError(f"offset {at} of stream {number}: {s.acked} to {s.kept} are there")
            s.sent, s.eof_told = at, False
        self.channel, self.ending_told = channel, False
        self.aether.say(message(channel, Type.STARTED, w.Started(1, True)))
        if self.kind in ("exec", "shell", "write_file", "put_tree"):
            self.aether.say(frame(channel, Type.ACK, _U64.pack(self.taken), w.Stream.STDIN))
        self.flush()


class FakeSession:
    def __init__(self) -> None:
        self.cwd = HOME
        self.env: dict[str, str] = {}


class FakeAether:
    __slots__ = (
        "_channels",
        "_close",
        "_files",
        "_operations",
        "_reader",
        "_sessions",
        "_write",
        "corrupt",
        "dead",
        "environment",
        "instance",
        "no_hello",
        "on_exit",
        "sandbox_id",
        "silent",
        "wrong_hello",
    )

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.instance = os.urandom(16)
        self.environment: dict[str, str] = {}
        self._reader: FrameReader | None = None
        self._write: Callable[[bytes], None] | None = None
        self._close: Callable[[], None] | None = None
        self._channels: dict[int, FakeOperation] | None = None
        self._operations: dict[str, FakeOperation] | None = None
        self._sessions: dict[str, FakeSession] | None = None
        self._files: dict[str, bytes | None] | None = None
        self.on_exit: Callable[[int], None] = lambda code: None
        self.silent = self.corrupt = self.no_hello = self.wrong_hello = False
        self.dead = False

    # What only a used sandbox has:

    @property
    def operations(self) -> dict[str, FakeOperation]:
        if self._operations is None:
            self._operations = {}
        return self._operations

    @property
    def sessions(self) -> dict[str, FakeSession]:
        if self._sessions is None:
            self._sessions = {}
        return self._sessions

    @property
    def files(self) -> dict[str, bytes | None]:
        """Path to content; None is a directory."""
        if self._files is None:
            self._files = {"/": None, "/etc": None, HOME: None, "/tmp": None, "/etc/hostname": b"fake\n"}
        return self._files

    # --- connection ---

    def connected(self, write: Callable[[bytes], None], close: Callable[[], None]) -> None:
        """A new connection; the one before has been closed."""
        self._write, self._close = write, close
        self._reader, self._channels = FrameReader(), None
        for operation in (self._operations or {}).values():
            operation.channel = 0
        if self.no_hello:
            return
        version = 99 if self.wrong_hello else w.VERSION
        self.say(message(0, Type.HELLO, w.Hello(version, version, self.sandbox_id, self.instance, [])))

    def disconnected(self) -> None:
        self._write = self._close = self._reader = self._channels = None
        for operation in (self._operations or {}).values():
            operation.channel = 0

    def say(self, data: bytes) -> None:
        if self._write is not None and not self.dead:
            self._write(data)

    def die(self) -> None:
        self.dead = True
        for operation in (self._operations or {}).values():
            for timer in operation.timers:
                timer.cancel()

    def received(self, data: bytes) -> None:
        if self._reader is None or self.silent or self.dead:
            return
        for channel, type_, flags, payload in self._reader.feed(data):
            if self._reader is None:
                return
            try:
                self._frame(channel, type_, flags, payload)
            except (Breach, msgspec.DecodeError, ValueError, struct.error):
                if self._close is not None:
                    self._close()
                return

    def _frame(self, channel: int, type_: int, flags: int, payload: bytes) -> None:
        if self.corrupt and type_ == Type.START:
            self.say(b"\xff" * 64)
        elif channel == 0:
            self._control(type_, payload)
        elif type_ == Type.START:
            self._start(channel, _request.decode(payload))
        elif type_ == Type.ATTACH:
            self._attach(channel, _attach.decode(payload))
        else:
            operation = (self._channels or {}).get(channel)
            if operation is None:
                raise Breach(f"channel {channel} is not open")
            self._on_channel(operation, type_, flags, payload)

    def _on_channel(self, operation: FakeOperation, type_: int, flags: int, payload: bytes) -> None:
        if type_ == Type.DATA:
            operation.input(payload)
        elif type_ == Type.EOF:
            operation.end_input()
        elif type_ == Type.ACK:
            operation.acked(flags, _U64.unpack(payload)[0])
        elif type_ == Type.SIGNAL:
            operation.kill(_signal.decode(payload).signal)
        elif type_ == Type.FORGET:
            self._forget(operation)
        elif type_ != Type.RESIZE:
            raise Breach(f"a frame of type {type_}")

    def _forget(self, operation: FakeOperation) -> None:
        if operation.ending is None:
            raise Breach("FORGET of a running operation")
        assert self._channels is not None
        del self._channels[operation.channel]
        self.operations.pop(operation.request.op_id, None)

    def _control(self, type_: int, payload: bytes) -> None:
        if type_ == Type.HELLO:
            _hello.decode(payload)
        elif type_ == Type.PING:
            self.say(frame(0, Type.PONG, payload))
        elif type_ == Type.LIST:
            known = [
                w.Known(
                    o.request.op_id,
                    o.kind,
                    "running" if o.ending is None else "ended",
                    getattr(o.request, "session", ""),
                    1,
                )
                for o in (self._operations or {}).values()
            ]
            self.say(message(0, Type.OPERATIONS, known))
        else:
            raise Breach(f"a frame of type {type_} on channel 0")

    def _bind(self, channel: int, operation: FakeOperation) -> None:
        if self._channels is None:
            self._channels = {}
        if channel in self._channels:
            raise Breach("a channel is used twice")
        self._channels[channel] = operation

    def _start(self, channel: int, request: Any) -> None:
        known = self.operations.get(request.op_id)
        if known is not None:
            self._bind(channel, known)
            known.rebind(channel, None)
            return
        operation = FakeOperation(self, request)
        self._bind(channel, operation)
        self.operations[request.op_id] = operation
        operation.channel = channel
        if isinstance(request, w.Dial) and request.port != ECHO_PORT:
            operation.streams.clear()
            operation.fail("port_refused", f"port {request.port} inside: Connection refused")
            return
        self.say(message(channel, Type.STARTED, w.Started(2, False)))
        from dsec.backends.fake_programs import begin

        begin(self, operation)
        operation.flush()

    def _attach(self, channel: int, attach: w.Attach) -> None:
        operation = self.operations.get(attach.op_id)
        if operation is None:
            self.say(message(channel, Type.ERROR, w.Failure("operation_not_found", "it is not known", 0)))
            return
        self._bind(channel, operation)
        out, err, content = w.Stream.STDOUT, w.Stream.STDERR, w.Stream.CONTENT
        operation.rebind(channel, {out: attach.stdout, err: attach.stderr, content: attach.stdout})

    def path(self, path: bytes) -> str:
        return posixpath.normpath("/" + path.decode(errors="surrogateescape").lstrip("/"))
