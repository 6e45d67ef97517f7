"""All services of one machine in one process: the composition root."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

from dsec.apiserver.app import ApiServer
from dsec.apiserver.server import Server
from dsec.audit.service import AuditService
from dsec.backends.container.backend import ContainerBackend
from dsec.cli.config import ServerConfig
from dsec.core.errors import DSecError
from dsec.edge.config import EdgeConfig
from dsec.edge.service import EdgeService
from dsec.iam.tokens import TokenStore
from dsec.layers.build import Builder
from dsec.layers.importer import Importer
from dsec.layers.pack import Packer
from dsec.layers.resolver import Resolver
from dsec.layers.service import LayerService
from dsec.layers.store import LayerStore
from dsec.wire.local import LocalBus

log = logging.getLogger(__name__)
NOTE_EVERY_S: Final = 3600.0


class Node:
    """Edge, apiserver and what they stand on. `start`, `listen`, `stop`, in this order, once each."""

    def __init__(
        self,
        data: Path,
        edge_id: str,
        *,
        max_sandboxes: int,
        mount_path: str,
        prefetch: bool = True,
        store: Path | None = None,
        config: ServerConfig | None = None,
    ) -> None:
        """store: where layers lie, shared with other nodes perhaps; below `data` when it is not given."""
        self.data = data
        self.config = config or ServerConfig()
        network = self.config.network
        self.bus = LocalBus()
        store = store or data / "store"
        self.store = LayerStore(store)
        builder = Builder(self.store)
        importer = Importer(builder)
        local = store.stat().st_dev == data.stat().st_dev
        self.layers = Resolver(self.store, importer, local=local)
        self._layer_service = LayerService(self.store, importer)
        self.tokens = TokenStore(data / "iam.db")
        self.audit = AuditService(data / "audit")
        self.container = ContainerBackend(
            data=data, edge_id=edge_id, mount_path=mount_path, prefetch=prefetch, network=network
        )
        self.edge = EdgeService(
            self.bus,
            edge_id=edge_id,
            data=data,
            backends={"container": self.container},
            layers=self.layers,
            config=EdgeConfig(
                max_sandboxes=max_sandboxes, services=network.services, drop_denied=network.drop
            ),
            packer=Packer(builder),
            audit=self.audit.record,
        )
        self.api = ApiServer(
            self.bus, self.tokens, edges=[edge_id], audit=self.audit.record, limits=self.config.limits
        )
        self.server: Server | None = None
        self._edge_started = False
        self._noting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._layer_service.serve(self.bus)
        self.audit.start(self.bus)
        self._edge_started = True
        await self.edge.start()
        await self.api.start()
        self._noting = asyncio.create_task(self._note_layers())

    async def _note_layers(self) -> None:
        """What sandboxes stand on is not collected, also by another node's collection."""
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            try:
                await asyncio.to_thread(self.store.use, self.container.layers.in_use())
            except DSecError as e:
                log.error("noting which layers are in use: %s", e)

    def first_token(self, path: Path | None) -> str | None:
        """Made at the first start; None when there is one already."""
        token = self.tokens.first_token()
        if token and path:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as f:
                f.write(token + "\n")
        return token

    async def listen(self, host: str, port: int) -> str:
        """Serve HTTP; the URL where it can be reached."""
        self.server = Server(self.api, self.config.tls)
        return await self.server.start(host, port)

    async def stop(self, *, keep: bool) -> None:
        if self.server:
            await self.server.stop()
        if self._noting:
            self._noting.cancel()
        await self.api.stop()
        if self._edge_started:
            await self.edge.stop(keep=keep)
        await self.audit.stop()
        await self.bus.close()
        await self.layers.close()
        self.tokens.close()
        self.store.close()
