"""The gateway's process. It ends when it is told to, or when nobody has needed it for a while."""

from __future__ import annotations

import array
import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import dns.rdata
import msgspec
import uvloop

from dsec.core.network import Span
from dsec.linux import bpf
from dsec.linux.syscalls import prctl
from dsec.network.addresses import packed
from dsec.network.dataplane import PIN_KEY, pin_entry
from dsec.network.gateway import protocol as p
from dsec.network.gateway.proxy import Proxy
from dsec.network.gateway.resolver import Resolver
from dsec.network.gateway.state import Table

log = logging.getLogger(__name__)
NOBODY: Final = 65534
ALONE_S: Final = 60.0
"""With no server and no sandbox, for so long: it ends."""
LOOK_S: Final = 5.0
MAX_FDS: Final = 16
PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NO_NEW_PRIVS: Final = 38


class MapPinner:
    """Pins in the kernel's map, by its descriptor."""

    def __init__(self, fd: int) -> None:
        self._map = bpf.Map(fd, "pins", 0)

    def pin(self, index: int, address: str, expires_s: float, spans: Iterable[Span]) -> None:
        try:
            self._map.set(*pin_entry(index, address, expires_s, spans))
        except OSError as e:
            log.error("an answer could not be pinned: %s", e)

    def unpin(self, index: int, address: str) -> None:
        try:
            self._map.delete(PIN_KEY.pack(index, packed(address)))
        except OSError as e:
            log.error("a pin could not be taken away: %s", e)

    def replace(self, fd: int) -> None:
        """Another life of the server has another map."""
        os.close(self._map.fd)
        self._map = bpf.Map(fd, "pins", 0)


class Gateway:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._server: socket.socket | None = None
        self._pinner: MapPinner | None = None
        self._table: Table | None = None
        self._proxy_port = 0
        self._left_out = 0
        self.ended = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self._accept)
        alone = 0.0
        while not self.ended.is_set():
            try:
                async with asyncio.timeout(LOOK_S):
                    await self.ended.wait()
            except TimeoutError:
                needed = self._server is not None or bool(self._table and self._table.indexes)
                alone = 0.0 if needed else alone + LOOK_S
                if alone >= ALONE_S:
                    return

    def _accept(self) -> None:
        """The newest server counts."""
        try:
            connected, _ = self._control.accept()
        except OSError:
            return
        self._leave()
        connected.setblocking(False)
        self._server = connected
        asyncio.get_running_loop().add_reader(connected, self._readable)

    def _leave(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server)
            self._server.close()
            self._server = None

    def _readable(self) -> None:
        assert self._server
        try:
            data, ancillary, _, _ = self._server.recvmsg(
                p.MAX_MESSAGE, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._leave()
            return
        fds = [fd for _, _, raw in ancillary for fd in array.array("i", raw)]
        try:
            message = p.to_gateway(data)
        except msgspec.MsgspecError as e:
            log.error("not understood: %s", e)
            self._leave()
            return
        self._take(message, fds)

    def _take(self, message: p.ToGateway, fds: list[int]) -> None:
        if isinstance(message, p.Settings):
            task = asyncio.get_running_loop().create_task(self._settings(message, fds))
            task.add_done_callback(_told)
        elif isinstance(message, p.End):
            self.ended.set()
        elif self._table is None:
            self._leave()
        elif isinstance(message, p.SetPolicy):
            self._table.set(message)
            self._say(p.Done(message.sequence))
        else:
            self._table.remove(message.index)

    async def _settings(self, message: p.Settings, fds: list[int]) -> None:
        if self._table is None and message.listeners:
            await self._begin(message, fds)
        elif fds:
            assert self._pinner
            self._pinner.replace(fds[0])
            for fd in fds[1:]:
                os.close(fd)
        known = self._table.indexes if self._table else []
        self._say(p.Welcome(p.VERSION, os.getpid(), known, self._table is not None, self._proxy_port))

    async def _begin(self, message: p.Settings, fds: list[int]) -> None:
        n = message.listeners
        self._pinner = MapPinner(fds[0])
        self._table = Table(self._pinner, self._say)
        self._table.queries_per_second = message.queries_per_second
        self._table.new_names = message.new_names_per_minute
        sockets = [socket.socket(fileno=fd) for fd in fds[1:]]
        for sock in sockets:
            sock.setblocking(False)
        self._proxy_port = sockets[2 * n].getsockname()[1]
        resolver = Resolver(self._table, message.upstreams)
        await resolver.start(sockets[:n], sockets[n : 2 * n])
        proxy = Proxy(self._table, resolver, connections=message.connections)
        await proxy.start(sockets[2 * n :])

    def _say(self, message: p.FromGateway) -> None:
        """A server that does not read loses events, never answers: those it waits for."""
        if self._server is None:
            return
        try:
            self._server.send(p.encode(message))
        except BlockingIOError:
            self._left_out += 1
        except OSError:
            self._leave()


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (e := task.exception()) is not None:
        log.error("the gateway's settings: %r", e)


def drop_privileges() -> None:
    """What it needs of the kernel it has by descriptors."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)


def main() -> None:
    """`python -m dsec.network.gateway FD`: descriptor of the socket that listens for servers."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s gateway %(levelname)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path("/proc/self/comm").write_text("dsec-gateway")
    dns.rdata.load_all_types()  # type: ignore[no-untyped-call]  # before it can read no more files
    bpf.available()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    control = socket.socket(fileno=int(sys.argv[1]))
    control.setblocking(False)
    if os.geteuid() == 0:
        drop_privileges()

    async def go() -> None:
        await Gateway(control).run()

    uvloop.run(go())
    sys.exit(0)
