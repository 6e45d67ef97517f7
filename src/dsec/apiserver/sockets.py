"""WebSockets: attach to an operation, watch a directory.

attach: binary frames carry bytes after a header of stream and offset (dsec.wire.api.ATTACH_HEADER), text
frames control messages. With `start=true` the first message is the request, which begins the operation or
joins it, so that a stream that broke is taken up again by the same messages with the offsets reached.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from dsec.apiserver.access import Access
from dsec.apiserver.convert import check_user, command_head, command_request, operation, watch_event
from dsec.apiserver.http import ClientGone, Request, decode, error_body
from dsec.apiserver.watch import WatchReader
from dsec.core.errors import DSecError, InvalidArgument, Unauthenticated, Unavailable
from dsec.core.ids import check_operation_id, new_operation_id
from dsec.wire import aether as w
from dsec.wire import api, bus
from dsec.wire import edge as m

MAX_OFFSET: Final = 1 << 62
FIRST_MESSAGE_S: Final = 30.0
NORMAL: Final = 1000
FAILED: Final = 4000
"""Close code after an AttachError, which says what it was."""
_request = msgspec.json.Decoder(api.ExecRequest | api.ShellRequest)
_control = msgspec.json.Decoder(api.ToServer)
_encode = msgspec.json.Encoder().encode


class Sockets:
    def __init__(self, access: Access) -> None:
        self._access = access

    # --- attach ---

    async def attach(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        op_id = check_operation_id(r.params[1])
        out_from = r.number("stdout_from", 0, 0, MAX_OFFSET)
        err_from = r.number("stderr_from", 0, 0, MAX_OFFSET)
        in_from = r.number("stdin_from", 0, 0, MAX_OFFSET) if "stdin_from" in r.query else None
        start = r.flag("start")
        await accept(r)
        request = await self._first(r, op_id) if start else None
        message = m.AttachOperation(
            sandbox_id=sandbox_id,
            op_id=op_id,
            start=request,
            stdout_from=out_from,
            stderr_from=err_from,
            stdin_from=in_from,
        )
        stream = await self._access.attach(message)
        try:
            await both(_to_client(r, stream), _to_edge(r, stream, in_from))
        finally:
            await stream.close()

    async def _first(self, r: Request, op_id: str) -> w.Exec | w.Shell:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                text = await _text(r)
        except TimeoutError:
            raise InvalidArgument(f"no request within {FIRST_MESSAGE_S:g} s") from None
        body = decode(_request, text)
        if body.op_id not in ("", op_id):
            raise InvalidArgument("the request's op_id is not the path's")
        r.note(operation=op_id, command=command_head(body))
        if body.stdin:
            raise InvalidArgument("stdin: over attach it comes in binary frames")
        return command_request(body, op_id)

    # --- watch ---

    async def watch(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        request = w.Watch(
            op_id=check_operation_id(r.text("op_id") or new_operation_id()),
            path=r.path(),
            user=check_user(r.text("user")),
            recursive=r.flag("recursive"),
        )
        await accept(r)
        message = m.AttachOperation(sandbox_id=sandbox_id, op_id=request.op_id, start=request)
        stream = await self._access.attach(message)
        try:
            await both(_events(r, stream), _until_gone(r))
        finally:
            await stream.close()


async def both(outgoing: Any, incoming: Any) -> None:
    """Until all was told to the client, or it has gone."""
    tasks = [asyncio.ensure_future(outgoing), asyncio.ensure_future(incoming)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            tasks[1].result()  # input has ended, or was wrong
        await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def accept(r: Request) -> None:
    if (await r.receive())["type"] != "websocket.connect":
        raise ClientGone
    await r.send({"type": "websocket.accept"})
    r.scope["dsec.accepted"] = True


async def _receive(r: Request) -> str | bytes:
    message = await r.receive()
    if message["type"] != "websocket.receive":
        raise ClientGone
    text = message.get("text")
    return text if text is not None else bytes(message["bytes"])


async def _text(r: Request) -> str:
    message = await _receive(r)
    if isinstance(message, bytes):
        raise InvalidArgument("a text frame was expected")
    return message


async def say(r: Request, message: Any) -> None:
    await r.send({"type": "websocket.send", "text": _encode(message).decode()})


async def _to_client(r: Request, stream: bus.Stream) -> None:
    while (frame := await stream.receive()) is not None:
        match frame:
            case m.Output(number, offset, data):
                head = api.ATTACH_HEADER.pack(number, offset)
                await r.send({"type": "websocket.send", "bytes": head + data})
            case m.OutputEnd(number):
                await say(r, api.StreamEnd(number))
            case m.OperationEnd(info):
                await say(r, api.AttachEnd(operation(info)))
                await r.send({"type": "websocket.close", "code": NORMAL})
                return
    raise Unavailable("the stream was cut off; attach again from the offsets reached")


async def _to_edge(r: Request, stream: bus.Stream, at: int | None) -> None:
    """Until the input ends. Raises ClientGone."""
    while True:
        message = await _receive(r)
        if isinstance(message, bytes):
            data = _input(message, at)
            at = (at or 0) + len(data)
            await stream.send(m.Input(data))
            continue
        match decode(_control, message):
            case api.InputEnd():
                await stream.send(m.InputEnd())
            case api.Resize(rows, columns):
                if not (1 <= rows <= 4096 and 1 <= columns <= 4096):
                    raise InvalidArgument("resize: rows and columns are not in 1..4096")
                await stream.send(m.Resize(rows, columns))
            case api.Kill(signal, tree):
                if not 1 <= signal <= 64:
                    raise InvalidArgument("kill: signal is not in 1..64")
                await stream.send(m.Kill(signal, tree))


def _input(message: bytes, at: int | None) -> bytes:
    if at is None:
        raise InvalidArgument("input on a stream that was opened without stdin_from")
    if len(message) < api.ATTACH_HEADER.size:
        raise InvalidArgument("a binary frame with no header")
    number, offset = api.ATTACH_HEADER.unpack_from(message)
    if number != w.Stream.STDIN or offset != at:
        raise InvalidArgument(f"input on stream {number} at {offset}; stream 0 at {at} was expected")
    return message[api.ATTACH_HEADER.size :]


async def _events(r: Request, stream: bus.Stream) -> None:
    reader = WatchReader()
    while (frame := await stream.receive()) is not None:
        if isinstance(frame, m.Output):
            for event, path in reader.feed(frame.data):
                await say(r, watch_event(event, path))
        elif isinstance(frame, m.OperationEnd):
            await say(r, api.AttachEnd(operation(frame.operation)))
            await r.send({"type": "websocket.close", "code": NORMAL})
            return
    raise Unavailable("the watch was cut off")


async def _until_gone(r: Request) -> None:
    while True:
        await _receive(r)


async def refuse(r: Request, e: DSecError) -> None:
    """As the socket's last message: a client's library shows that, and hides the body of a refused upgrade.
    Who has no token is refused the upgrade."""
    body = error_body(e)
    if isinstance(e, Unauthenticated):
        await _deny(r, e)
        return
    if not r.scope.get("dsec.accepted"):
        await accept(r)
    await say(r, api.AttachError(body))
    await r.send({"type": "websocket.close", "code": FAILED})


async def _deny(r: Request, e: DSecError) -> None:
    data = _encode(api.ErrorAnswer(error=error_body(e)))
    head = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await r.send({"type": "websocket.http.response.start", "status": e.http_status, "headers": head})
    await r.send({"type": "websocket.http.response.body", "body": data})
