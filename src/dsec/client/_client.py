"""The way in: one client for one server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import Final, Literal
from uuid import uuid4

import msgspec

from dsec.client._args import DSecContainerRunArgs
from dsec.client._http import RETRIES, Connection, pause, query, unanswered
from dsec.client._sandbox import Sandbox
from dsec.client._transport import AiohttpTransport, Transport, TransportError
from dsec.core.errors import DSecError, InvalidArgument, ProtocolError, from_code
from dsec.core.ids import edge_of
from dsec.wire import api
from dsec.wire.audit import AuditEntry, AuditPage
from dsec.wire.edge import NodeInfo, SandboxInfo, SandboxPage
from dsec.wire.layers import LayerInfo, LayerPage, Removed

DEFAULT_URL: Final = "http://127.0.0.1:7070"
PAGE: Final = 1000
MARGIN_S: Final = 15.0
"""The server ends a creation at its deadline; a client that hears nothing gives up so much later."""
OnError = Callable[[int, DSecError], None]
_line = msgspec.json.Decoder(api.BatchLine)


class DSecClient:
    """`await open()` … `await close()`, or `async with`. Server and token by argument or DSEC_URL and
    DSEC_TOKEN; `ca` or DSEC_CA: a file of certificates to trust for https, instead of the system's.

    `retries`: how often a request is repeated on a broken connection. That is safe: each carries an id by
    which the server sees a repeat, so that nothing runs twice.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        ca: str | None = None,
        retries: int = RETRIES,
        transport: Transport | None = None,
    ) -> None:
        self.url = url if url is not None else os.environ.get("DSEC_URL", DEFAULT_URL)
        if not self.url.startswith(("http://", "https://")):
            raise InvalidArgument(f"DSEC_URL {self.url!r}: http://HOST:PORT")
        self._token = token if token is not None else os.environ.get("DSEC_TOKEN", "")
        self._ca = ca if ca is not None else os.environ.get("DSEC_CA", "")
        self._retries = retries
        self._transport = transport
        self._open: Connection | None = None

    async def open(self) -> DSecClient:
        """Make the connection pool. The server is first spoken to at the first request."""
        if self._open is None:
            transport = self._transport or AiohttpTransport(self.url, self._ca)
            self._open = Connection(transport, self._token, self._retries)
        return self

    async def close(self) -> None:
        """Sandboxes stay; what was begun to undo cancelled calls is finished first."""
        if self._open is not None:
            connection, self._open = self._open, None
            await connection.close()

    async def __aenter__(self) -> DSecClient:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _connection(self) -> Connection:
        if self._open is None:
            raise InvalidArgument("the client is not open: await client.open(), or async with")
        return self._open

    # --- sandboxes ---

    async def run_container(
        self, args: DSecContainerRunArgs, timeout: float = 120.0, *, idempotency_key: str | None = None
    ) -> Sandbox:
        """A new sandbox, when it runs. Raises DeadlineExceeded after `timeout` seconds, and other
        DSecErrors.

        A repeat with the same `idempotency_key` gets the sandbox of the first. A call that is cancelled or
        fails without a key leaves no sandbox behind.
        """
        key = idempotency_key or uuid4().hex
        connection = self._connection
        try:
            info = await connection.call(
                SandboxInfo,
                "POST",
                "/v1/sandboxes",
                api.CreateRequest(spec=args.spec(), timeout_s=timeout),
                headers={"Idempotency-Key": key},
                timeout=timeout + MARGIN_S,
                outcome="a creation",
            )
        except (asyncio.CancelledError, DSecError) as e:
            if idempotency_key is None and not _refused(e):
                self._undo(connection, api.CancelRequest(key=key))
            raise
        return Sandbox(connection, info)

    async def run_many(
        self,
        args: DSecContainerRunArgs,
        count: int,
        *,
        timeout: float = 600.0,
        on_error: OnError | None = None,
    ) -> AsyncIterator[Sandbox]:
        """`count` new sandboxes, each as it becomes ready.

        Those that fail are told to `on_error` (index, error); without it they are raised at the end as one
        ExceptionGroup. When the iteration is left early, the sandboxes that it did not yield are undone.
        """
        batch = _Batch(self._connection, args, count, timeout)
        failed: list[DSecError] = []
        try:
            async for line in batch.lines():
                if line.sandbox is not None:
                    batch.kept.append(line.sandbox.id)
                    yield Sandbox(self._connection, line.sandbox)
                elif line.error is not None:
                    error = from_code(line.error.code, line.error.message, **line.error.details)
                    if on_error is not None:
                        on_error(line.index, error)
                    else:
                        failed.append(error)
        finally:
            if not batch.finished:
                self._undo(batch.connection, batch.cancel())
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {count} sandboxes were not made", failed)

    def _undo(self, connection: Connection, request: api.CancelRequest) -> None:
        connection.later(connection.call(api.Cancelled, "POST", "/v1/sandboxes:cancel", request))

    async def get_sandbox(self, sandbox_id: str) -> Sandbox:
        """Raises SandboxNotFound, WrongEdge, InvalidArgument."""
        edge_of(sandbox_id)
        info = await self._connection.call(SandboxInfo, "GET", f"/v1/sandboxes/{sandbox_id}")
        return Sandbox(self._connection, info)

    async def list_sandboxes(
        self,
        *,
        project: str | None = None,
        task: str | None = None,
        labels: dict[str, str] | None = None,
        states: Iterable[str] | None = None,
    ) -> AsyncIterator[SandboxInfo]:
        """All that match, in the order of their ids."""
        where = query(project=project, task=task)
        where += "".join(f"&{p}" for p in _repeated(labels or {}, states or ()))
        after = ""
        while True:
            rest = f"{where}&limit={PAGE}&after={after}".lstrip("?&")
            page = await self._connection.call(SandboxPage, "GET", f"/v1/sandboxes?{rest}")
            for info in page.sandboxes:
                yield info
            if not page.next:
                return
            after = page.next

    # --- the server ---

    async def node(self) -> NodeInfo:
        """The node: backends, counts, memory, load."""
        return await self._connection.call(NodeInfo, "GET", "/v1/node")

    async def audit(
        self,
        *,
        after: int = 0,
        sandbox: str = "",
        project: str = "",
        who: str = "",
        kind: str = "",
        what: str = "",
        since: float = 0.0,
    ) -> AsyncIterator[AuditEntry]:
        """The audit record from a position on: who did what, and what misbehaved inside.

        kind: action, misbehaviour or record. what: one (`operations.exec`), or with `.` or `*` at its end the
        beginning of one. since: Unix seconds. Raises PermissionDenied for another project than the token's.

        A project's token sees its project alone.
        """
        while True:
            rest = query(
                after=after, sandbox=sandbox, project=project, who=who, kind=kind, what=what,
                since=since, limit=PAGE,
            )  # fmt: skip
            page = await self._connection.call(AuditPage, "GET", f"/v1/audit{rest}")
            for entry in page.entries:
                yield entry
            if page.next == after:
                return
            after = page.next

    # --- layers ---

    async def layers(self, *, prefix: str = "", kind: str = "") -> AsyncIterator[LayerInfo]:
        """Layers that sandboxes can stand on, in the order of their names.

        prefix: how their names begin. kind: base, workspace, toolkit or snapshot.
        """
        after = ""
        while True:
            rest = query(prefix=prefix, kind=kind, after=after, limit=PAGE)
            page = await self._connection.call(LayerPage, "GET", f"/v1/layers{rest}")
            for layer in page.layers:
                yield layer
            if not page.next:
                return
            after = page.next

    async def layer(self, reference: str) -> LayerInfo:
        """One, by name, digest, or the first 12 and more figures of one. Raises UnknownLayer."""
        return await self._connection.call(LayerInfo, "GET", f"/v1/layer{query(ref=reference)}")

    async def remove_layer(self, reference: str) -> list[str]:
        """Takes a name away, and with the last one its layer; what is gone. Raises UnknownLayer, Conflict."""
        path = f"/v1/layer{query(ref=reference)}"
        return (await self._connection.call(Removed, "DELETE", path)).removed

    async def import_image(
        self,
        source: str,
        name: str = "",
        *,
        kind: Literal["base", "workspace", "toolkit", "snapshot"] = "base",
        labels: Mapping[str, str] | None = None,
        platform: str = "",
    ) -> LayerInfo:
        """An image of a registry (HOST/REPOSITORY:TAG), made a layer; what is there already is only named.

        Raises NotFound, Unauthenticated and PermissionDenied of the registry, Unavailable, LayerCorrupt.
        """
        body = api.ImportRequest(
            source=source, name=name, kind=kind, labels=dict(labels or {}), platform=platform
        )
        return await self._connection.call(LayerInfo, "POST", "/v1/layers:import", body)


