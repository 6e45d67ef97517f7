"""Files of a sandbox. Contents and trees are streamed; none is held whole unless `read` is asked for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path, PurePath
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec

from dsec.client._http import Connection, pause, query, unanswered
from dsec.client._pipe import Broken, Pipe, Reader, in_thread
from dsec.client._transport import Body, TransportError
from dsec.client._tree import NEW_FILE, PERMISSIONS, pack, unpack, write_all
from dsec.core.errors import FileNotFound, PathInvalid, PayloadTooLarge, Unavailable, from_code
from dsec.core.ids import new_operation_id
from dsec.wire import api

T = TypeVar("T")
RemotePath = str | bytes | PurePath
BLOCK: Final = 1 << 20
OCTETS: Final = {"Content-Type": "application/octet-stream"}
TAR: Final = {"Content-Type": "application/x-tar"}
_events = msgspec.json.Decoder(dict[str, Any])
_event = msgspec.json.Decoder(api.WatchEvent)
_end = msgspec.json.Decoder(api.ToClient)


class Files:
    """Paths are absolute and resolved inside the sandbox. `user`: the acting user, whose permissions
    count."""

    def __init__(self, connection: Connection, sandbox_id: str) -> None:
        self._connection = connection
        self._target = f"/v1/sandboxes/{sandbox_id}/files"

    # --- contents ---

    async def read(
        self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: str = ""
    ) -> bytes:
        """The file's bytes, or a part of them. Raises FileNotFound and other DSecErrors."""
        attempt = 0
        while True:
            try:
                return b"".join([c async for c in self._chunks("/content", path, offset, length, user)])
            except TransportError as e:
                if attempt >= self._connection.retries:
                    raise unanswered(e, False, "") from e
            await pause(attempt)
            attempt += 1

    async def read_text(self, path: RemotePath, *, user: str = "") -> str:
        """As UTF-8; what is none becomes U+FFFD."""
        return (await self.read(path, user=user)).decode(errors="replace")

    async def stream(
        self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: str = ""
    ) -> AsyncIterator[bytes]:
        """The bytes as they come. Raises Unavailable when they are cut off: an end is an end."""
        try:
            async for chunk in self._chunks("/content", path, offset, length, user):
                yield chunk
        except TransportError as e:
            raise Unavailable(f"reading {_shown(path)} was cut off: {e}") from e

    async def _chunks(
        self, what: str, path: RemotePath, offset: int = 0, length: int | None = None, user: str = ""
    ) -> AsyncIterator[bytes]:
        where = query(path=raw(path), offset=offset or None, length=length, user=user or None)
        async with self._connection.stream("GET", self._target + what + where) as chunks:
            async for chunk in chunks:
                yield chunk

    async def write(
        self,
        path: RemotePath,
        data: bytes | str | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        owner: str = "",
        user: str = "",
        parents: bool = True,
        append: bool = False,
        mtime_ns: int | None = None,
    ) -> api.FileInfo:
        """Write a file, whole or not at all; it can be read when this returns.

        `mode` (None: 0644 less umask for a new file, else kept); `owner`: user, user:group, uid:gid (empty:
        the acting user); `parents`: make missing ones; `append`: add to what is there.
        """
        content = data.encode() if isinstance(data, str) else data
        whole = isinstance(content, bytes)
        return await self._write(
            path,
            lambda: content,
            size=None,
            repeatable=whole and not append,
            mode=mode,
            owner=owner,
            user=user,
            parents=parents,
            append=append,
            mtime_ns=mtime_ns,
        )

    async def _write(
        self,
        path: RemotePath,
        content: Callable[[], Body],
        *,
        size: int | None,
        repeatable: bool,
        mode: int | None,
        owner: str,
        user: str,
        parents: bool,
        append: bool,
        mtime_ns: int | None,
    ) -> api.FileInfo:
        options: dict[str, Any] = {
            "path": raw(path),
            "mode": None if mode is None else f"{mode:o}",
            "owner": owner or None,
            "user": user or None,
            "parents": parents,
            "append": append,
            "mtime_ns": mtime_ns,
        }
        headers = OCTETS if size is None else {**OCTETS, "Content-Length": str(size)}
        return await self._put(api.FileInfo, "/content", options, content, headers, repeatable)

    async def _put(
        self,
        kind: type[T],
        what: str,
        options: dict[str, Any],
        content: Callable[[], Body],
        headers: dict[str, str],
        repeatable: bool,
    ) -> T:
        """Each try is an operation of its own: the one before was undone, or wrote the same."""
        tries = self._connection.retries if repeatable else 0
        sent = False
        for attempt in range(tries + 1):
            target = self._target + what + query(**options, op_id=new_operation_id())
            try:
                return await self._connection.send(kind, "PUT", target, content(), headers)
            except TransportError as e:
                sent = sent or e.sent
                if attempt == tries:
                    raise unanswered(e, sent, f"an upload to {_shown(options['path'])}") from e
            await pause(attempt)
        raise AssertionError("not reached")

    # --- names ---

    async def list(
        self, path: RemotePath, *, depth: int = 1, limit: int = 100_000, user: str = ""
    ) -> list[api.FileInfo]:
        """Entries of a directory, `depth` levels deep. Raises PayloadTooLarge when there are more than
        `limit`."""
        where = query(path=raw(path), depth=depth, limit=limit, user=user or None)
        found = await self._connection.call(api.FileList, "GET", self._target + where)
        if found.truncated:
            raise PayloadTooLarge(
                f"{_shown(path)} holds more than the {len(found.entries)} entries that fit into one answer: "
                "list a part, or use `exec` with find"
            )
        return found.entries

    async def stat(self, path: RemotePath, *, follow: bool = True, user: str = "") -> api.FileInfo:
        """Raises FileNotFound."""
        where = query(path=raw(path), follow="true" if follow else "false", user=user or None)
        return await self._connection.call(api.FileInfo, "GET", f"{self._target}/stat{where}")

    async def exists(self, path: RemotePath, *, user: str = "") -> bool:
        try:
            await self.stat(path, user=user)
        except FileNotFound:
            return False
        return True

    async def mkdir(
        self, path: RemotePath, *, mode: int = 0o755, parents: bool = True, user: str = ""
    ) -> api.FileInfo:
        """With `parents` missing ones are made, and an existing directory is no error."""
        where = query(path=raw(path), mode=f"{mode:o}", parents=parents, user=user or None, **_once())
        return await self._connection.call(api.FileInfo, "POST", f"{self._target}/mkdir{where}")

    async def move(
        self, path: RemotePath, target: RemotePath, *, overwrite: bool = False, user: str = ""
    ) -> api.FileInfo:
        """Raises FileExists, unless `overwrite`."""
        where = query(path=raw(path), target=raw(target), overwrite=overwrite, user=user or None, **_once())
        return await self._connection.call(api.FileInfo, "POST", f"{self._target}/move{where}")

    async def remove(
        self, path: RemotePath, *, recursive: bool = False, missing_ok: bool = False, user: str = ""
    ) -> None:
        """Raises FileNotFound, unless `missing_ok`; DirectoryNotEmpty, unless `recursive`."""
        where = query(
            path=raw(path), recursive=recursive, missing_ok=missing_ok, user=user or None, **_once()
        )
        await self._connection.call(api.Done, "DELETE", self._target + where)

    async def watch(
        self, path: RemotePath, *, recursive: bool = False, user: str = ""
    ) -> AsyncIterator[api.WatchEvent]:
        """Changes as they happen, until the iteration is left. The first event is `watching`: from then on
        nothing is missed. After `overflow`, list again.

        Raises Unavailable when the connection breaks: events may have been missed.
        """
        where = query(path=raw(path), recursive=recursive, user=user or None)
        try:
            socket = await self._connection.websocket(f"{self._target}/watch{where}")
        except TransportError as e:
            raise unanswered(e, False, "") from e
        try:
            while (message := await socket.receive()) is not None:
                if "t" not in _events.decode(message):
                    yield _event.decode(message)
                    continue
                match _end.decode(message):
                    case api.AttachError(error):
                        raise from_code(error.code, error.message, **error.details)
                    case api.AttachEnd(operation) if operation.error is not None:
                        error = operation.error
                        raise from_code(error.code, error.message, **error.details)
                    case _:
                        return
            raise Unavailable(f"the watch on {_shown(path)} was cut off")
        finally:
            await socket.close()

    # --- to and from this machine ---

    async def upload(
        self, local: Path | str, path: RemotePath, *, owner: str = "", user: str = "", parents: bool = True
    ) -> api.TreeResult:
        """A file to `path`, or a directory's contents below `path`; with modes and times. Symlinks stay
        symlinks."""
        local = Path(local)
        if local.is_dir():
            return await self._upload_tree(local, path, owner, user)
        if raw(path).endswith(b"/"):
            path = raw(path) + os.fsencode(local.name)
        found = local.stat()
        done = await self._write(
            path,
            lambda: _read_blocks(local, found.st_size),
            size=found.st_size,
            repeatable=True,
            mode=found.st_mode & PERMISSIONS,
            owner=owner,
            user=user,
            parents=parents,
            append=False,
            mtime_ns=found.st_mtime_ns,
        )
        return api.TreeResult(entries=1, bytes=done.size)

    async def _upload_tree(self, local: Path, path: RemotePath, owner: str, user: str) -> api.TreeResult:
        pipe = Pipe()

        def work() -> api.TreeResult:
            try:
                done = pack(local, pipe)
            except BaseException:
                pipe.break_()
                raise
            pipe.end()
            return done

        thread = in_thread(work)
        options = {"path": raw(path), "owner": owner or None, "user": user or None}
        try:
            return await self._put(api.TreeResult, "/tree", options, pipe.chunks, TAR, False)
        except Exception:
            pipe.break_()
            await _cause(thread)  # what went wrong here says more than what the server made of it
            raise
        finally:
            pipe.break_()
            await asyncio.wait([thread])

    async def download(
        self, path: RemotePath, local: Path | str, *, user: str = "", limit_bytes: int | None = None
    ) -> api.TreeResult:
        """A file to `local` (or into it, if it is a directory), or a directory's contents below `local`.

        Nothing is written outside of `local`, whatever the sandbox holds. `limit_bytes`: raises
        PayloadTooLarge past it.
        """
        local = Path(local)
        found = await self.stat(path, user=user)
        if found.type == "directory":
            return await self._download_tree(path, local, user, limit_bytes)
        if local.is_dir():
            local = local / os.fsdecode(os.path.basename(raw(path)))
        return await self._download_file(found, path, local, user, limit_bytes)

    async def _download_file(
        self, found: api.FileInfo, path: RemotePath, local: Path, user: str, limit_bytes: int | None
    ) -> api.TreeResult:
        """Beside the target first, then renamed over it."""
        beside = local.with_name(f".{local.name}.{uuid4().hex}")
        size = 0
        fd = os.open(beside, NEW_FILE, 0o600)
        try:
            try:
                async for block in _blocks(self.stream(path, user=user)):
                    size += len(block)
                    if limit_bytes is not None and size > limit_bytes:
                        raise PayloadTooLarge(f"{_shown(path)} holds more than {limit_bytes} bytes")
                    await asyncio.to_thread(write_all, fd, block)
                os.fchmod(fd, found.mode & PERMISSIONS)
                os.utime(fd, ns=(found.mtime_ns, found.mtime_ns))
            finally:
                os.close(fd)
            os.replace(beside, local)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        return api.TreeResult(entries=1, bytes=size)

    async def _download_tree(
        self, path: RemotePath, local: Path, user: str, limit_bytes: int | None
    ) -> api.TreeResult:
        pipe = Pipe()

        def work() -> api.TreeResult:
            reader = Reader(pipe)
            try:
                done = unpack(reader, local, limit_bytes)
                reader.drain()
            except BaseException:
                pipe.break_()
                raise
            return done

        thread = in_thread(work)
        try:
            async for chunk in self._chunks("/tree", path, user=user):
                await pipe.put(chunk)
            pipe.end()
            return await thread
        except Broken:
            return await thread
        except TransportError as e:
            raise Unavailable(f"reading {_shown(path)} was cut off: {e}") from e
        finally:
            if not thread.done():
                pipe.break_()
                await asyncio.wait([thread])
            if not thread.cancelled():
                thread.exception()  # it was raised above, or something else was first


async def _read_blocks(local: Path, size: int) -> AsyncIterator[bytes]:
    """As many bytes as the file had at first. Raises OSError when it has become shorter."""
    with local.open("rb", buffering=0) as f:
        while size > 0:
            block = await asyncio.to_thread(f.read, min(BLOCK, size))
            if not block:
                raise OSError(f"{local} became shorter while it was read")
            size -= len(block)
            yield block


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Put together, so that a thread is asked less often."""
    held, size = [], 0
    async for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size >= BLOCK:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


async def _cause(thread: asyncio.Future[api.TreeResult]) -> None:
    """Raises the thread's own error, if it has one."""
    await asyncio.wait([thread])
    error = thread.exception()
    if error is not None and not isinstance(error, Broken):
        raise error


def raw(path: RemotePath) -> bytes:
    try:
        return path if isinstance(path, bytes) else os.fsencode(path)
    except UnicodeEncodeError:
        raise PathInvalid(f"path {str(path)[:80]!a}: cannot be encoded") from None


def _shown(path: RemotePath) -> str:
    return raw(path).decode(errors="replace")[:200]


def _once() -> dict[str, str]:
    """By this a repeat is seen to be one."""
    return {"op_id": new_operation_id()}
