"""`python -m bench NAME`: run one measure and print its figures; with --json one JSON object last."""

from __future__ import annotations

import os
import sys

import click

from bench.measures import MODULES, Options, load
from bench.report import show
from bench.tools import Unavailable


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", type=click.Choice(list(MODULES)))
@click.option("--count", type=click.IntRange(0, 100_000), default=0, help="Samples (transfer: MiB).")
@click.option("--concurrency", type=click.IntRange(0, 1024), default=0, help="In flight; 0: the default.")
@click.option("--url", default="", help="A running server, instead of one of the measure's own.")
@click.option("--image", default="", help="Image of the sandboxes at --url.")
@click.option("--docker/--no-docker", default=True, help="Compare with Docker, where it can be had.")
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
def main(name: str, as_json: bool, **values: object) -> None:
    """Run one measure."""
    options = Options(token=os.environ.get("DSEC_TOKEN", ""), **values)  # type: ignore[arg-type]
    try:
        result = load(name)(options)
    except Unavailable as e:
        sys.exit(f"bench {name}: {e}")
    show(result)
    if as_json:
        print(result.line())


if __name__ == "__main__":
    main()
