"""`dsec shell`: a real terminal in a sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from dsec.cli.commands import creation_options, run_args
from dsec.cli.session import exit_status, first, with_client
from dsec.client import DSecClient, Sandbox, Terminal
from dsec.core.ids import SANDBOX_ID


@click.command()
@creation_options
@click.option("--session-user", default="", help="User of the shell.")
@click.argument("target")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@with_client
async def shell(
    client: DSecClient, target: str, argv: tuple[str, ...], session_user: str, **options: Any
) -> int:
    """A terminal in TARGET: a sandbox's id, or an image (then the sandbox ends with the shell)."""
    if SANDBOX_ID.match(target):
        return await _interact(await client.get_sandbox(target), argv, session_user)
    sandbox = await client.run_container(run_args(target, options))
    try:
        return await _interact(sandbox, argv, session_user)
    finally:
        await sandbox.stop()


async def _interact(sandbox: Sandbox, argv: tuple[str, ...], user: str) -> int:
    columns, rows = shutil.get_terminal_size()
    term = os.environ.get("TERM", "xterm-256color")
    terminal = await sandbox.pty(
        list(argv) or None, rows=rows, columns=columns, user=user, env={"TERM": term}
    )
    async with terminal:
        with raw_mode(sys.stdin.fileno()):
            await first(_show(terminal), _feed(terminal), _follow_size(terminal))
        return exit_status(await terminal.wait())


async def _show(terminal: Terminal) -> None:
    async for chunk in terminal:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


async def _feed(terminal: Terminal) -> None:
    """Keys to the sandbox. Never ends first on a closed stdin: the shell's own end does."""
    loop = asyncio.get_running_loop()
    keys: asyncio.Queue[bytes] = asyncio.Queue()
    fd = sys.stdin.fileno()
    readable = True
    try:
        loop.add_reader(fd, lambda: keys.put_nowait(os.read(fd, 65536)))
    except PermissionError:  # a regular file: epoll has no use for it
        readable = False
        keys.put_nowait(await asyncio.to_thread(sys.stdin.buffer.read))
        keys.put_nowait(b"")
    try:
        while data := await keys.get():
            await terminal.send(data)
        if readable:
            loop.remove_reader(fd)
        await terminal.send(b"\x04")
        await asyncio.Event().wait()
    finally:
        if readable:
            loop.remove_reader(fd)


async def _follow_size(terminal: Terminal) -> None:
    changed = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, changed.set)
    while True:
        await changed.wait()
        changed.clear()
        columns, rows = shutil.get_terminal_size()
        await terminal.resize(rows=rows, columns=columns)


@contextmanager
def raw_mode(fd: int) -> Iterator[None]:
    """Keys reach the sandbox as they are typed; the terminal is put back whatever happens."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)  # what was typed ahead is not thrown away
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
