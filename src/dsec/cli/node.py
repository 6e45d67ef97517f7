"""All services of one machine in one process: the composition root."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from dsec.apiserver.app import ApiServer
from dsec.apiserver.server import Server
from dsec.backends.container.backend import ContainerBackend
from dsec.edge.config import EdgeConfig
from dsec.edge.service import EdgeService
from dsec.iam.tokens import TokenStore
from dsec.layers.store import LayerStore
from dsec.wire.local import LocalBus


class Node:
    """Edge, apiserver and what they stand on. `start`, `listen`, `stop`, in this order, once each."""

    def __init__(self, data: Path, edge_id: str, *, max_sandboxes: int, mount_path: str) -> None:
        self.data = data
        self.bus = LocalBus()
        self.layers = LayerStore(data / "store")
        self.tokens = TokenStore(data / "iam.db")
        self.container = ContainerBackend(data=data, edge_id=edge_id, mount_path=mount_path)
        self.edge = EdgeService(
            self.bus,
            edge_id=edge_id,
            data=data,
            backends={"container": self.container},
            layers=self.layers,
            config=EdgeConfig(max_sandboxes=max_sandboxes),
        )
        self.api = ApiServer(self.bus, self.tokens, edges=[edge_id])
        self.server: Server | None = None
        self._edge_started = False

    async def start(self) -> None:
        self.bus.serve("layers.list", self._list_layers)
        self._edge_started = True
        await self.edge.start()
        await self.api.start()

    async def _list_layers(self, query: Any) -> Any:
        return await asyncio.to_thread(self.layers.list)

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
        self.server = Server(self.api)
        return await self.server.start(host, port)

    async def stop(self, *, keep: bool) -> None:
        if self.server:
            await self.server.stop()
        await self.api.stop()
        if self._edge_started:
            await self.edge.stop(keep=keep)
        await self.bus.close()
        self.tokens.close()
        self.layers.close()
