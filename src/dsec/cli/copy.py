"""`dsec cp`: files and trees in and out. SANDBOX:PATH names a place inside."""

from __future__ import annotations

from pathlib import Path

import click

from dsec.cli.output import console, size
from dsec.cli.session import with_client
from dsec.client import DSecClient


def _inside(place: str) -> tuple[str, str] | None:
    sandbox_id, sep, path = place.partition(":")
    return (sandbox_id, path) if sep and sandbox_id.startswith("sbx-") else None


@click.command()
@click.option("-u", "--user", default="", help="Acting user inside.")
@click.argument("source")
@click.argument("target")
@with_client
async def cp(client: DSecClient, source: str, target: str, user: str) -> None:
    """Copy SOURCE to TARGET; one of them is SANDBOX:PATH. Directories are copied whole."""
    match _inside(source), _inside(target):
        case None, (sandbox_id, path):
            sandbox = await client.get_sandbox(sandbox_id)
            done = await sandbox.files.upload(Path(source), path, user=user)
        case (sandbox_id, path), None:
            sandbox = await client.get_sandbox(sandbox_id)
            done = await sandbox.files.download(path, Path(target), user=user)
        case _:
            raise click.UsageError("one of the two must be SANDBOX:PATH")
    console.print(f"{done.entries} entries, {size(done.bytes)}")
