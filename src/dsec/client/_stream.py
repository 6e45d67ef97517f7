"""A stream on one operation that survives broken connections: taken up again at the offsets reached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, Literal

import msgspec

from dsec.client._http import Connection, pause, query
from dsec.client._transport import Socket, TransportError
from dsec.core.errors import DSecError, InvalidArgument, OutcomeUnknown, ProtocolError, Unavailable, from_code
from dsec.wire import api

TAIL: Final = 256 << 10
"""Input that is held so that it can be sent again."""
_control = msgspec.json.Decoder(api.ToClient)
_encode = msgspec.json.Encoder().encode


class Chunk(msgspec.Struct, frozen=True):
    """A piece of output."""

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes


class OperationStream:
    """Iterate for chunks; afterwards `operation` says how it ended. An error is raised, never taken for an
    end."""

    def __init__(
        self,
        connection: Connection,
        sandbox_id: str,
        op_id: str,
        *,
        stdout_from: int = 0,
        stderr_from: int = 0,
        with_input: bool = False,
    ) -> None:
        self._connection = connection
        self._target = f"/v1/sandboxes/{sandbox_id}/operations/{op_id}/attach"
        self._op_id = op_id
        self._at = [stdout_from, stderr_from]
        self._with_input = with_input
        self._input_at = 0
        self._tail = bytearray()
        """The last input, up to `_input_at`."""
        self._input_ended = False
        self._socket: Socket | None = None
        self.operation: api.Operation | None = None

    # --- from the server ---

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        attempt = 0
        while self.operation is None:
            try:
                await self.open()
                async for chunk in self._receive():
                    attempt = 0
                    yield chunk
            except TransportError as e:
                await self._drop()
                if attempt >= self._connection.retries:
                    raise OutcomeUnknown(
                        f"the stream of operation {self._op_id} broke ({e}); it goes on: find it by its id"
                    ) from e
                await pause(attempt)
                attempt += 1

    async def open(self) -> None:
        """Connect, if it is not connected. Input that may be lost is sent again."""
        if self._socket is not None:
            return
        at = self._input_at - len(self._tail) if self._with_input else None
        self._socket = await self._connection.websocket(
            self._target + query(stdout_from=self._at[0], stderr_from=self._at[1], stdin_from=at)
        )
        if at is not None and self._tail:
            await self._socket.send(api.ATTACH_HEADER.pack(0, at) + bytes(self._tail))
        if self._input_ended:
            await self._socket.send(_encode(api.InputEnd()).decode())

    async def _receive(self) -> AsyncIterator[Chunk]:
        socket = self._socket
        assert socket is not None
        while True:
            message = await socket.receive()
            if message is None:
                raise TransportError("the connection was closed", sent=True)
            if isinstance(message, bytes):
                yield self._chunk(message)
                continue
            match self._decode(message):
                case api.AttachEnd(operation):
                    self.operation = operation
                    await self._drop()
                    return
                case api.AttachError(error):
                    await self._drop()
                    raise self._failure(error)
                case _:
                    pass

    def _decode(self, message: str) -> api.ToClient:
        try:
            return _control.decode(message)
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"the server's message was not understood: {e}") from e

    def _failure(self, error: api.ErrorBody) -> DSecError | TransportError:
        if error.code == Unavailable.code:
            return TransportError(error.message, sent=True)
        return from_code(error.code, error.message, **error.details)

    def _chunk(self, message: bytes) -> Chunk:
        number, offset = api.ATTACH_HEADER.unpack_from(message)
        data = message[api.ATTACH_HEADER.size :]
        i = 1 if number == 2 else 0
        if offset != self._at[i]:
            raise ProtocolError(f"output at {offset} where {self._at[i]} was expected")
        self._at[i] += len(data)
        return Chunk("stderr" if i else "stdout", offset, data)

    # --- to the server ---

    async def send(self, data: bytes) -> None:
        if not self._with_input:
            raise InvalidArgument("this stream was opened without input")
        for start in range(0, len(data), TAIL):
            part = data[start : start + TAIL]
            head = api.ATTACH_HEADER.pack(0, self._input_at)
            self._tail += part
            self._input_at += len(part)
            del self._tail[:-TAIL]
            await self._say(head + part)

    async def end_input(self) -> None:
        self._input_ended = True
        await self._say(_encode(api.InputEnd()).decode())

    async def resize(self, rows: int, columns: int) -> None:
        await self._say(_encode(api.Resize(rows, columns)).decode())

    async def kill(self, signal: int, tree: bool) -> None:
        await self._say(_encode(api.Kill(signal, tree)).decode())

    async def _say(self, message: str | bytes) -> None:
        """Lost with the connection, input is sent again by the reader when it connects anew."""
        if self._socket is not None:
            try:
                await self._socket.send(message)
            except TransportError:
                pass

    async def _drop(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await socket.close()

    async def close(self) -> None:
        """Stop following it; the operation goes on."""
        await self._drop()
