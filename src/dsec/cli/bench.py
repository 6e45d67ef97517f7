"""`dsec bench`: runs a measure of the checkout's bench/ directory, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

CHECKOUT = Path(__file__).resolve().parents[3]


@click.command("bench", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench_command(arguments: tuple[str, ...]) -> None:
    """Measure creation, commands, density, transfer: `dsec bench NAME [--json]`, --help for all."""
    if not (CHECKOUT / "bench" / "__main__.py").exists():
        raise click.ClickException("the measures lie in bench/ of the source tree: run it from a checkout")
    done = subprocess.run([sys.executable, "-m", "bench", *arguments], cwd=CHECKOUT, check=False)
    sys.exit(done.returncode)
