"""One operation of a sandbox, from its intent to its recorded outcome."""

from __future__ import annotations

import asyncio
import signal
import struct
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from dsec.core.errors import (
    DiskFull,
    DSecError,
    InvalidArgument,
    OutcomeUnknown,
    PayloadTooLarge,
    ProtocolError,
)
from dsec.edge.aether import AetherConnection, decode, failure_of
from dsec.edge.output import Input, Output
from dsec.wire import aether as w
from dsec.wire.frames import frame, message

if TYPE_CHECKING:
    from dsec.edge.oplog import Intent

Type = w.Type
STDIN: Final = int(w.Stream.STDIN)
STDOUT: Final = int(w.Stream.STDOUT)
STDERR: Final = int(w.Stream.STDERR)
CONTENT: Final = int(w.Stream.CONTENT)
_U64: Final = struct.Struct("<Q")
_started = msgspec.msgpack.Decoder(w.Started)
RESULTS: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {
    str(request.__struct_config__.tag): msgspec.msgpack.Decoder(result)
    for request, result in w.RESULT_OF.items()
}
COMMANDS: Final = frozenset({"exec", "shell"})
CONTENTS: Final = frozenset({"read_file", "get_tree", "watch"})
"""Kinds whose output is CONTENT."""
UPLOADS: Final = frozenset({"write_file", "put_tree"})


OperationState = Literal["running", "ended", "outcome_unknown"]


class Host(Protocol):
    """What the operations of all sandboxes share."""

    def ended(self, operation: Operation) -> bool:
        """Record the outcome. False: it could not be recorded, so aether must keep it."""


