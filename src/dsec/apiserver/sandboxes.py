"""Creation, alone and in batches; lists, stats, the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from base64 import b32encode
from collections.abc import AsyncGenerator, Iterator
from hashlib import sha256
from typing import Final

import msgspec

from dsec.apiserver.access import Access, scoped
from dsec.apiserver.http import ClientGone, Request, Stream, answer, error_body
from dsec.apiserver.watchdog import WhileConnected
from dsec.core.errors import AdmissionRefused, DSecError, Internal, InvalidArgument, NotFound
from dsec.core.ids import new_sandbox_id
from dsec.core.specs import validate
from dsec.wire import api
from dsec.wire import edge as m
from dsec.wire.layers import PackDiff

log = logging.getLogger(__name__)
MAX_KEY: Final = 255
TRIES: Final = 3
"""Nodes asked before a refusal is the answer."""
QUIET_S: Final = 15.0
"""A batch that has nothing to say sends an empty line, so that no proxy cuts it."""
MAX_PAGE: Final = 1000
_create = msgspec.json.Decoder(api.CreateRequest)
_batch = msgspec.json.Decoder(api.BatchRequest)
_cancel = msgspec.json.Decoder(api.CancelRequest)
_pack = msgspec.json.Decoder(api.PackRequest)
_line = msgspec.json.Encoder().encode


class Sandboxes:
    def __init__(self, access: Access) -> None:
        self._access = access
        self._undoing: set[asyncio.Task[None]] = set()

    # --- one ---

    async def create(self, r: Request) -> None:
        body = await r.json(_create)
        r.note(project=body.spec.project, image=body.spec.image)
        r.principal.check(body.spec.project)
        validate(body.spec)
        key = r.header(b"idempotency-key")
        if key is None:
            await self._create_anew(r, body)
        else:
            # Its caller may come back for it, so it is finished even if the connection breaks.
            sandbox_id = self._keyed(r, key)
            task = asyncio.create_task(self._ask(sandbox_id, body, r.principal.id))
            self._undoing.add(done := asyncio.create_task(_settle(task)))
            done.add_done_callback(self._undoing.discard)
            async with WhileConnected(r):
                info = await asyncio.shield(task)
            r.note(sandbox=info.id)
            await answer(r, info, 201)

    async def _create_anew(self, r: Request, body: api.CreateRequest) -> None:
        info: m.SandboxInfo | None = None
        watch = WhileConnected(r, delay_s=0)
        try:
            async with watch:
                info = await self._place(body, r.principal.id)
            r.note(sandbox=info.id)
            await answer(r, info, 201)
        except ClientGone:
            if info is not None:
                self._undo([info.id])
            raise

    async def _place(self, body: api.CreateRequest, principal: str) -> m.SandboxInfo:
        """On a node; on another one when the first refuses."""
        refused: frozenset[str] = frozenset()
        while True:
            edge = self._access.placement.place(body.spec, refused)
            try:
                return await self._ask(new_sandbox_id(edge), body, principal)
            except AdmissionRefused:
                refused |= {edge}
                if len(refused) >= min(TRIES, len(self._access.placement.edges)):
                    raise

    async def _ask(self, sandbox_id: str, body: api.CreateRequest, principal: str) -> m.SandboxInfo:
        message = m.CreateSandbox(
            sandbox_id=sandbox_id, spec=body.spec, principal=principal, deadline_s=body.timeout_s
        )
        info: m.SandboxInfo = await self._access.ask(sandbox_id, "create", message)
        return info

    def _keyed(self, r: Request, key: str) -> str:
        """The sandbox of a key is always the same, so its edge sees a repeat without any record of keys."""
        if not 1 <= len(key) <= MAX_KEY:
            raise InvalidArgument(f"Idempotency-Key: 1 to {MAX_KEY} characters")
        whole = f"{r.principal.id}\0{key}"
        edge = self._access.placement.place_by_key(whole)
        digest = sha256(f"{edge}\0{whole}".encode()).digest()
        return f"sbx-{edge}-{b32encode(digest[:10]).decode().lower()[:12]}"

    # --- many ---

    async def create_batch(self, r: Request) -> None:
        """One line per sandbox, as it becomes ready or fails."""
        body = await r.json(_batch)
        r.note(project=body.spec.project, image=body.spec.image, count=body.count, batch=body.name)
        r.principal.check(body.spec.project)
        validate(body.spec)
        one = api.CreateRequest(spec=body.spec, timeout_s=body.timeout_s)
        out = Stream(r, b"application/x-ndjson", ((b"x-accel-buffering", b"no"),))
        batch = _Batch(self, r, body, one)
        unsent: list[str] = []
        try:
            async with WhileConnected(r, delay_s=0):
                async with contextlib.aclosing(batch.lines()) as lines:
                    await out.start()
                    async for ready in lines:
                        unsent = [line.sandbox.id for line in ready if line.sandbox is not None]
                        await out.write(b"".join(_line(line) + b"\n" for line in ready) or b"\n")
                        unsent = []
                await out.end()
        except ClientGone:
            if not body.name:
                self._undo(unsent + batch.unsent())
            raise

    async def cancel(self, r: Request) -> None:
        """Undo what was created by key or name."""
        body = await r.json(_cancel)
        keys = [body.key] if body.key else []
        keys += [_member(body.name, i) for i in range(body.count)] if body.name else []
        ids = {self._keyed(r, key) for key in keys}.difference(body.keep)
        gate = asyncio.Semaphore(64)
        stopped = await asyncio.gather(*(self._cancel_one(i, gate) for i in sorted(ids)))
        await answer(r, api.Cancelled(stopped=[i for i in stopped if i is not None]))

    async def _cancel_one(self, sandbox_id: str, gate: asyncio.Semaphore) -> str | None:
        async with gate:
            with contextlib.suppress(NotFound):
                await self._stop(sandbox_id, "cancelled")
                return sandbox_id
        return None

    def _undo(self, sandbox_ids: list[str]) -> None:
        """Sandboxes that nobody was told of are stopped."""
        for sandbox_id in sandbox_ids:
            task = asyncio.create_task(_settle(self._stop(sandbox_id, "cancelled")))
            self._undoing.add(task)
            task.add_done_callback(self._undoing.discard)

    async def close(self) -> None:
        for task in self._undoing:
            task.cancel()
        await asyncio.gather(*self._undoing, return_exceptions=True)

    # --- the rest ---

    async def _stop(self, sandbox_id: str, reason: str) -> m.SandboxInfo:
        message = m.StopSandbox(sandbox_id=sandbox_id, reason=reason)
        info: m.SandboxInfo = await self._access.ask(sandbox_id, "stop", message)
        return info

    async def get(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        await answer(r, await self._access.ask(sandbox_id, "get", m.SandboxId(sandbox_id=sandbox_id)))

    async def delete(self, r: Request) -> None:
        """Stop it; answers when it is gone. A repeat is no error."""
        sandbox_id = await self._access.sandbox(r)
        async with WhileConnected(r):
            info = await self._stop(sandbox_id, r.text("reason", "requested")[:200])
        await answer(r, info)

    async def stats(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        message = m.SandboxId(sandbox_id=sandbox_id)
        await answer(r, await self._access.ask(sandbox_id, "sandbox_stats", message))

    async def pack(self, r: Request) -> None:
        """Its writable layer as a layer; answers when that can be used."""
        sandbox_id = await self._access.sandbox(r)
        body = await r.json(_pack)
        fields = msgspec.structs.asdict(body)
        message = PackDiff(sandbox_id=sandbox_id, principal=r.principal.name, **fields)
        await answer(r, await self._access.ask(sandbox_id, "pack", message))

    async def list(self, r: Request) -> None:
        limit = r.number("limit", 100, 1, MAX_PAGE)
        message = m.ListSandboxes(
            project=scoped(r.principal, r.text("project") or None),
            task=r.text("task") if "task" in r.query else None,
            labels=dict(_pairs(r.texts("label"))),
            states=_states(r.texts("state")),
            after=r.text("after"),
            limit=limit,
        )
        found: list[m.SandboxInfo] = []
        for edge in self._access.placement.edges:
            page: m.SandboxPage = await self._access.bus.request(f"edge.{edge}.list", message)
            if len(self._access.placement.edges) == 1:
                await answer(r, page)
                return
            found += page.sandboxes
        found.sort(key=lambda s: s.id)
        more = found[limit - 1].id if len(found) >= limit else ""
        await answer(r, m.SandboxPage(sandboxes=found[:limit], next=more))


class _Batch:
    """Creations side by side, and their lines as they come."""

    def __init__(self, owner: Sandboxes, r: Request, body: api.BatchRequest, one: api.CreateRequest) -> None:
        self._owner = owner
        self._r = r
        self._body = body
        self._one = one
        self._ready: asyncio.Queue[api.BatchLine] = asyncio.Queue()

    async def lines(self) -> AsyncGenerator[list[api.BatchLine], None]:
        """Those that came at once together; an empty list when it was quiet for long."""
        tasks = {asyncio.create_task(self._make(i)) for i in range(self._body.count)}
        try:
            left = self._body.count
            while left:
                try:
                    async with asyncio.timeout(QUIET_S):
                        ready = [await self._ready.get()]
                except TimeoutError:
                    yield []
                    continue
                while not self._ready.empty():
                    ready.append(self._ready.get_nowait())
                left -= len(ready)
                yield ready
        finally:
            if self._body.name:
                self._owner._undoing |= tasks
                for task in tasks:
                    task.add_done_callback(self._owner._undoing.discard)
            else:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, index: int) -> None:
        owner, principal = self._owner, self._r.principal.id
        try:
            if self._body.name:
                sandbox_id = owner._keyed(self._r, _member(self._body.name, index))
                info = await owner._ask(sandbox_id, self._one, principal)
            else:
                info = await owner._place(self._one, principal)
            line = api.BatchLine(index=index, sandbox=info)
        except DSecError as e:
            line = api.BatchLine(index=index, error=error_body(e))
        except Exception as e:
            log.exception("sandbox %d of a batch", index)
            line = api.BatchLine(index=index, error=error_body(Internal(repr(e))))
        self._ready.put_nowait(line)

    def unsent(self) -> list[str]:
        """Ready, and never told."""
        ids = []
        while not self._ready.empty():
            line = self._ready.get_nowait()
            if line.sandbox is not None:
                ids.append(line.sandbox.id)
        return ids


def _member(name: str, index: int) -> str:
    return f"batch\0{name}/{index}"  # no header can say this


async def _settle(work: asyncio.Task[m.SandboxInfo] | asyncio.Future[m.SandboxInfo] | object) -> None:
    """Wait for what nobody waits for any more; its failure is the edge's to remember."""
    try:
        await work  # type: ignore[misc]
    except DSecError as e:
        log.info("%s: %s", e.code, e.message)


def _pairs(labels: list[str]) -> Iterator[tuple[str, str]]:
    for label in labels:
        key, equals, value = label.partition("=")
        if not equals:
            raise InvalidArgument(f"label: {label[:80]!r}: KEY=VALUE")
        yield key, value


def _states(states: list[str]) -> list[str]:
    known = m.State.__args__  # type: ignore[attr-defined]
    for state in states:
        if state not in known:
            raise InvalidArgument(f"state: {state[:80]!r} is none of {', '.join(known)}")
    return states
