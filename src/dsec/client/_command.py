"""Handles on what runs in a sandbox: a command in the background, a terminal."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final

from dsec.client._http import Connection, query
from dsec.client._result import CommandResult, Output, result_of
from dsec.client._stream import Chunk, OperationStream
from dsec.core.errors import DSecError, ProtocolError, WrongState
from dsec.wire import api

POLL_S: Final = 30.0
"""One request waits so long at most: no proxy cuts it, and a broken connection is noticed."""
PART: Final = 1 << 20
"""Bytes of input in one request."""
OnOutput = Callable[[bytes], Awaitable[None] | None]


class Command:
    """An operation of a sandbox. It goes on without its handle: `sandbox.operation(op_id)` finds it again."""

    def __init__(self, connection: Connection, sandbox_id: str, op_id: str, *, fresh: bool = False) -> None:
        self._connection = connection
        self._target = f"/v1/sandboxes/{sandbox_id}/operations/{op_id}"
        self.sandbox_id = sandbox_id
        self.op_id = op_id
        self._sent: int | None = 0 if fresh else None
        """Bytes of input so far; None when another client may have sent some."""

    def __repr__(self) -> str:
        return f"Command({self.op_id!r} of {self.sandbox_id!r})"

    async def wait(self) -> CommandResult:
        """Its result, when it has ended. Raises its error, if it could not be done."""
        return await self._finish(None, bytearray(), bytearray())

    async def _finish(self, known: api.Operation | None, out: bytearray, err: bytearray) -> CommandResult:
        """Poll until it has ended and all output is here."""
        while True:
            if known is not None:
                out += api.of_blob(known.stdout)
                err += api.of_blob(known.stderr)
                whole = len(out) >= known.stdout_size and len(err) >= known.stderr_size
                if known.state != "running" and whole:
                    if known.result is None:
                        raise ProtocolError(f"operation {self.op_id} ({known.kind}) is no command")
                    return result_of(known, bytes(out), bytes(err))
            known = await self._look(POLL_S, len(out), len(err))

    async def _look(self, wait_s: float, stdout_from: int, stderr_from: int) -> api.Operation:
        where = query(wait=wait_s, stdout_from=stdout_from, stderr_from=stderr_from)
        return await self._connection.call(api.Operation, "GET", self._target + where)

    async def status(self) -> api.Operation:
        """What is known now, without output; a failed one is told, not raised."""
        try:
            return await self._look(0.0, 1 << 61, 1 << 61)
        except DSecError as e:
            operation = getattr(e, "operation", None)
            if operation is None:
                raise
            assert isinstance(operation, api.Operation)
            return operation

    async def output(self, stdout_from: int = 0, stderr_from: int = 0) -> Output:
        """What it has printed so far, from these offsets on."""
        out, err = bytearray(), bytearray()
        while True:
            known = await self._printed(stdout_from + len(out), stderr_from + len(err))
            out += (more_out := api.of_blob(known.stdout))
            err += (more_err := api.of_blob(known.stderr))
            at = stdout_from + len(out), stderr_from + len(err)
            if (at[0] >= known.stdout_size and at[1] >= known.stderr_size) or not (more_out or more_err):
                return Output(
                    stdout=bytes(out),
                    stderr=bytes(err),
                    stdout_end=at[0],
                    stderr_end=at[1],
                    running=known.state == "running",
                )

    async def _printed(self, stdout_from: int, stderr_from: int) -> api.Operation:
        try:
            return await self._look(0.0, stdout_from, stderr_from)
        except DSecError as e:
            operation = getattr(e, "operation", None)
            if isinstance(operation, api.Operation):
                return operation  # failed: what it had printed is here all the same
            raise

    async def stream(self, stdout_from: int = 0, stderr_from: int = 0) -> AsyncIterator[Chunk]:
        """Its output as it comes, from these offsets to its end. A broken connection is taken up again."""
        stream = self._stream(stdout_from, stderr_from)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.close()

    def _stream(self, stdout_from: int, stderr_from: int) -> OperationStream:
        return OperationStream(
            self._connection, self.sandbox_id, self.op_id, stdout_from=stdout_from, stderr_from=stderr_from
        )

    async def follow(
        self, on_stdout: OnOutput | None = None, on_stderr: OnOutput | None = None
    ) -> CommandResult:
        """Call back for each piece of output, from the first; then its result."""
        out, err = bytearray(), bytearray()
        async for chunk in self.stream():
            kept, call = (out, on_stdout) if chunk.stream == "stdout" else (err, on_stderr)
            kept += chunk.data
            if call is not None:
                done = call(chunk.data)
                if inspect.isawaitable(done):
                    await done
        return await self._finish(None, out, err)

    async def kill(self, signal: int = 9, *, tree: bool = True) -> None:
        """Send a signal; `tree`: to all processes that the command began."""
        body = api.SignalRequest(signal=signal, tree=tree)
        await self._connection.call(api.Operation, "POST", self._target + "/signal", body)

    async def send_stdin(self, data: bytes | str) -> None:
        """Waits while the command does not read. Raises WrongState when it has ended."""
        data = data.encode() if isinstance(data, str) else data
        for start in range(0, len(data), PART):
            await self._input(data[start : start + PART], eof=False)

    async def close_stdin(self) -> None:
        await self._input(b"", eof=True)

    async def _input(self, data: bytes, *, eof: bool) -> None:
        where = query(eof=eof, offset=self._sent)
        headers = {"Content-Type": "application/octet-stream"}
        await self._connection.call_bytes(
            api.Operation,
            "POST",
            f"{self._target}/input{where}",
            data,
            headers,
            repeatable=self._sent is not None or not data,
            outcome=f"input of operation {self.op_id}",
        )
        if self._sent is not None:
            self._sent += len(data)

    async def _feed(self, data: bytes) -> None:
        """All of its input. One that ends without reading it is no error."""
        try:
            await self.send_stdin(data)
            await self.close_stdin()
        except WrongState:
            pass

    async def resize(self, *, rows: int, columns: int) -> None:
        """Of its terminal."""
        body = api.ResizeRequest(rows=rows, columns=columns)
        await self._connection.call(api.Operation, "POST", self._target + "/resize", body)


class Terminal:
    """A program on a terminal. `async for` yields what it prints; `async with` ends it at the end."""

    def __init__(self, connection: Connection, sandbox_id: str, op_id: str) -> None:
        self.op_id = op_id
        self.command = Command(connection, sandbox_id, op_id)
        self._stream = OperationStream(connection, sandbox_id, op_id, with_input=True)

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk.data

    async def send(self, data: bytes | str) -> None:
        """Keys."""
        await self._stream.open()
        await self._stream.send(data.encode() if isinstance(data, str) else data)

    async def resize(self, *, rows: int, columns: int) -> None:
        await self.command.resize(rows=rows, columns=columns)

    async def kill(self, signal: int = 9) -> None:
        await self.command.kill(signal)

    async def wait(self) -> CommandResult:
        """Its result, with all that it printed in stdout."""
        return await self.command.wait()

    async def close(self) -> None:
        """Hang up: what still runs on it gets SIGHUP."""
        await self._stream.close()
        if self._stream.operation is None:
            try:
                await self.command.kill(1)
            except DSecError:
                pass  # it has ended, or its sandbox has
