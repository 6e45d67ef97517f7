"""Files and trees: small answers as JSON, contents streamed both ways and never held whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from dsec.apiserver.access import Access
from dsec.apiserver.convert import check_user, file_info, raise_failed
from dsec.apiserver.http import Request, Stream, answer
from dsec.apiserver.operations import Operations
from dsec.apiserver.watchdog import WhileConnected
from dsec.core.errors import DSecError, Internal, InvalidArgument, Unavailable
from dsec.core.ids import check_operation_id, new_operation_id
from dsec.wire import aether as w
from dsec.wire import api, bus
from dsec.wire import edge as m

MAX_UPLOAD: Final = 1 << 40
MAX_ENTRIES: Final = 10_000_000
MAX_LIST: Final = 100_000
MAX_DEPTH: Final = 64
MAX_OFFSET: Final = 1 << 62


class Files:
    def __init__(self, access: Access, operations: Operations) -> None:
        self._access = access
        self._operations = operations

    # --- small ones ---

    async def list(self, r: Request) -> None:
        request = w.ListDir(
            op_id=_op_id(r),
            path=r.path(),
            user=_user(r),
            depth=r.number("depth", 1, 1, MAX_DEPTH),
            limit=r.number("limit", MAX_LIST, 1, MAX_LIST),
        )
        done = await self._run(r, request, w.Listing)
        entries = [file_info(s) for s in done.entries]
        await answer(r, api.FileList(entries=entries, truncated=done.truncated))

    async def stat(self, r: Request) -> None:
        request = w.StatFile(op_id=_op_id(r), path=r.path(), user=_user(r), follow=r.flag("follow", True))
        await answer(r, file_info((await self._run(r, request, w.FileDone)).stat))

    async def mkdir(self, r: Request) -> None:
        mode = r.octal("mode")
        request = w.MakeDir(
            op_id=_op_id(r),
            path=r.path(),
            user=_user(r),
            mode=0o755 if mode < 0 else mode,
            parents=r.flag("parents"),
        )
        await answer(r, file_info((await self._run(r, request, w.FileDone)).stat))

    async def move(self, r: Request) -> None:
        request = w.Move(
            op_id=_op_id(r),
            path=r.path(),
            target=r.path("target"),
            user=_user(r),
            overwrite=r.flag("overwrite"),
        )
        await answer(r, file_info((await self._run(r, request, w.FileDone)).stat))

    async def remove(self, r: Request) -> None:
        request = w.Remove(
            op_id=_op_id(r),
            path=r.path(),
            user=_user(r),
            recursive=r.flag("recursive"),
            missing_ok=r.flag("missing_ok"),
        )
        await self._run(r, request, w.Done)
        await answer(r, api.Done())

    async def _run(self, r: Request, request: Any, kind: type[Any]) -> Any:
        sandbox_id = await self._access.sandbox(r)
        info = await self._operations.run(r, sandbox_id, request)
        if not isinstance(info.result, kind):
            raise Internal(f"{request.op_id}: a result of another kind: {type(info.result).__name__}")
        return info.result

    # --- to the client ---

    async def read(self, r: Request) -> None:
        request = w.ReadFile(
            op_id=_op_id(r),
            path=r.path(),
            user=_user(r),
            offset=r.number("offset", 0, 0, MAX_OFFSET),
            length=r.number("length", -1, -1, MAX_OFFSET),
        )
        await self._download(r, request, b"application/octet-stream")

    async def read_tree(self, r: Request) -> None:
        request = w.GetTree(
            op_id=_op_id(r),
            path=r.path(),
            user=_user(r),
            limit_bytes=MAX_UPLOAD,
            limit_entries=MAX_ENTRIES,
        )
        await self._download(r, request, b"application/x-tar")

    async def _download(self, r: Request, request: Any, content_type: bytes) -> None:
        sandbox_id = await self._access.sandbox(r)
        out = Stream(r, content_type)
        message = m.AttachOperation(sandbox_id=sandbox_id, op_id=request.op_id, start=request)
        async with WhileConnected(r, delay_s=0), self._attached(message) as stream:
            while (frame := await stream.receive()) is not None:
                if isinstance(frame, m.Output):
                    await out.write(frame.data)
                elif isinstance(frame, m.OperationEnd):
                    raise_failed(frame.operation)
                    await out.end()
                    return
        raise Unavailable("the content was cut off")

    # --- from the client ---

    async def write(self, r: Request) -> None:
        length = r.length()
        request = w.WriteFile(
            op_id=_op_id(r),
            path=r.path(),
            user=_user(r),
            mode=r.octal("mode"),
            owner=check_owner(r.text("owner")),
            mtime_ns=r.number("mtime_ns", -1, -1, MAX_OFFSET),
            parents=r.flag("parents"),
            append=r.flag("append"),
            limit=MAX_UPLOAD if length is None else length,
        )
        info = await self._upload(r, request)
        if not isinstance(info.result, w.FileDone):
            raise Internal("an upload with no result")
        await answer(r, file_info(info.result.stat), 201)

    async def write_tree(self, r: Request) -> None:
        owner = r.text("owner")
        request = w.PutTree(
            op_id=_op_id(r),
            path=r.path(),
            user=_user(r),
            owner=owner if owner == "keep" else check_owner(owner),
            limit_bytes=MAX_UPLOAD,
            limit_entries=MAX_ENTRIES,
        )
        info = await self._upload(r, request)
        if not isinstance(info.result, w.TreeDone):
            raise Internal("an upload with no result")
        await answer(r, api.TreeResult(entries=info.result.entries, bytes=info.result.bytes), 201)

    async def _upload(self, r: Request, request: Any) -> m.OperationInfo:
        sandbox_id = await self._access.sandbox(r)
        message = m.AttachOperation(sandbox_id=sandbox_id, op_id=request.op_id, start=request, stdin_from=0)
        async with self._attached(message) as stream:
            feed = asyncio.ensure_future(_feed(r, stream))
            end = asyncio.ensure_future(_end(stream))
            try:
                await asyncio.wait({feed, end}, return_when=asyncio.FIRST_COMPLETED)
                if not end.done():
                    feed.result()
                    async with WhileConnected(r):
                        await asyncio.shield(end)
                return end.result()
            except BaseException:
                # Half an upload is none: it must not be taken for the whole.
                await asyncio.shield(self._abort(sandbox_id, request.op_id))
                raise
            finally:
                for task in (feed, end):
                    task.cancel()
                await asyncio.gather(feed, end, return_exceptions=True)

    async def _abort(self, sandbox_id: str, op_id: str) -> None:
        message = m.SignalOperation(sandbox_id=sandbox_id, op_id=op_id, signal=9, tree=True)
        with suppress(DSecError):
            await self._access.ask(sandbox_id, "signal", message)

    @asynccontextmanager
    async def _attached(self, message: m.AttachOperation) -> AsyncIterator[bus.Stream]:
        stream = await self._access.attach(message)
        try:
            yield stream
        finally:
            await stream.close()


async def _feed(r: Request, stream: bus.Stream) -> None:
    async for chunk in r.chunks(MAX_UPLOAD):
        await stream.send(m.Input(chunk))
    await stream.send(m.InputEnd())


async def _end(stream: bus.Stream) -> m.OperationInfo:
    """Raises OperationFailed with the operation's error."""
    while (frame := await stream.receive()) is not None:
        if isinstance(frame, m.OperationEnd):
            raise_failed(frame.operation)
            return frame.operation
    raise Unavailable("the upload was cut off")


def _op_id(r: Request) -> str:
    return check_operation_id(r.text("op_id") or new_operation_id())


def _user(r: Request) -> str:
    return check_user(r.text("user"))


def check_owner(owner: str) -> str:
    try:
        return check_user(owner)
    except InvalidArgument:
        raise InvalidArgument(f"owner: {owner[:80]!r} is no owner (user, user:group, uid:gid)") from None
