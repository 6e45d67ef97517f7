"""A stream on one operation: its output from any offset, and input, resize and signals towards it.

A slow reader reads from what is kept, and never stalls the program. Content that is streamed (a file, a
tree) is not kept at all: there the reader's pace is the sender's.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from dsec.core.errors import InvalidArgument, NotFound, Unavailable
from dsec.edge.operation import CONTENT, STDERR, STDOUT, Operation
from dsec.edge.operations import Operations
from dsec.edge.output import Output
from dsec.edge.sandbox import Sandbox
from dsec.wire import edge as m
from dsec.wire.bus import Stream

CHUNK: Final = 128 << 10


class Attachment:
    def __init__(
        self, operations: Operations, sandbox: Sandbox, operation: Operation, stream: Stream
    ) -> None:
        self._operations = operations
        self._sandbox = sandbox
        self._operation = operation
        self._stream = stream

    async def run(self, stdout_from: int, stderr_from: int, stdin_from: int | None) -> None:
        """Until the operation's end was told, or the caller has gone."""
        operation = self._operation
        self._check(stdout_from, stderr_from)
        self._sandbox.attached += 1
        operation.attached += 1
        operation.joined()
        incoming = asyncio.ensure_future(self._incoming(stdin_from))
        outgoing = asyncio.ensure_future(self._outgoing(stdout_from, stderr_from))
        try:
            await asyncio.wait({incoming, outgoing}, return_when=asyncio.FIRST_COMPLETED)
            if incoming.done() and (error := incoming.exception()) is not None:
                raise error
            if outgoing.done():  # else the caller has gone: a silent program must not keep its stream
                await outgoing
        finally:
            incoming.cancel()
            outgoing.cancel()
            await asyncio.gather(incoming, outgoing, return_exceptions=True)
            operation.attached -= 1
            self._sandbox.attached -= 1
            self._operations.detached(self._sandbox, operation)

    def _check(self, stdout_from: int, stderr_from: int) -> None:
        if min(stdout_from, stderr_from) < 0:
            raise InvalidArgument("an offset below zero")
        operation = self._operation
        if operation.intent.streamed:
            out = operation.stdout
            if operation.attached or not operation.running or stdout_from < (out.base if out else 0):
                raise NotFound(f"the content of {operation.id} was streamed and is not kept: read it anew")

    # --- to the caller ---

    async def _outgoing(self, stdout_from: int, stderr_from: int) -> None:
        operation, offsets = self._operation, [stdout_from, stderr_from]
        content = operation.intent.kind not in ("exec", "shell")
        ended = [False, False]
        while True:
            busy = False  # an await was passed, so there may be more
            for i, out in enumerate((operation.stdout, operation.stderr)):
                number = STDERR if i else (CONTENT if content else STDOUT)
                if out is not None and not ended[i]:
                    busy |= await self._pass_on(number, out, offsets, i)
                    if out.eof and offsets[i] >= out.received:
                        ended[i] = busy = True
                        await self._stream.send(m.OutputEnd(number))
            if busy:
                continue
            if not operation.running:
                break
            await operation.changed_future()
        info = self._operations.info(operation, stdout_from=1 << 62, stderr_from=1 << 62)
        await self._stream.send(m.OperationEnd(info))

    async def _pass_on(self, number: int, out: Output, offsets: list[int], i: int) -> bool:
        """Send one chunk of what there is. True: there may be more."""
        if offsets[i] >= out.received:
            return False
        operation = self._operation
        try:
            data = out.read(offsets[i], CHUNK)
        except FileNotFoundError:
            raise Unavailable(f"the output of {operation.id} is not kept any more") from None
        if not data:
            return False
        await self._stream.send(m.Output(number, offsets[i], data))
        offsets[i] += len(data)
        if operation.intent.streamed:
            out.release(offsets[i])
            if operation.running and out.base - out.acked >= CHUNK // 2:
                operation.acknowledge(number, out)
        return True

    # --- from the caller ---

    async def _incoming(self, stdin_from: int | None) -> None:
        """Until the caller sends no more. Its going away does not end the operation's input."""
        operation, skip = self._operation, 0
        if stdin_from is not None:
            skip = operation.had(stdin_from)
        with contextlib.suppress(Unavailable):
            async for frame in self._stream:
                match frame:
                    case m.Input(data):
                        data, skip = data[skip:], max(0, skip - len(data))
                        operation.put(data)
                        while operation.running and operation.input is not None and operation.input.full:
                            await operation.changed_future()
                    case m.InputEnd():
                        operation.put(b"", eof=True)
                    case m.Resize(rows, columns):
                        operation.resize(rows, columns)
                    case m.Kill(signal, tree):
                        operation.signal(signal, tree=tree)
                    case _:
                        raise InvalidArgument("a frame that does not go this way")
