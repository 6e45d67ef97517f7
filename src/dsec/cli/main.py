"""The `dsec` command: a thin face over the SDK, and the server's start."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from dsec import __version__
from dsec.cli.output import errors
from dsec.core.errors import DSecError

COMMANDS = {
    "up": "dsec.cli.up:up",
    "run": "dsec.cli.commands:run",
    "exec": "dsec.cli.commands:exec_",
    "shell": "dsec.cli.terminal:shell",
    "ps": "dsec.cli.commands:ps",
    "stop": "dsec.cli.commands:stop",
    "cp": "dsec.cli.copy:cp",
    "logs": "dsec.cli.commands:logs",
    "top": "dsec.cli.top:top",
    "layer": "dsec.cli.layer_images:layer_group",
    "pack": "dsec.cli.pack:pack",
    "network": "dsec.cli.network:network",
    "audit": "dsec.cli.audit:audit",
    "doctor": "dsec.cli.doctor:doctor",
    "bench": "dsec.cli.bench:bench_command",
}


class Lazy(click.Group):
    """Imports a command when it is asked for, so that `dsec exec` does not pay for the server."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dsec")
def cli() -> None:
    """Sandboxes for training and evaluating agents. Finds its server by DSEC_URL and DSEC_TOKEN."""


def main() -> None:
    """Entry point. A DSecError becomes one line on stderr and exit status 125, as `docker run` has it; an
    interrupt 130, as a shell has it."""
    try:
        status = cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except DSecError as e:
        errors.print(f"[red]dsec: {e.code}:[/] ", end="")
        errors.print(e.message, markup=False)
        sys.exit(125)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
