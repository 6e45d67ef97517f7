"""run, exec, ps, stop, logs."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from dsec.cli.output import ago, console, print_json, size, table
from dsec.cli.session import exit_status, pairs, with_client
from dsec.client import DSecClient, DSecContainerRunArgs, Sandbox
from dsec.core.network import SERVICE_NAME, NetworkRules, parse_rule


def _out(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _err(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def creation_options(f: Any) -> Any:
    for option in reversed(
        (
            click.option("--layer", "layers", multiple=True, help="Workspace or toolkit, bottom to top."),
            click.option("--memory", "memory_limit_mb", type=int, default=2048, help="MiB; default 2048"),
            click.option("--cpus", "cpu_cores_limit", type=float, default=1.0, show_default=True),
            click.option("--disk", "disk_limit_mb", type=int, default=4096, show_default=True, help="MiB"),
            click.option("--pids", "pids_limit", type=int, default=1024, show_default=True),
            click.option("--ttl", "ttl_running_stop", type=int, help="Seconds idle after which it stops."),
            click.option("--ttl-max", type=int, help="Seconds after which it stops in any case."),
            click.option("-u", "--user", "init_user", default=""),
            click.option("-w", "--workdir", default=""),
            click.option("-e", "--env", multiple=True, metavar="K=V"),
            click.option("--label", "labels", multiple=True, metavar="K=V"),
            click.option(
                "--allow",
                multiple=True,
                metavar="RULE",
                help="What it may reach: pypi, example.org, *.example.org:443, 10.0.0.0/8:5432/tcp; none: "
                "a network with nothing allowed yet.",
            ),
            click.option("--group", default="", help="Sandboxes of one group reach each other."),
            click.option("--task", default=""),
            click.option("--project", default="default"),
        )
    ):
        f = option(f)
    return f


def run_args(image: str, options: dict[str, Any]) -> DSecContainerRunArgs:
    options["env"] = pairs(options["env"], "--env")
    options["labels"] = pairs(options["labels"], "--label")
    options["layers"] = list(options["layers"])
    options["network_rules"] = rules_of(options.pop("allow"))
    return DSecContainerRunArgs(container_image=image, **options)


def rules_of(allow: tuple[str, ...]) -> NetworkRules | None:
    """Of `--allow` options; without any there is no network."""
    if not allow:
        return None
    words = [word for word in allow if word != "none"]
    services: NetworkRules = {word: True for word in words if SERVICE_NAME.match(word)}
    rules = [parse_rule(word) for word in words if word not in services]
    return {**services, **({"allow": rules} if rules else {})}


@click.command(context_settings={"ignore_unknown_options": True})
@creation_options
@click.option("-d", "--detach", is_flag=True, help="Leave it running and print its id.")
@click.option("--timeout", type=float, help="Seconds for the command.")
@click.argument("image")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@with_client
async def run(
    client: DSecClient, image: str, argv: tuple[str, ...], detach: bool, timeout: float | None, **options: Any
) -> int:
    """A fresh sandbox from IMAGE: run a program in it, show its output, stop it."""
    if not argv and not detach:
        raise click.UsageError("name a program to run, or --detach; `dsec shell IMAGE` opens a terminal")
    sandbox = await client.run_container(run_args(image, options))
    if detach:
        if argv:
            await sandbox.exec(list(argv), background=True)
        console.print(sandbox.id)
        return 0
    try:
        return await _exec(sandbox, argv, timeout=timeout)
    finally:
        await sandbox.stop()


async def _exec(sandbox: Sandbox, argv: tuple[str, ...], **options: Any) -> int:
    result = await sandbox.exec(list(argv), on_stdout=_out, on_stderr=_err, **options)
    if result.reason not in ("exited", "signaled"):
        click.echo(f"dsec: {result.reason}", err=True)
    return exit_status(result)


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("-i", "--stdin", "use_stdin", is_flag=True, help="Give it this command's stdin.")
@click.option("-u", "--user", default="")
@click.option("-w", "--workdir", "cwd", default="")
@click.option("-e", "--env", multiple=True, metavar="K=V")
@click.option("--timeout", type=float, help="Seconds.")
@click.argument("sandbox_id")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
@with_client
async def exec_(
    client: DSecClient,
    sandbox_id: str,
    argv: tuple[str, ...],
    use_stdin: bool,
    env: tuple[str, ...],
    **options: Any,
) -> int:
    """Run one program in a sandbox; its exit status is this command's."""
    sandbox = await client.get_sandbox(sandbox_id)
    if use_stdin:
        options["stdin"] = sys.stdin.buffer.read()
    return await _exec(sandbox, argv, env=pairs(env, "--env"), **options)


