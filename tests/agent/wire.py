"""The edge's side of the protocol, for tests: operations on one connection, each followed on its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from typing import Any

import msgspec

from dsec.wire import aether as w
from dsec.wire.frames import FrameReader, frame, message

LIMIT_S = 15.0
_serial = itertools.count(1)


class Refused(Exception):
    """aether answered ERROR."""

    def __init__(self, failure: w.Failure) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.code = failure.code
        self.message = failure.message


def ack(channel: int, stream: int, offset: int) -> bytes:
    return frame(channel, w.Type.ACK, offset.to_bytes(8, "little"), stream)


class Call:
    """One operation. What it gets is acknowledged at once, unless `hold`."""

    def __init__(self, wire: Wire, channel: int, op_id: str, *, hold: bool = False) -> None:
        self.wire = wire
        self.channel = channel
        self.op_id = op_id
        self.hold = hold
        self.output = {stream: bytearray() for stream in w.Stream}
        self.base = dict.fromkeys(w.Stream, 0)
        self.ended_streams: list[int] = []
        self.started: w.Started | None = None
        self.taken: int | None = None
        """What aether said that it has of the input."""
        self.raw_result: bytes | None = None
        self.failure: w.Failure | None = None
        self.news = asyncio.Event()

    def take(self, type_: int, flags: int, payload: bytes) -> None:
        if type_ == w.Type.STARTED:
            self.started = msgspec.msgpack.decode(payload, type=w.Started)
        elif type_ == w.Type.DATA:
            assert self.started is not None and flags not in self.ended_streams
            self.output[w.Stream(flags)] += payload
            if not self.hold:
                self.acknowledge(flags)
        elif type_ == w.Type.ACK:
            self.taken = int.from_bytes(payload, "little")
        elif type_ == w.Type.EOF:
            assert flags not in self.ended_streams
            self.ended_streams.append(flags)
        elif type_ == w.Type.RESULT:
            self.raw_result = payload
        elif type_ == w.Type.ERROR:
            self.failure = msgspec.msgpack.decode(payload, type=w.Failure)
        else:
            raise AssertionError(f"a frame of type {type_}")
        self.news.set()

    def received(self, stream: int) -> int:
        return self.base[w.Stream(stream)] + len(self.output[w.Stream(stream)])

    def acknowledge(self, stream: int) -> None:
        self.wire.send(ack(self.channel, stream, self.received(stream)))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition(self):
                if self.failure is not None:
                    raise Refused(self.failure)
                if self.wire.closed:
                    raise EOFError("aether closed the connection")
                self.news.clear()
                await self.news.wait()

    async def begun(self) -> Call:
        await self.until(lambda c: c.started is not None)
        return self

    async def result(self) -> bytes:
        await self.until(lambda c: c.raw_result is not None)
        assert self.raw_result is not None
        return self.raw_result

    async def end(self) -> w.Ended:
        """Its result; the operation is forgotten."""
        raw = await self.result()
        self.forget()
        return msgspec.msgpack.decode(raw, type=w.Ended)

    async def seen(self, text: bytes, stream: int = w.Stream.STDOUT) -> None:
        await self.until(lambda c: text in c.output[stream])

    def forget(self) -> None:
        self.wire.send(frame(self.channel, w.Type.FORGET))

    def write(self, data: bytes) -> None:
        for at in range(0, len(data), 1 << 16):
            self.wire.send(frame(self.channel, w.Type.DATA, data[at : at + (1 << 16)], w.Stream.STDIN))

    def eof(self) -> None:
        self.wire.send(frame(self.channel, w.Type.EOF, b"", w.Stream.STDIN))

    def signal(self, number: int, *, tree: bool = True) -> None:
        self.wire.send(message(self.channel, w.Type.SIGNAL, w.Signal(number, tree)))

    def resize(self, rows: int, columns: int) -> None:
        self.wire.send(message(self.channel, w.Type.RESIZE, w.Resize(rows, columns)))

    @property
    def stdout(self) -> bytes:
        return bytes(self.output[w.Stream.STDOUT])

    @property
    def stderr(self) -> bytes:
        return bytes(self.output[w.Stream.STDERR])


class Wire:
    """One connection to an aether."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._out = bytearray()
        self._wake = asyncio.Event()
        self._calls: dict[int, Call] = {}
        self._channels = itertools.count(1)
        self._lists: list[asyncio.Future[list[w.Known]]] = []
        self._pongs: list[asyncio.Future[bytes]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.events: list[w.Event] = []
        self.errors: list[w.Failure] = []
        self.hello: w.Hello | None = None
        self.closed = False
        self.news = asyncio.Event()

    async def __aenter__(self) -> Wire:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self, version: int = w.VERSION) -> Wire:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        self.send(message(0, w.Type.HELLO, w.Hello(version, version, "", b"", [])))
        await self.until(lambda: self.hello is not None)
        return self

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sock.close()
        self._end()

    def send(self, data: bytes) -> None:
        self._out += data
        self._wake.set()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            data, self._out = bytes(self._out), bytearray()
            try:
                await loop.sock_sendall(self._sock, data)
            except OSError:
                return

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        reader = FrameReader()
        try:
            while data := await loop.sock_recv(self._sock, 1 << 18):
                for got in reader.feed(data):
                    self._take(*got)
        except OSError:
            pass
        self._end()

    def _end(self) -> None:
        self.closed = True
        self.news.set()
        for call in self._calls.values():
            call.news.set()

    def _take(self, channel: int, type_: int, flags: int, payload: bytes) -> None:
        if channel:
            if channel in self._calls:
                self._calls[channel].take(type_, flags, payload)
            return
        if type_ == w.Type.HELLO:
            self.hello = msgspec.msgpack.decode(payload, type=w.Hello)
        elif type_ == w.Type.OPERATIONS:
            self._lists.pop(0).set_result(msgspec.msgpack.decode(payload, type=list[w.Known]))
        elif type_ == w.Type.PONG:
            self._pongs.pop(0).set_result(payload)
        elif type_ == w.Type.EVENT:
            self.events.append(msgspec.msgpack.decode(payload, type=w.Event))
        elif type_ == w.Type.ERROR:
            self.errors.append(msgspec.msgpack.decode(payload, type=w.Failure))
        self.news.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                if self.closed:
                    raise EOFError("aether closed the connection")
                self.news.clear()
                await self.news.wait()

    # --- operations ---

    def call(self, op_id: str = "", **how: Any) -> Call:
        channel = next(self._channels)
        call = Call(self, channel, op_id or f"op-{os.getpid()}-{next(_serial)}", **how)
        self._calls[channel] = call
        return call

    def start(self, request: w.Request, **how: Any) -> Call:
        call = self.call(request.op_id, **how)
        self.send(message(call.channel, w.Type.START, request))
        return call

    def exec(self, *argv: str | bytes, hold: bool = False, **how: Any) -> Call:
        return self.start(exec_request(*argv, **how), hold=hold)

    def sh(self, script: str, **how: Any) -> Call:
        return self.exec("/bin/sh", "-c", script, **how)

    def shell(self, command: str | bytes, hold: bool = False, **how: Any) -> Call:
        return self.start(shell_request(command, **how), hold=hold)

    def attach(self, op_id: str, stdout: int = 0, stderr: int = 0, **how: Any) -> Call:
        call = self.call(op_id, **how)
        call.base[w.Stream.STDOUT], call.base[w.Stream.STDERR] = stdout, stderr
        self.send(message(call.channel, w.Type.ATTACH, w.Attach(op_id, stdout, stderr)))
        return call

    async def run(self, *argv: str | bytes, **how: Any) -> tuple[w.Ended, bytes, bytes]:
        call = self.exec(*argv, **how)
        return await call.end(), call.stdout, call.stderr

    async def text(self, command: str, **how: Any) -> str:
        """What a session's command prints; it must succeed."""
        call = self.shell(command, **how)
        ended = await call.end()
        assert (ended.reason, ended.exit_code) == ("exited", 0), (command, ended, call.stderr)
        return call.stdout.decode().strip()

    async def list(self) -> list[w.Known]:
        self._lists.append(asyncio.get_running_loop().create_future())
        self.send(frame(0, w.Type.LIST))
        async with asyncio.timeout(LIMIT_S):
            return await self._lists[-1]

    async def ping(self, data: bytes = b"ping") -> bytes:
        self._pongs.append(asyncio.get_running_loop().create_future())
        self.send(frame(0, w.Type.PING, data))
        async with asyncio.timeout(LIMIT_S):
            return await self._pongs[-1]

    async def processes(self) -> set[str]:
        """Command lines of what runs inside, this look and the sessions' shells left out."""
        script = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null; echo; done"
        _, out, _ = await self.run("/bin/sh", "-c", script)
        lines = {line.strip() for line in out.decode(errors="replace").splitlines()}
        return {line for line in lines if line and "/proc/" not in line}


def _op_id() -> str:
    return f"op-{os.getpid()}-{next(_serial)}"


def exec_request(*argv: str | bytes, **how: Any) -> w.Exec:
    fields: dict[str, Any] = {
        "op_id": _op_id(),
        "argv": list(argv),
        "env": {},
        "cwd": "",
        "user": "",
        "stdin": False,
        "tty": False,
        "rows": 0,
        "columns": 0,
        "timeout_ms": 0,
        "output_limit": 16 << 20,
        "kill_at_limit": False,
    }
    return w.Exec(**{**fields, **how})


def shell_request(command: str | bytes, **how: Any) -> w.Shell:
    fields: dict[str, Any] = {
        "op_id": _op_id(),
        "session": "default",
        "command": command.encode() if isinstance(command, str) else command,
        "cwd": "",
        "env": {},
        "user": "",
        "stdin": False,
        "background": False,
        "timeout_ms": 0,
        "output_limit": 16 << 20,
        "kill_at_limit": False,
    }
    return w.Shell(**{**fields, **how})
