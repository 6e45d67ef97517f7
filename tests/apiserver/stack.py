"""The whole stack above the backend seam: real HTTP on loopback, the real edge, the fake backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec.apiserver.app import ApiServer
from dsec.apiserver.limits import ApiLimits
from dsec.apiserver.server import Server, Tls
from dsec.audit.service import AuditService
from dsec.backends.base import ImageConfig, LayerRef
from dsec.backends.fake import FakeBackend
from dsec.client import DSecClient, DSecContainerRunArgs
from dsec.core.errors import UnknownLayer
from dsec.core.network import Service
from dsec.edge.config import EdgeConfig
from dsec.edge.service import EdgeService
from dsec.iam.tokens import TokenStore
from dsec.wire.local import LocalBus

SERVICES = {"pypi": Service(domains=["pypi.example"], env={"PIP_INDEX_URL": "http://pypi.example"})}


class _Stack:
    def __init__(self) -> None:
        self.layers = [LayerRef(digest="d", path="/nowhere")]
        self.config = ImageConfig(env={"PATH": "/bin"}, shell=["/bin/sh"])


class _Layers:
    def resolve(self, image: str, layers: list[str]) -> _Stack:
        if image == "unknown":
            raise UnknownLayer(f"no layer {image}")
        return _Stack()


class StackServer:
    """`start`, `stop`; `restart` is a server that comes back on the same port, data and host."""

    def __init__(
        self, data: Path, *, tls: Tls | None = None, limits: ApiLimits | None = None, **config: Any
    ) -> None:
        self.tls, self.limits = tls, limits
        self.data = data
        self.backend = FakeBackend()
        self.config = EdgeConfig(
            **{"memory_reserve_mb": 0, "launches_at_once": 64, "services": SERVICES, **config}
        )
        self.tokens = TokenStore(data / "iam.db")
        self.token = self.tokens.create("test")
        self.url = ""

    async def start(self, port: int = 0) -> None:
        self.bus = LocalBus()
        self.audit = AuditService(self.data / "audit")
        self.audit.start(self.bus)
        self.edge = EdgeService(
            self.bus,
            edge_id="e1",
            data=self.data,
            backends={"fake": self.backend},
            layers=_Layers(),
            config=self.config,
            audit=self.audit.record,
        )
        await self.edge.start()
        self.api = ApiServer(self.bus, self.tokens, edges=["e1"], audit=self.audit.record, limits=self.limits)
        await self.api.start()
        self.server = Server(self.api, self.tls)
        self.url = await self.server.start("127.0.0.1", port)

    def cut(self) -> None:
        """All connections break."""
        for connection in list(self.server._server.server_state.connections):
            connection.transport.abort()

    async def stop(self, *, keep: bool = False, graceful: bool = False) -> None:
        if not graceful:
            self.cut()
        await self.server.stop()
        await self.api.stop()
        await self.edge.stop(keep=keep)
        await self.audit.stop()
        await self.bus.close()

    async def restart(self, *, graceful: bool = False) -> None:
        port = int(self.url.rsplit(":", 1)[1])
        await self.stop(keep=True, graceful=graceful)
        await self.start(port)

    def client(self, **how: Any) -> DSecClient:
        return DSecClient(url=self.url, token=how.pop("token", self.token), **how)


def args(**fields: Any) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(**{"container_image": "base", "backend": "fake", **fields})
