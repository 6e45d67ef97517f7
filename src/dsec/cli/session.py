"""What client commands share: options, a client for the length of a command, exit statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

import click

from dsec.client import CommandResult, DSecClient

P = ParamSpec("P")


def with_client(body: Callable[..., Coroutine[Any, Any, int | None]]) -> Callable[..., None]:
    """Runs an async command body with an open client as its first argument; its value is the exit status."""

    @click.option("--url", envvar="DSEC_URL", help="Server; default DSEC_URL.")
    @click.option("--token", envvar="DSEC_TOKEN", help="Bearer token; default DSEC_TOKEN.")
    @click.option("--ca", envvar="DSEC_CA", help="Certificates to trust for https; default DSEC_CA.")
    @wraps(body)
    def command(*args: Any, url: str | None, token: str | None, ca: str | None, **kwargs: Any) -> None:
        async def go() -> int | None:
            async with DSecClient(url=url, token=token, ca=ca) as client:
                return await body(client, *args, **kwargs)

        if status := asyncio.run(go()):
            raise SystemExit(status)

    return command


def pairs(values: tuple[str, ...], what: str) -> dict[str, str]:
    """`K=V` options as a dict."""
    out = {}
    for value in values:
        key, sep, rest = value.partition("=")
        if not sep:
            raise click.BadParameter(f"{value!r}: KEY=VALUE", param_hint=what)
        out[key] = rest
    return out


def exit_status(result: CommandResult) -> int:
    """As a shell reports it: the exit code; 128 + signal; 124 for a timeout; 137 for out of memory."""
    if result.reason == "timed_out":
        return 124
    if result.exit_code is not None and result.exit_code >= 0:
        return result.exit_code
    return 128 + (result.signal or 9)


async def first(*things: Awaitable[Any]) -> None:
    """Waits until one of them ends, cancels the others, and raises what it raised."""
    tasks = [asyncio.ensure_future(t) for t in things]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
