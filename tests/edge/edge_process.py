"""An edge in a process of its own, to be killed at any instant. Its sandboxes live in the test's process.

    edge_process.py DATA HOST_SOCKET CONTROL_SOCKET

HOST_SOCKET: the machine (test_crash.FakeMachine). CONTROL_SOCKET: where requests for the Bus are taken.
Both carry length-prefixed pickles, one answer per request, any number at once.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import uvloop

from dsec.backends.base import Exit, Fingerprint, Handle, ImageConfig, LaunchSpec, LayerRef, Stats
from dsec.core.errors import DSecError
from dsec.edge.config import EdgeConfig
from dsec.edge.service import EdgeService
from dsec.wire.local import LocalBus


class Peer:
    """Requests over a stream: (number, body) out, (number, answer or error) back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._task = asyncio.ensure_future(self._read())

    @classmethod
    async def connect(cls, path: str) -> Peer:
        return cls(*await asyncio.open_unix_connection(path))

    async def ask(self, body: Any) -> Any:
        number = id(future := asyncio.get_running_loop().create_future())
        self._waiting[number] = future
        send(self._writer, (number, body))
        return await future

    async def _read(self) -> None:
        try:
            while True:
                number, answer = await receive(self._reader)
                future = self._waiting.pop(number)
                if future.done():
                    continue
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError("the other side has gone"))
            self._waiting.clear()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()


async def receive(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "little")
    return pickle.loads(await reader.readexactly(size))


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    body = pickle.dumps(message)
    writer.write(len(body).to_bytes(4, "little") + body)


def portable(error: BaseException) -> BaseException:
    """DSecErrors keep their class over pickle when made from their message alone."""
    return type(error)(error.message) if isinstance(error, DSecError) else error


async def serve(path: str, answer: Any) -> asyncio.Server:
    """`answer(body)` is awaited for each request; several run at once."""
    tasks: set[asyncio.Task[None]] = set()

    async def one(number: int, body: Any, writer: asyncio.StreamWriter) -> None:
        try:
            got = await answer(body)
        except Exception as e:
            got = portable(e)
        if not writer.is_closing():
            send(writer, (number, got))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                number, body = await receive(reader)
                task = asyncio.ensure_future(one(number, body, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return await asyncio.start_unix_server(client, path)


class RemoteFake:
    """A Backend whose machine is another process."""

    name = "fake"
    capabilities: frozenset[str] = frozenset()

    def __init__(self, machine: str) -> None:
        self._path = machine

    async def open(self) -> None:
        self._peer = await Peer.connect(self._path)

    async def close(self, *, keep: bool) -> None:
        await self._peer.close()

    async def fingerprint(self) -> Fingerprint:
        return Fingerprint(available=True)

    async def launch(self, spec: LaunchSpec) -> tuple[Handle, socket.socket]:
        handle = self.half_made(spec.sandbox_id, spec.slot)
        await self._peer.ask(("launch", spec.sandbox_id, spec.slot))
        return handle, await self.connect(handle)

    async def connect(self, handle: Handle) -> socket.socket:
        path = await self._peer.ask(("socket", handle.sandbox_id))
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        sock.setblocking(False)
        return sock

    recover = connect

    async def wait_exit(self, handle: Handle) -> Exit:
        exit: Exit = await self._peer.ask(("wait", handle.sandbox_id))
        return exit

    async def stop(self, handle: Handle) -> None:
        await self._peer.ask(("stop", handle.sandbox_id))

    async def destroy(self, handle: Handle) -> None:
        await self._peer.ask(("destroy", handle.sandbox_id))

    async def stats(self, handle: Handle) -> Stats:
        return Stats()

    async def reclaim(self, claimed: frozenset[str]) -> list[str]:
        gone: list[str] = await self._peer.ask(("reclaim", claimed))
        return gone

    def half_made(self, sandbox_id: str, slot: int) -> Handle:
        return Handle(
            backend="fake",
            sandbox_id=sandbox_id,
            slot=slot,
            pid=0,
            start_time=0,
            boot_id="",
            socket_path="",
        )


class Stack:
    def __init__(self) -> None:
        self.layers = [LayerRef(digest="d", path="/")]
        self.config = ImageConfig()

    def resolve(self, image: str, layers: list[str]) -> Stack:
        return self


async def main(data: str, machine: str, control: str) -> None:
    bus = LocalBus()
    edge = EdgeService(
        bus,
        edge_id="e1",
        data=Path(data),
        backends={"fake": RemoteFake(machine)},
        layers=Stack(),
        config=EdgeConfig(memory_reserve_mb=0),
    )
    await edge.start()

    async def answer(body: Any) -> Any:
        verb, message = body
        return await bus.request(f"edge.e1.{verb}", message)

    server = await serve(control, answer)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
