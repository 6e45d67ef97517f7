"""dsec network: what a sandbox may reach, shown and changed; what it was refused."""

from __future__ import annotations

import time

import click
from rich.markup import escape

from dsec.cli.commands import rules_of
from dsec.cli.output import console, print_json, table
from dsec.cli.session import with_client
from dsec.client import DSecClient


@click.group()
def network() -> None:
    """What a sandbox may reach, and what it was refused."""


@network.command()
@click.argument("sandbox_id")
@with_client
async def show(client: DSecClient, sandbox_id: str) -> None:
    """Its rules, as JSON."""
    print_json(await (await client.get_sandbox(sandbox_id)).network_rules())


@network.command("set")
@click.argument("sandbox_id")
@click.option("--allow", multiple=True, metavar="RULE", help="As with `dsec run`; none at all: nothing.")
@with_client
async def set_(client: DSecClient, sandbox_id: str, allow: tuple[str, ...]) -> None:
    """Replace its rules; in force when this returns."""
    await (await client.get_sandbox(sandbox_id)).set_network_rules(rules_of(allow) or {})


@network.command()
@click.argument("sandbox_id")
@click.option("--follow", "-f", is_flag=True)
@click.option("--json", "as_json", is_flag=True)
@with_client
async def denied(client: DSecClient, sandbox_id: str, follow: bool, as_json: bool) -> None:
    """What its rules refused, oldest first."""
    sandbox, after = await client.get_sandbox(sandbox_id), 0
    while True:
        page = await sandbox.events(after=after, wait=30.0 if follow and after else 0.0)
        if as_json:
            for event in page.events:
                print_json(event)
        else:
            for e in page.events:
                when = time.strftime("%H:%M:%S", time.localtime(e.time))
                where = f"{e.address}:{e.port}" if e.address else ""
                console.print(
                    f"{when} {e.what} {escape(e.name)} {where} {e.protocol} [red]{e.reason}[/]"
                    + (f" (and {e.left_out} more)" if e.left_out else "")
                )
        after = page.next
        if not follow and not page.events:
            return


@network.command()
@with_client
async def services(client: DSecClient) -> None:
    """Whether this node gives sandboxes a network."""
    node = await client.node()
    rows = [(b.name, b.attributes.get("network", "-")) for b in node.backends]
    table(("backend", "network"), rows)
