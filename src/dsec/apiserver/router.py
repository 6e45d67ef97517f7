"""Routes as data: what the router walks, and what the OpenAPI document is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from dsec.apiserver.http import Request

Handler = Callable[[Request], Awaitable[None]]


@dataclass(frozen=True)
class Query:
    """One query parameter."""

    name: str
    kind: str = "string"
    """string, integer, number, boolean, path."""
    about: str = ""
    required: bool = False
    repeated: bool = False


@dataclass(frozen=True)
class Route:
    method: str
    """Or WS."""
    path: str
    handler: Handler
    summary: str
    answers: Any = None
    """Struct of the answer, or a media type."""
    body: Any = None
    query: tuple[Query, ...] = ()
    headers: tuple[Query, ...] = ()
    status: tuple[int, ...] = (200,)
    """Of success."""
    public: bool = False
    """Needs no token."""
    quiet: bool | None = None
    """Leaves no entry in the audit record; by default what only looks (GET)."""
    names: frozenset[str] = field(init=False)
    action: str = field(init=False)
    """Its name in the audit record, such as `sandboxes.create`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(q.name for q in self.query))
        object.__setattr__(self, "action", self.handler.__qualname__.lower())

    @property
    def audited(self) -> bool:
        return self.method != "GET" if self.quiet is None else not self.quiet


class _Node:
    __slots__ = ("any", "children", "routes")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.routes: dict[str, Route] = {}


class Router:
    def __init__(self, routes: list[Route]) -> None:
        self._root = _Node()
        for route in routes:
            node = self._root
            for part in route.path.split("/")[1:]:
                if part.startswith("{"):
                    node.any = node.any or _Node()
                    node = node.any
                else:
                    node = node.children.setdefault(part, _Node())
            node.routes[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route | None, tuple[str, ...], list[str]]:
        """The route, what stands for its parameters, and (when the path alone is known) its methods."""
        node: _Node | None = self._root
        params: list[str] = []
        for part in path.split("/")[1:]:
            assert node is not None
            child = node.children.get(part)
            if child is None:
                child = node.any
                params.append(part)
            if child is None:
                return None, (), []
            node = child
        assert node is not None
        route = node.routes.get(method)
        return route, tuple(params), list(node.routes)
