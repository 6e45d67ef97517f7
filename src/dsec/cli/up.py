"""`dsec up`: all services in one process, everything that they make below one directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import uvloop

from dsec.cli.output import console, errors
from dsec.core.errors import DSecError
from dsec.core.ids import EDGE_ID, new_edge_id

DEFAULT_DATA = "/var/lib/dsec"
DEFAULT_LISTEN = "127.0.0.1:7070"


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=DEFAULT_DATA,
    show_default=True,
    help="Everything lives below it.",
)
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="Where layers lie, shared with other nodes perhaps; DATA/store when it is not given.",
)
@click.option(
    "--listen", default=DEFAULT_LISTEN, show_default=True, help="ADDRESS:PORT; port 0 takes a free one."
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="Where the first token is written (mode 0600)."
)
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written with the URL once it serves.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="TOML: [network], [tls], [limits]; docs/network.md.",
)
@click.option("--max-sandboxes", type=click.IntRange(1, 100_000), default=10_000, show_default=True)
@click.option("--keep", is_flag=True, help="Leave sandboxes running at the end, for the next start.")
@click.option(
    "--prefetch/--no-prefetch",
    default=True,
    show_default=True,
    help="Read ahead, on a cold start, what an image's first run read.",
)
@click.option(
    "--mount-path",
    type=click.Choice(["auto", "fd", "staged"]),
    default="auto",
    help="How layers are mounted; auto tries.",
)
@click.option("-v", "--verbose", count=True)
def up(**options: Any) -> None:
    """Serve until stopped (SIGINT, SIGTERM)."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(options.pop("verbose"), 2)]
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if os.geteuid() != 0:
        raise click.ClickException("dsec up needs root: it makes namespaces, mounts and control groups")
    raise_file_limit()
    try:
        with claimed(options["data"]):
            uvloop.run(serve(**options))
    except DSecError as e:
        raise click.ClickException(e.message) from e


def raise_file_limit() -> None:
    """A few descriptors per sandbox: take what root may have."""
    for limit in (1 << 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return


@contextlib.contextmanager
def claimed(data: Path) -> Iterator[None]:
    """The data directory is ours alone while we run."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    data.chmod(0o700)
    fd = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = f"another server uses {data}: stop it, or give --data another directory"
            raise click.ClickException(told) from None
        yield
    finally:
        os.close(fd)


def edge_id(data: Path) -> str:
    """This edge's name, made at its first start; its sandboxes carry it in their ids."""
    path = data / "edge-id"
    with contextlib.suppress(FileNotFoundError):
        if EDGE_ID.match(known := path.read_text().strip()):
            return known
    made = new_edge_id()
    beside = data / "edge-id.new"
    beside.write_text(made + "\n")
    beside.rename(path)
    return made


async def serve(
    *,
    data: Path,
    store: Path | None,
    listen: str,
    token_file: Path | None,
    ready_file: Path | None,
    max_sandboxes: int,
    keep: bool,
    mount_path: str,
    prefetch: bool,
    config_file: Path | None,
) -> None:
    from dsec.cli.config import read
    from dsec.cli.node import Node

    config = read(config_file)

    host, _, port = listen.rpartition(":")
    if not port.isdigit():
        raise click.ClickException(f"--listen {listen}: ADDRESS:PORT")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    node = Node(
        data.resolve(),
        edge_id(data),
        max_sandboxes=max_sandboxes,
        mount_path=mount_path,
        prefetch=prefetch,
        store=store.resolve() if store else None,
        config=config,
    )
    try:
        await node.start()
        token = node.first_token(token_file)
        url = await node.listen(host.strip("[]") or "127.0.0.1", int(port))
        freeze()
        console.print(f"dsec serves on {url}")
        if token:
            where = f" (also in {token_file})" if token_file else ""
            console.print(f"first token{where}, shown this once: {token}")
        console.print(f"  export DSEC_URL={url}")
        if ready_file:
            ready_file.write_text(url + "\n")
        await stopped.wait()
        errors.print("stopping; sandboxes stay" if keep else "stopping all sandboxes")
    finally:
        await node.stop(keep=keep)
        if ready_file:
            ready_file.unlink(missing_ok=True)


def freeze() -> None:
    """What was made at the start stays: the collector need not walk it again at every pass."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
