"""A small client of the protocol: what a test does inside a sandbox, without an edge."""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Any

import msgspec

from dsec.core.errors import from_code
from dsec.wire import aether as w
from dsec.wire.frames import FrameReader, frame, message

LIMIT_S = 60.0


class Outcome(msgspec.Struct):
    ended: w.Ended
    stdout: bytes
    stderr: bytes


class Inside:
    """One connection to an aether. `begin` leaves the command running; `run` waits for its end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._frames: list[tuple[int, int, int, bytes]] = []
        self._numbers = itertools.count(1)
        self.hello: w.Hello | None = None

    async def __aenter__(self) -> Inside:
        await self.greet()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    async def greet(self) -> w.Hello:
        channel, type_, _, payload = await self._next()
        assert (channel, type_) == (0, w.Type.HELLO)
        await self._send(message(0, w.Type.HELLO, w.Hello(w.VERSION, w.VERSION, "", b"", [])))
        self.hello = msgspec.msgpack.decode(payload, type=w.Hello)
        return self.hello

    async def _send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _next(self) -> tuple[int, int, int, bytes]:
        async with asyncio.timeout(LIMIT_S):
            while not self._frames:
                data = await asyncio.get_running_loop().sock_recv(self._sock, 1 << 16)
                if not data:
                    raise EOFError("aether closed the connection")
                self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    async def begin(self, *argv: str, **how: Any) -> int:
        """The number of its channel, when it has started."""
        number = next(self._numbers)
        fields: dict[str, Any] = {
            "op_id": f"op-{id(self)}-{number}",
            "argv": list(argv),
            "env": {},
            "cwd": "",
            "user": "",
            "stdin": False,
            "tty": False,
            "rows": 0,
            "columns": 0,
            "timeout_ms": 0,
            "output_limit": 1 << 20,
            "kill_at_limit": False,
        }
        await self._send(message(number, w.Type.START, w.Exec(**{**fields, **how})))
        while True:
            channel, type_, _, payload = await self._next()
            if channel == number and type_ == w.Type.STARTED:
                return number
            if channel == number and type_ == w.Type.ERROR:
                failure = msgspec.msgpack.decode(payload, type=w.Failure)
                raise from_code(failure.code, failure.message)

    async def end(self, number: int) -> Outcome:
        output: dict[int, bytes] = {1: b"", 2: b""}
        while True:
            channel, type_, flags, payload = await self._next()
            if channel != number:
                continue
            if type_ == w.Type.DATA:
                output[flags] += payload
                total = len(output[flags]).to_bytes(8, "little")
                await self._send(frame(number, w.Type.ACK, total, flags))
            elif type_ == w.Type.RESULT:
                await self._send(frame(number, w.Type.FORGET))
                return Outcome(msgspec.msgpack.decode(payload, type=w.Ended), output[1], output[2])
            elif type_ == w.Type.ERROR:
                failure = msgspec.msgpack.decode(payload, type=w.Failure)
                raise from_code(failure.code, failure.message)

    async def run(self, *argv: str, **how: Any) -> Outcome:
        return await self.end(await self.begin(*argv, **how))

    async def sh(self, script: str, **how: Any) -> Outcome:
        return await self.run("/bin/sh", "-c", script, **how)

    async def text(self, script: str, **how: Any) -> str:
        """What it prints; it must succeed."""
        outcome = await self.sh(script, **how)
        assert outcome.ended.exit_code == 0, (script, outcome)
        return outcome.stdout.decode().strip()
