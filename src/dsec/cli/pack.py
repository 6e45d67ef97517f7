"""dsec pack: what a sandbox has changed, as a layer from which others start."""

from __future__ import annotations

import click

from dsec.cli.output import console, errors, print_json, size
from dsec.cli.session import pairs, with_client
from dsec.client import DSecClient

STYLES = {"refuse": "red", "warning": "yellow", "note": "dim"}


@click.command()
@click.argument("sandbox_id")
@click.argument("name", default="")
@click.option("--label", "labels", multiple=True, metavar="K=V")
@click.option("--scrub/--no-scrub", default=True, help="Leave out caches, histories, logs, temporary files.")
@click.option("--remove", multiple=True, metavar="GLOB", help="What to leave out besides, from the root.")
@click.option("--keep", multiple=True, metavar="GLOB", help="What stays whatever the rules say.")
@click.option("--allow-findings", is_flag=True, help="Tell of secrets and the like, and pack all the same.")
@click.option(
    "--smoke", default="", metavar="COMMAND", help="Must end with 0 in a fresh sandbox of the layer."
)
@click.option("--smoke-timeout", type=float, default=60.0, show_default=True, metavar="SECONDS")
@click.option("--json", "as_json", is_flag=True)
@with_client
async def pack(
    client: DSecClient,
    sandbox_id: str,
    name: str,
    labels: tuple[str, ...],
    scrub: bool,
    remove: tuple[str, ...],
    keep: tuple[str, ...],
    allow_findings: bool,
    smoke: str,
    smoke_timeout: float,
    as_json: bool,
) -> None:
    """Take what a sandbox has changed as layer NAME (or a nameless one, known by its digest)."""
    sandbox = await client.get_sandbox(sandbox_id)
    packed = await sandbox.pack_diff(
        name,
        labels=pairs(labels, "--label"),
        scrub=scrub,
        remove=remove,
        keep=keep,
        refuse=not allow_findings,
        smoke=smoke,
        smoke_timeout=smoke_timeout,
    )
    if as_json:
        print_json(packed)
        return
    for finding in packed.findings:
        errors.print(f"[{STYLES.get(finding.severity, 'dim')}]{finding.severity}[/] ", end="")
        errors.print(f"{finding.path}: {finding.message}", markup=False, soft_wrap=True)
    layer = packed.layer
    console.print(f"{layer.name or layer.digest}  {layer.digest[:12]}  {size(layer.total)}", markup=False)
    errors.print(
        f"frozen for {packed.frozen_s * 1e3:.0f} ms, {packed.left_out} entries left out", markup=False
    )
