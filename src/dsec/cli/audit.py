"""dsec audit: who did what to which sandbox, and what misbehaved inside."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import msgspec
from rich.markup import escape

from dsec.cli.output import console, table
from dsec.cli.session import with_client
from dsec.client import DSecClient
from dsec.wire.audit import AuditEntry

_line = msgspec.json.Encoder().encode


@click.group()
def audit() -> None:
    """The audit record: who did what, and what misbehaved."""


@audit.command()
@click.option("--sandbox", default="", metavar="ID")
@click.option("--project", default="")
@click.option("--who", default="", help="A token's id or name.")
@click.option("--kind", type=click.Choice(["", "action", "misbehaviour", "record"]), default="")
@click.option("--what", default="", help="Such as operations.exec, or the beginning of one: `operations.`")
@click.option("--since", type=float, default=0.0, metavar="SECONDS", help="Not older than so many seconds.")
@click.option("--after", type=int, default=0, help="From behind this position on.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@with_client
async def show(
    client: DSecClient,
    sandbox: str,
    project: str,
    who: str,
    kind: str,
    what: str,
    since: float,
    after: int,
    as_json: bool,
) -> None:
    """Entries, oldest first."""
    found = client.audit(
        after=after,
        sandbox=sandbox,
        project=project,
        who=who,
        kind=kind,
        what=what,
        since=time.time() - since if since else 0.0,
    )
    if as_json:
        async for entry in found:
            sys.stdout.buffer.write(_line(entry) + b"\n")
        sys.stdout.buffer.flush()
        return
    rows = [_row(entry) async for entry in found]
    table(("position", "time", "what", "sandbox", "who", "outcome", "detail"), rows)


def _row(entry: AuditEntry) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
    detail = " ".join(f"{k}={v}" for k, v in entry.detail.items())
    style = "red" if entry.kind == "misbehaviour" else "default"
    return (
        str(entry.position),
        when,
        f"[{style}]{escape(entry.what)}[/]",
        escape(entry.sandbox),
        escape(entry.name or entry.who),
        escape(entry.outcome),
        escape(detail),
    )


@audit.command()
@click.option("--data", type=click.Path(path_type=Path), default="/var/lib/dsec", show_default=True)
def verify(data: Path) -> None:
    """Check the chain of all entries of a server's data directory; prints its head, to be noted elsewhere."""
    from dsec.audit.log import verify as check

    count, head = check(data / "audit")
    console.print(f"{count} entries, whole; head {head or '-'}")
