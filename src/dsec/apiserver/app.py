"""The apiserver as a bare ASGI application: who asks, which route, and every error as its status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from dsec.apiserver.access import Access
from dsec.apiserver.audit import Audit
from dsec.apiserver.files import Files
from dsec.apiserver.http import (
    ClientGone,
    OperationFailed,
    Receive,
    Request,
    Scope,
    Send,
    answer_error,
)
from dsec.apiserver.layers import Layers
from dsec.apiserver.limits import ApiLimits, Rates
from dsec.apiserver.network import Network
from dsec.apiserver.node import NodeApi
from dsec.apiserver.openapi import document
from dsec.apiserver.operations import Operations
from dsec.apiserver.router import Route, Router
from dsec.apiserver.routes import routes
from dsec.apiserver.sandboxes import Sandboxes
from dsec.apiserver.sockets import Sockets, refuse
from dsec.core.errors import DSecError, Internal, InvalidArgument, NotFound, Unauthenticated
from dsec.iam.tokens import Principal, TokenStore
from dsec.placement.service import Placement
from dsec.wire.audit import Sink
from dsec.wire.bus import Bus

log = logging.getLogger(__name__)


class MethodNotAllowed(InvalidArgument):
    """Of HTTP alone: no caller of the SDK can meet it."""

    http_status = 405


class ApiServer:
    """Keeps no state of any sandbox: an id names its edge."""

    def __init__(
        self,
        bus: Bus,
        tokens: TokenStore,
        *,
        edges: Sequence[str],
        audit: Sink | None = None,
        limits: ApiLimits | None = None,
    ) -> None:
        self.limits = limits or ApiLimits()
        self._rates = Rates(self.limits)
        self._tokens = tokens
        self._placement = Placement(bus, edges)
        access = Access(bus, self._placement)
        self._audit = Audit(access, audit)
        self._sandboxes = Sandboxes(access)
        operations = Operations(access)
        node = NodeApi(access)
        table = routes(
            self._sandboxes,
            operations,
            Files(access, operations),
            Sockets(access),
            Layers(access),
            node,
            self._audit,
            Network(access),
        )
        self.document = node.document = document(table)
        """OpenAPI, as JSON."""
        self._router = Router(table)

    async def start(self) -> None:
        await self._placement.start()

    async def stop(self) -> None:
        await self._sandboxes.close()
        await self._placement.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            await self._http(Request(scope, receive, send))
        elif kind == "websocket":
            await self._socket(Request(scope, receive, send))

    async def _http(self, r: Request) -> None:
        started = False
        send = r.send

        async def watched(message: object) -> None:
            nonlocal started
            started = True
            await send(message)  # type: ignore[arg-type]

        r.send = watched
        try:
            await self._handle(r, r.scope["method"])
        except ClientGone:
            await _cut(r)
        except asyncio.CancelledError:
            # The server stops. To its client that is a lost connection, which it takes up again.
            await _cut(r)
            raise
        except OperationFailed as e:
            if started:
                await _cut(r)
            else:
                await answer_error(r, e.error, e.operation)
        except DSecError as e:
            if started:
                await _cut(r)
            else:
                await answer_error(r, e)
        except Exception:
            log.exception("%s %s", r.scope["method"], r.scope["path"])
            if started:
                await _cut(r)
            else:
                await answer_error(r, Internal("the server failed; its log says more"))

    async def _handle(self, r: Request, method: str) -> None:
        """By its handler; then one entry in the audit record, whatever came of it."""
        route = self._route(r, method)
        outcome = "cancelled"
        try:
            await route.handler(r)
            outcome = "ok"
        except ClientGone:
            outcome = "client_gone"
            raise
        except OperationFailed as e:
            outcome = e.error.code
            raise
        except DSecError as e:
            outcome = e.code
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            if not route.public:
                self._audit.acted(r, route, outcome)

    async def _socket(self, r: Request) -> None:
        try:
            await self._handle(r, "WS")
        except (ClientGone, ConnectionError):
            pass
        except OperationFailed as e:
            await _refuse(r, e.error)
        except DSecError as e:
            await _refuse(r, e)
        except Exception as e:
            if not isinstance(e, OSError):  # uvicorn's way to say that the client has gone
                log.exception("WebSocket %s", r.scope["path"])
                await _refuse(r, Internal("the server failed; its log says more"))

    def _route(self, r: Request, method: str) -> Route:
        """Raises Unauthenticated before anything is said about the path."""
        route, params, methods = self._router.find(method, r.scope["path"])
        if route is None or not route.public:
            r.principal = self._known(r)
        if route is None:
            if methods:
                raise MethodNotAllowed(f"{method} is not for this path: {', '.join(methods)}")
            raise NotFound(f"no such path: {r.scope['path'][:200]!r}; see /openapi.json")
        if r.scope["query_string"]:
            for name in r.query:
                if name not in route.names:
                    raise InvalidArgument(f"no such query parameter: {name[:80]!r}")
        r.params = params
        return route

    def _known(self, r: Request) -> Principal:
        """Raises Unauthenticated, and TooManyRequests."""
        client = r.scope.get("client")
        address = client[0] if client else ""
        try:
            principal = self._principal(r)
        except Unauthenticated as e:
            self._rates.stranger(address)  # who has a good token behind the same address is not held off
            self._audit.refused(r, e.message)
            raise
        self._rates.request(principal.id)
        return principal

    def _principal(self, r: Request) -> Principal:
        header = r.header(b"authorization")
        if header is None:
            raise Unauthenticated("no bearer token: set DSEC_TOKEN, or send Authorization: Bearer")
        kind, _, token = header.partition(" ")
        if kind.lower() != "bearer":
            raise Unauthenticated("Authorization: a bearer token was expected")
        return self._tokens.verify(token.strip())


async def _cut(r: Request) -> None:
    """End the connection: an answer that has begun and cannot be finished must not look whole."""
    abort = r.scope.get("extensions", {}).get("dsec.abort")
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the protocol is told


async def _refuse(r: Request, e: DSecError) -> None:
    with contextlib.suppress(ClientGone, OSError):
        await refuse(r, e)