class _Batch:
    """A batch has a name, so that a broken connection is taken up again without making anything twice."""

    def __init__(
        self, connection: Connection, args: DSecContainerRunArgs, count: int, timeout: float
    ) -> None:
        self.connection = connection
        self._request = api.BatchRequest(spec=args.spec(), count=count, name=uuid4().hex, timeout_s=timeout)
        self._done: set[int] = set()
        self.kept: list[str] = []
        self.finished = False

    def cancel(self) -> api.CancelRequest:
        return api.CancelRequest(name=self._request.name, count=self._request.count, keep=self.kept)

    async def lines(self) -> AsyncIterator[api.BatchLine]:
        """One for each index."""
        attempt = 0
        while not self.finished:
            try:
                async for line in self._once():
                    attempt = 0
                    yield line
            except TransportError as e:
                if attempt >= self.connection.retries:
                    raise unanswered(e, e.sent, "a batch") from e
                await pause(attempt)
                attempt += 1

    async def _once(self) -> AsyncIterator[api.BatchLine]:
        async with self.connection.stream("POST", "/v1/sandboxes:batch", self._request) as chunks:
            held = b""
            async for chunk in chunks:
                *whole, held = (held + chunk).split(b"\n")
                for text in whole:
                    if text and (line := _decode(text)).index not in self._done:
                        self._done.add(line.index)
                        self.finished = len(self._done) == self._request.count
                        yield line
        if not self.finished:
            raise TransportError("the batch ended early", sent=True)


def _decode(text: bytes) -> api.BatchLine:
    try:
        return _line.decode(text)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"the server's line was not understood: {e}") from e


def _refused(e: BaseException) -> bool:
    """The server answered that there is no sandbox."""
    return isinstance(e, DSecError) and e.code not in ("outcome_unknown", "deadline_exceeded", "unavailable")


def _repeated(labels: dict[str, str], states: Iterable[str]) -> list[str]:
    return [query(label=f"{k}={v}")[1:] for k, v in labels.items()] + [query(state=s)[1:] for s in states]
