"""`make bench`: every measure that this host can, each in a process of its own; then docs/benchmarks.md."""

from __future__ import annotations

import subprocess
import sys

import click
import msgspec

from bench.measures import MODULES
from bench.report import notes_of, page
from bench.result import Result
from bench.tools import HERE

DOCS = HERE.parent / "docs" / "benchmarks.md"


def measured(name: str, options: tuple[str, ...]) -> Result:
    """Runs one and shows what it prints. Raises RuntimeError with its last words when it fails."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", name, "--json", *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE.parent,
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        last = line
        if not line.startswith("{"):
            print(line, end="", flush=True)
    if process.wait():
        raise RuntimeError(f"exit status {process.returncode}")
    return msgspec.json.decode(last, type=Result)


@click.command()
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(MODULES)),
    help="Just these; the page is then not written.",
)
@click.option("--docker/--no-docker", default=True)
def main(only: tuple[str, ...], docker: bool) -> None:
    """Run the measures and write the page."""
    results, failures = {}, {}
    for name in only or MODULES:
        try:
            results[name] = measured(name, () if docker else ("--no-docker",))
        except RuntimeError as e:
            failures[name] = str(e)
    if not only:
        DOCS.write_text(page(results, failures, notes_of(DOCS)))
        print(f"written: {DOCS.relative_to(HERE.parent)}")
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
