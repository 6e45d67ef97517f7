"""One rig per backend: the conformance suite asks the same of each."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.backends.inside import Inside
from tests.backends.root import build_root, image_of

from dsec.backends.base import Backend, Handle, ImageConfig, LaunchSpec, LayerRef
from dsec.backends.container.backend import ContainerBackend
from dsec.backends.fake import FakeBackend, FakeHost
from dsec.core.ids import new_edge_id, new_sandbox_id
from dsec.core.specs import SandboxSpec, validate
from dsec.linux.probe import overlay_by_fd

KERNEL = pytest.mark.kernel
WHY_NO_FD = overlay_by_fd()
BY_DESCRIPTOR = pytest.mark.skipif(bool(WHY_NO_FD), reason=f"no overlay by descriptor here: {WHY_NO_FD}")
CONTAINERS = [
    pytest.param("fd", marks=[KERNEL, BY_DESCRIPTOR], id="container-fd"),
    pytest.param("staged", marks=KERNEL, id="container-staged"),
]


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def base_layer(tmp_path_factory: pytest.TempPathFactory) -> LayerRef:
    where = tmp_path_factory.mktemp("base")
    build_root(where / "root")
    return image_of(where / "root", where / "base.erofs")


class Rig:
    """A backend, how to make it anew, and what was launched on it."""

    def __init__(self, kind: str, data: Path, base: LayerRef | None) -> None:
        self.kind = kind
        self.data = data
        self.base = base or LayerRef(digest="base", path="/nowhere")
        self.edge_id = new_edge_id()
        self.host = FakeHost()
        self.slots = itertools.count(int.from_bytes(os.urandom(2)) % 1000)
        self.handles: list[Handle] = []
        self.sockets: list[socket.socket] = []
        self.backend: Any = self.make()

    def make(self) -> Backend:
        if self.kind == "fake":
            return FakeBackend(self.host)
        return ContainerBackend(data=self.data, edge_id=self.edge_id, mount_path=self.kind)

    async def restart(self) -> None:
        """Another edge takes over, on the same host and data."""
        await self.backend.close(keep=True)
        self.backend = self.make()
        await self.backend.open()

    def spec(
        self, layers: list[LayerRef] | None = None, env: dict[str, str] | None = None, **spec: Any
    ) -> LaunchSpec:
        full = validate(
            SandboxSpec(**{"image": "base", "disk_limit_mb": 256, "memory_limit_mb": 256, **spec})
        )
        return LaunchSpec(
            sandbox_id=new_sandbox_id(self.edge_id),
            slot=next(self.slots),
            spec=full,
            layers=layers if layers is not None else [self.base],
            image=ImageConfig(env=env or {}),
        )

    async def launch(self, spec: LaunchSpec | None = None, **how: Any) -> tuple[Handle, socket.socket]:
        handle, sock = await self.backend.launch(spec or self.spec(**how))
        self.handles.append(handle)
        self.sockets.append(sock)
        return handle, sock

    async def inside(self, **how: Any) -> tuple[Handle, Inside]:
        handle, sock = await self.launch(**how)
        inside = Inside(sock)
        await inside.greet()
        return handle, inside

    def files(self) -> set[str]:
        return {str(p.relative_to(self.data)) for p in self.data.rglob("*")}

    async def finish(self) -> None:
        for sock in self.sockets:
            sock.close()
        try:
            for handle in self.handles:
                await self.backend.destroy(handle)
            left = await self.backend.reclaim(frozenset())
        finally:
            await self.backend.close(keep=False)
        assert left == []
        assert self.files() == set(), "files are left below the data directory"


async def make_rig(kind: str, tmp_path: Path, base: LayerRef | None) -> AsyncIterator[Rig]:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    rig = Rig(kind, data, base)
    await rig.backend.open()
    yield rig
    await rig.finish()


@pytest.fixture(params=["fake", *CONTAINERS])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    base = None if request.param == "fake" else request.getfixturevalue("base_layer")
    async for rig in make_rig(request.param, tmp_path, base):
        yield rig


@pytest.fixture(params=CONTAINERS)
async def container(
    request: pytest.FixtureRequest, tmp_path: Path, base_layer: LayerRef
) -> AsyncIterator[Rig]:
    async for rig in make_rig(request.param, tmp_path, base_layer):
        yield rig


@pytest.fixture
def damaged(tmp_path: Path, base_layer: LayerRef) -> Path:
    """A copy of the base image, to be damaged."""
    copy = tmp_path / "damaged.erofs"
    shutil.copyfile(base_layer.path, copy)
    return copy
