"""What measures share: a target, an event loop, and comparisons that may be absent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvloop

from bench import docker, server
from bench.measures import Options
from bench.server import Target
from bench.tools import Unavailable
from dsec.client import DSecClient

T = TypeVar("T")


@contextmanager
def target(options: Options, *server_options: str) -> Iterator[Target]:
    """The server that was named, or a fresh one."""
    if options.url:
        yield Target(options.url, options.token, image=options.image or server.IMAGE, layers=())
    else:
        with server.started(*server_options) as ours:
            yield ours


def with_client(to: Target, body: Callable[[DSecClient], Coroutine[Any, Any, T]]) -> T:
    """Runs the load on an event loop of its own."""

    async def go() -> T:
        async with DSecClient(url=to.url, token=to.token) as client:
            return await body(client)

    return uvloop.run(go())


def with_docker(
    options: Options, absent: dict[str, str], body: Callable[[docker.Docker], Awaitable[dict[str, float]]]
) -> dict[str, float]:
    """What the body measured on Docker; nothing, and why in `absent`, where it cannot be had."""
    if not options.docker:
        return {}
    try:
        with docker.started() as daemon:
            return asyncio.run(_awaited(body(daemon)))
    except Unavailable as e:
        absent["docker"] = str(e)
        return {}


async def _awaited(one: Awaitable[T]) -> T:
    return await one


def tried(what: str, absent: dict[str, str], body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The same for a program of ours."""
    try:
        return body()
    except Unavailable as e:
        absent[what] = str(e)
        return {}


def number(found: dict[str, Any], key: str) -> float:
    return float(found.get(key, math.nan))