class Operation:
    """Bound to a channel while a connection stands. Callers hold futures; it has no task of its own."""

    __slots__ = (
        "_directory",
        "_host",
        "_owed",
        "attached",
        "changed",
        "channel",
        "connection",
        "error",
        "input",
        "intent",
        "left",
        "pid",
        "request",
        "result",
        "sandbox_id",
        "started",
        "state",
        "stderr",
        "stdout",
        "waiters",
    )

    def __init__(self, host: Host, sandbox_id: str, intent: Intent, request: bytes, directory: str) -> None:
        self._host = host
        self._directory = directory
        self.sandbox_id = sandbox_id
        self.intent = intent
        self.request = request
        """The START's payload, kept until it is answered; empty in one found again by a later edge."""
        self.state: OperationState = "running"
        self.started = False
        self._owed = False
        """An answer to START or ATTACH."""
        self.pid = 0
        self.result: w.AnyResult | None = None
        self.error: DSecError | None = None
        self.stdout: Output | None = None
        """Or content."""
        self.stderr: Output | None = None
        self.input: Input | None = None
        self.connection: AetherConnection | None = None
        self.channel = 0
        self.attached = 0
        """Streams that follow it."""
        self.left: asyncio.TimerHandle | None = None
        """Since its last stream has gone: hangs the terminal up."""
        self.waiters: list[asyncio.Future[None]] | None = None
        """For its end."""
        self.changed: list[asyncio.Future[None]] | None = None
        """For anything new: output, end of a stream, room for input, the end."""

    @property
    def id(self) -> str:
        return self.intent.op_id

    @property
    def running(self) -> bool:
        return self.state == "running"

    # --- connections ---

    def begin(self, connection: AetherConnection) -> None:
        """START on a connection: the first time, or again when the first was lost before its answer."""
        self.connection, self._owed = connection, True
        self.channel = connection.start(self, self.request)
        if self.input is not None:
            # Sent before: whether aether has the operation, and how much of this, STARTED will say.
            self.input.resync = self.input.sent > 0 or self.input.eof_sent
            self.pump()

    def resume(self, connection: AetherConnection) -> None:
        """On a new connection to the same aether, from where this edge has everything."""
        if not self.started and self.request:
            self.begin(connection)
            return
        out, err = self.stdout, self.stderr
        self.connection, self._owed = connection, True
        if self.input is not None:
            self.input.resync = True
        self.channel = connection.attach(
            self, w.Attach(self.id, out.received if out else 0, err.received if err else 0)
        )
        first = CONTENT if self.intent.kind in CONTENTS else STDOUT
        for number, output in ((first, out), (STDERR, err)):
            if output is not None and output.acked:
                self.acknowledge(number, output)  # the one before may have been lost

    def lose(self) -> None:
        self.connection, self._owed = None, False

    # --- frames ---

    def frame(self, type: int, flags: int, payload: bytes) -> None:
        if type == Type.DATA:
            self._data(flags, payload)
        elif type == Type.STARTED:
            self._on_started(payload)
        elif type == Type.EOF:
            self._eof(flags)
        elif type == Type.RESULT:
            self._on_result(payload)
        elif type == Type.ACK:
            self._ack(payload)
        elif type == Type.ERROR:
            self._on_error(payload)
        else:
            raise ProtocolError(f"a frame of type {type} on an operation's channel")

    def _answered(self) -> None:
        if not self._owed or self.connection is None:
            return
        self._owed = False
        self.started, self.request = True, b""
        self.connection.answered()

    def _on_started(self, payload: bytes) -> None:
        started: w.Started = decode(_started, payload)
        if not self._owed or (self.started and not started.known):
            raise ProtocolError("STARTED twice")
        self.pid = started.pid
        self._answered()
        if self.input is not None and self.input.resync and not started.known:
            self.input.restart()
            self.pump()
        self._wake_changed()

    def output(self, stream: int) -> Output:
        """Raises ProtocolError for a stream that this kind of operation has not."""
        kind = self.intent.kind
        if stream == CONTENT if kind in CONTENTS else (stream == STDOUT and kind in COMMANDS):
            if self.stdout is None:
                self.stdout = Output(f"{self._directory}/{self.id}.1")
            return self.stdout
        if stream == STDERR and kind in COMMANDS:
            if self.stderr is None:
                self.stderr = Output(f"{self._directory}/{self.id}.2")
            return self.stderr
        raise ProtocolError(f"stream {stream} in an operation of kind {kind}")

    def _data(self, stream: int, data: bytes) -> None:
        out = self.output(stream)
        if not self.started or out.eof:
            raise ProtocolError("DATA before STARTED or after EOF")
        if out.received + len(data) - out.acked > w.WINDOW:
            raise ProtocolError("more output than the window allows")
        if out.received + len(data) > self.intent.output_limit and not self.intent.streamed:
            self._over_limit(out)
        out.append(data)
        if self.error is not None:
            self._discard(stream, out)
        elif out.held >= w.WINDOW // 2 and not self.intent.streamed:
            self._spill(stream, out)
        self._wake_changed()

    def _over_limit(self, out: Output) -> None:
        if self.intent.kind in COMMANDS:
            raise ProtocolError("more output than the operation's limit")
        self.abort(
            PayloadTooLarge(f"over {self.intent.output_limit} bytes: attach to the operation and stream it")
        )

    def _spill(self, stream: int, out: Output) -> None:
        try:
            out.spill()
        except OSError as e:
            self.abort(DiskFull(f"output of {self.id} could not be kept: {e.strerror}"))
            self._discard(stream, out)
            return
        self.acknowledge(stream, out)

    def _discard(self, stream: int, out: Output) -> None:
        out.drop()
        self.acknowledge(stream, out)

    def acknowledge(self, stream: int, out: Output) -> None:
        """What is not in memory any more is safe here, or wanted no more."""
        out.acked = out.base
        self._send(frame(self.channel, Type.ACK, _U64.pack(out.acked), stream))

    def _eof(self, stream: int) -> None:
        out = self.output(stream)
        if not self.started or out.eof:
            raise ProtocolError("EOF twice or before STARTED")
        out.eof = True
        self._wake_changed()

    def _ack(self, payload: bytes) -> None:
        if len(payload) != 8:
            raise ProtocolError("an ACK that is not 8 bytes")
        offset = _U64.unpack(payload)[0]
        if self.input is None:
            if offset:
                raise ProtocolError("ACK of what was never sent")
            return
        if not (self.input.resume(offset) if self.input.resync else self.input.acknowledge(offset)):
            raise ProtocolError(f"ACK of {offset} where {self.input.acked} to {self.input.sent} can be")
        self.pump()
        self._wake_changed()

    def _on_result(self, payload: bytes) -> None:
        self._answered()  # an operation that is done at once need not be STARTED
        self.result = decode(RESULTS[self.intent.kind], payload)
        self._end("ended")

    def _on_error(self, payload: bytes) -> None:
        error = failure_of(payload)
        if not self.running:
            raise ProtocolError("ERROR after the end")
        refused = self._owed and self.started  # an ATTACH, of what was started long ago
        self._answered()
        if refused:
            error = OutcomeUnknown(f"the sandbox lost the operation: {error.message}")
        self.error = self.error or error
        self._end("outcome_unknown" if refused else "ended")

    # --- the end ---

    def _end(self, state: OperationState) -> None:
        if not self.running:
            raise ProtocolError("RESULT after the end")
        self.state = state
        self._answered()
        for out in (self.stdout, self.stderr):
            if out is not None:
                out.eof = True
        self.joined()
        recorded = self._host.ended(self)
        if self.connection is not None and recorded:
            self.connection.forget(self.channel)
        self.connection, self.input, self.request = None, None, b""
        self.wake()

    def lost(self, error: DSecError) -> None:
        """Its sandbox, or aether's memory of it, is gone: nobody saw its end."""
        if self.running:
            self.error = error
            self.connection = None
            self._end("outcome_unknown")

    def leave(self, hang_up_after_s: float) -> None:
        """Its last stream has gone, and perhaps the client with it."""
        loop = asyncio.get_running_loop()
        self.left = loop.call_later(hang_up_after_s, self._hang_up, hang_up_after_s)

    def joined(self) -> None:
        """A stream follows it again, or it has ended."""
        if self.left is not None:
            self.left.cancel()
            self.left = None

    def _hang_up(self, again_after_s: float) -> None:
        self.left = None
        if self.connection is None:
            self.leave(again_after_s)
        else:
            self.signal(signal.SIGHUP, tree=True)

    def abort(self, error: DSecError) -> None:
        """End it because of `error`, which its result will say."""
        self.error = self.error or error
        self.signal(9, tree=True)

    # --- from callers ---

    def signal(self, number: int, *, tree: bool) -> None:
        if self.connection is not None:
            self._send(message(self.channel, Type.SIGNAL, w.Signal(number, tree)))

    def resize(self, rows: int, columns: int) -> None:
        self._send(message(self.channel, Type.RESIZE, w.Resize(rows, columns)))

    def put(self, data: bytes, *, eof: bool = False) -> None:
        """More input. Callers wait for `input.full` to be over before they bring more."""
        if not self.running:
            return
        if self.input is None:
            self.input = Input()
        if data and not self.input.eof:
            self.input.put(data)
        self.input.eof = self.input.eof or eof
        self.pump()

    def had(self, offset: int) -> int:
        """Bytes of input past `offset` that were accepted already. Raises InvalidArgument for a gap."""
        have = self.input.total if self.input is not None else 0
        if not 0 <= offset <= have and self.running:
            raise InvalidArgument(f"input at {offset}: the operation has had {have} bytes")
        return max(0, have - offset)

    def pump(self) -> None:
        """Send what the window has room for."""
        stdin = self.input
        if stdin is None or self.connection is None or stdin.resync:
            return
        for chunk in stdin.sendable():
            self._send(frame(self.channel, Type.DATA, chunk, STDIN))
        if stdin.eof and not stdin.eof_sent and not stdin.full:
            stdin.eof_sent = True
            self._send(frame(self.channel, Type.EOF, b"", STDIN))

    def _send(self, data: bytes) -> None:
        if self.connection is not None:
            self.connection.send(data)

    # --- waiting ---

    def ended_future(self) -> asyncio.Future[None]:
        """Done at its end. For a running operation."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(future)
        return future

    def changed_future(self) -> asyncio.Future[None]:
        """Done when there is anything new."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.changed is None:
            self.changed = []
        self.changed.append(future)
        return future

    def _wake_changed(self) -> None:
        if self.changed:
            _wake(self.changed)
            self.changed = None

    def wake(self) -> None:
        self._wake_changed()
        if self.waiters:
            _wake(self.waiters)
            self.waiters = None


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