def filter_options(f: Any) -> Any:
    f = click.option("--label", "labels", multiple=True, metavar="K=V")(f)
    f = click.option("--task")(f)
    return click.option("--project")(f)


@click.command()
@filter_options
@click.option("-a", "--all", "everything", is_flag=True, help="Those that have ended too.")
@click.option("--json", "as_json", is_flag=True)
@with_client
async def ps(
    client: DSecClient, everything: bool, as_json: bool, labels: tuple[str, ...], **filters: Any
) -> None:
    """Sandboxes."""
    states = None if everything else ["creating", "running", "pausing", "paused", "resuming", "stopping"]
    found = [
        info
        async for info in client.list_sandboxes(states=states, labels=pairs(labels, "--label"), **filters)
    ]
    if as_json:
        print_json(found)
        return
    now = time.time()
    table(
        ["ID", "STATE", "IMAGE", "LAYERS", "TASK", "AGE", "IDLE", "WHY"],
        (
            [
                s.id,
                s.state,
                s.image,
                len(s.layers),
                s.task,
                ago(now - s.created_at),
                ago(now - s.last_used_at) if s.last_used_at else "-",
                s.reason,
            ]
            for s in found
        ),
    )


@click.command()
@filter_options
@click.option("--all", "everything", is_flag=True, help="Every sandbox of this server.")
@click.argument("sandbox_ids", nargs=-1)
@with_client
async def stop(
    client: DSecClient,
    sandbox_ids: tuple[str, ...],
    everything: bool,
    labels: tuple[str, ...],
    **filters: Any,
) -> None:
    """Stop sandboxes, by id or by filter."""
    chosen = list(sandbox_ids)
    wanted = {k: v for k, v in filters.items() if v}
    if not chosen and (everything or wanted or labels):
        live = ["creating", "running", "paused"]
        found = client.list_sandboxes(states=live, labels=pairs(labels, "--label"), **wanted)
        chosen = [info.id async for info in found]
    elif not chosen:
        raise click.UsageError("name sandboxes, a filter, or --all")
    for sandbox_id in chosen:
        await (await client.get_sandbox(sandbox_id)).stop()
        console.print(sandbox_id)


@click.command()
@click.option("--json", "as_json", is_flag=True)
@click.argument("sandbox_id")
@click.argument("operation_id", required=False)
@with_client
async def logs(client: DSecClient, sandbox_id: str, operation_id: str | None, as_json: bool) -> None:
    """What ran in a sandbox; with an operation's id, what it printed."""
    sandbox = await client.get_sandbox(sandbox_id)
    if operation_id:
        command = await sandbox.operation(operation_id)
        output = await command.output()
        _out(output.stdout)
        _err(output.stderr)
        return
    operations = await sandbox.operations()
    if as_json:
        print_json(operations)
        return
    table(
        ["OPERATION", "KIND", "STATE", "HOW", "SESSION", "OUTPUT", "COMMAND"],
        (
            [
                o.op_id,
                o.kind,
                o.state,
                o.outcome,
                o.session,
                size(o.stdout_size + o.stderr_size),
                o.command[:60].replace("[", r"\["),
            ]
            for o in operations
        ),
    )
