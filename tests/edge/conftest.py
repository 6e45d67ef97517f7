"""An edge on the fake backend, and what its tests ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from dsec.backends.base import ImageConfig, LayerRef
from dsec.backends.fake import FakeBackend
from dsec.core.errors import UnknownLayer
from dsec.core.ids import new_sandbox_id
from dsec.core.network import Service
from dsec.core.specs import SandboxSpec
from dsec.edge.config import EdgeConfig
from dsec.edge.service import EdgeService
from dsec.wire import aether as w
from dsec.wire import edge as m
from dsec.wire.local import LocalBus, LocalStream


class Stack:
    def __init__(self) -> None:
        self.layers = [LayerRef(digest="d", path="/nowhere")]
        self.config = ImageConfig(env={"PATH": "/bin"}, shell=["/bin/sh"])


class FakeLayers:
    def resolve(self, image: str, layers: list[str]) -> Stack:
        if image == "unknown":
            raise UnknownLayer(f"no layer {image}")
        return Stack()


SERVICES = {"pypi": Service(domains=["pypi.example"], env={"PIP_INDEX_URL": "http://pypi.example"})}


class Node:
    """One edge and its bus; `crash` and `start` again on the same host and data."""

    def __init__(self, data: Path, backend: FakeBackend, **config: Any) -> None:
        self.data = data
        self.backend = backend
        self.config = EdgeConfig(
            **{"memory_reserve_mb": 0, "launches_at_once": 64, "services": SERVICES, **config}
        )
        self.bus = LocalBus()
        self.count = 0

    async def start(self) -> EdgeService:
        self.bus = LocalBus()
        self.edge = EdgeService(
            self.bus,
            edge_id="e1",
            data=self.data,
            backends={"fake": self.backend},
            layers=FakeLayers(),
            config=self.config,
        )
        await self.edge.start()
        return self.edge

    async def stop(self, *, keep: bool = False) -> None:
        await self.bus.close()
        await self.edge.stop(keep=keep)

    async def crash(self) -> None:
        """What a SIGKILL leaves: nothing of the edge runs any more, and nothing was said to anybody."""
        edge = self.edge
        for closing in (edge.ttls, edge.retention, edge.watchdog):
            closing.close()
        for sandbox in edge.sandboxes.values():
            sandbox.launch = None
            if (connection := sandbox.connection) is not None:
                sandbox.connection = None
                connection.close()
        edge.lifecycle.feed = lambda *_: None  # type: ignore[method-assign]
        await self.bus.close()
        await edge.tasks.cancel()
        edge.operations.close()
        edge.records.close()

    async def ask(self, verb: str, message: Any) -> Any:
        return await self.bus.request(f"edge.e1.{verb}", message)

    async def create(self, sandbox_id: str = "", deadline_s: float = 30.0, **spec: Any) -> m.SandboxInfo:
        full = SandboxSpec(**{"backend": "fake", "image": "base", **spec})
        message = m.CreateSandbox(
            sandbox_id=sandbox_id or new_sandbox_id("e1"), spec=full, deadline_s=deadline_s
        )
        info: m.SandboxInfo = await self.ask("create", message)
        return info

    async def stop_sandbox(self, sandbox_id: str) -> m.SandboxInfo:
        info: m.SandboxInfo = await self.ask("stop", m.StopSandbox(sandbox_id=sandbox_id))
        return info

    async def get(self, sandbox_id: str) -> m.SandboxInfo:
        info: m.SandboxInfo = await self.ask("get", m.SandboxId(sandbox_id=sandbox_id))
        return info

    def op_id(self) -> str:
        self.count += 1
        return f"op-{self.count}"

    async def shell(self, sandbox_id: str, command: str, **how: Any) -> m.OperationInfo:
        request = shell(how.pop("op_id", "") or self.op_id(), command, **how.pop("request", {}))
        info: m.OperationInfo = await self.ask(
            "operate", m.Operate(sandbox_id=sandbox_id, request=request, **how)
        )
        return info

    async def operate(self, sandbox_id: str, request: w.AnyRequest, **how: Any) -> m.OperationInfo:
        info: m.OperationInfo = await self.ask(
            "operate", m.Operate(sandbox_id=sandbox_id, request=request, **how)
        )
        return info

    async def operation(self, sandbox_id: str, op_id: str, **how: Any) -> m.OperationInfo:
        info: m.OperationInfo = await self.ask(
            "operation", m.GetOperation(sandbox_id=sandbox_id, op_id=op_id, **how)
        )
        return info

    async def attach(self, sandbox_id: str, op_id: str, **how: Any) -> LocalStream:
        return await self.bus.stream(
            "edge.e1.attach", m.AttachOperation(sandbox_id=sandbox_id, op_id=op_id, **how)
        )


def shell(op_id: str, command: str, **how: Any) -> w.Shell:
    fields: dict[str, Any] = {
        "session": "default",
        "cwd": "",
        "env": {},
        "user": "",
        "stdin": False,
        "background": False,
        "timeout_ms": 0,
        "output_limit": m.DEFAULT_OUTPUT_LIMIT,
        "kill_at_limit": False,
    }
    return w.Shell(op_id=op_id, command=command.encode(), **{**fields, **how})


async def read_all(stream: LocalStream) -> tuple[bytes, bytes, m.OperationInfo]:
    """All output of an attached stream, and the end. Checks that offsets follow each other."""
    got: dict[int, list[bytes]] = {}
    at: dict[int, int] = {}
    async for frame in stream:
        if isinstance(frame, m.Output):
            assert frame.offset == at.get(frame.stream, frame.offset)
            at[frame.stream] = frame.offset + len(frame.data)
            got.setdefault(frame.stream, []).append(frame.data)
        elif isinstance(frame, m.OperationEnd):
            out, err, content = (b"".join(got.get(n, [])) for n in (1, 2, 3))
            return out or content, err, frame.operation
    raise AssertionError("the stream ended before the operation")


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path, FakeBackend())
    await made.start()
    yield made
    await made.stop()
    assert made.backend.host.sandboxes == {}, "sandboxes are left on the host"
    assert made.edge.slots.held == frozenset(), "slots are still held"
