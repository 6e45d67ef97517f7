"""dsec layer: build, list and check layers. Works on the store itself, whether a server runs or not."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from dsec.cli.output import ago, console, errors, print_json, size, table
from dsec.cli.up import DEFAULT_DATA
from dsec.core.errors import InvalidArgument, LayerCorrupt
from dsec.core.images import ImageConfig
from dsec.layers.build import Builder, Progress, Wanted
from dsec.layers.model import KINDS, Kind, Layer
from dsec.layers.store import LayerStore

STAGES = {
    "fetch": "fetching layers",
    "unpack": "unpacking",
    "suite": "installing the suite",
    "survey": "looking over the tree",
    "pack": "packing",
    "digest": "taking the digest",
    "publish": "publishing",
    "done": "done",
}


def data_option(f: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--data",
        type=click.Path(path_type=Path),
        default=DEFAULT_DATA,
        show_default=True,
        envvar="DSEC_DATA",
        help="The server's data directory.",
    )(f)


json_option = click.option("--json", "as_json", is_flag=True)


def pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    """K=V, K=V as a dict. (That of `session` would load the SDK.)"""
    for pair in given:
        if not pair.partition("=")[1]:
            raise click.UsageError(f"{option} {pair}: K=V")
    return {k: v for k, _, v in (pair.partition("=") for pair in given)}


def open_store(data: Path) -> LayerStore:
    return LayerStore(data / "store")


@click.group("layer")
def layer_group() -> None:
    """Layers: build, list, verify."""


@layer_group.command("ls")
@data_option
@json_option
@click.option("--kind", type=click.Choice(KINDS))
@click.option("--prefix", default="", help="Names that begin so.")
@click.option("--all", "-a", "every", is_flag=True, help="Also layers that have no name.")
def ls(data: Path, as_json: bool, kind: str | None, prefix: str, every: bool) -> None:
    """Layers, by name."""
    with open_store(data) as store:
        layers = [
            layer
            for layer in store.list()
            if kind in (None, layer.kind) and layer.name.startswith(prefix) and (layer.name or every)
        ]
    if as_json:
        print_json(layers)
        return
    now = time.time()
    table(
        ["NAME", "KIND", "DIGEST", "SIZE", "AGE", "FROM"],
        (
            [
                layer.name or "-",
                layer.kind,
                layer.digest[:12],
                size(layer.total),
                ago(now - layer.created),
                layer.provenance.source.replace("[", r"\["),
            ]
            for layer in layers
        ),
    )


@layer_group.command()
@data_option
@json_option
@click.argument("reference")
def show(data: Path, as_json: bool, reference: str) -> None:
    """All that is known of a layer."""
    with open_store(data) as store:
        layer = store.find(reference)
        names = store.names_of(layer.digest)
    if as_json:
        print_json(layer)
        return
    rows = {
        "name": ", ".join(names) or "-",
        "digest": layer.digest,
        "kind": layer.kind,
        "size": size(layer.total) + (f", of it metadata {size(layer.size)}" if layer.blobs else ""),
        "files": str(layer.files or ""),
        "below": " ".join(digest[:12] for digest in layer.below),
        "created": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(layer.created)),
        "from": layer.provenance.source,
        "command": shlex.join(layer.provenance.command),
        "built by": layer.provenance.builder,
        "sandbox": layer.provenance.sandbox,
        "manifest": layer.provenance.manifest,
        "packed by": layer.provenance.tool,
        "labels": " ".join(f"{k}={v}" for k, v in sorted(layer.labels.items())),
        "env": " ".join(f"{k}={v}" for k, v in sorted(layer.config.env.items())),
        "user": layer.config.user,
        "workdir": layer.config.workdir,
        "shell": shlex.join(layer.config.shell),
        "entrypoint": shlex.join(layer.config.entrypoint),
        "cmd": shlex.join(layer.config.cmd),
        "file": str(store.file(layer.digest)),
    }
    for key, value in rows.items():
        if value:
            console.print(f"{key:>10}  ", end="")
            console.print(value, markup=False, soft_wrap=True)


@layer_group.command()
@data_option
@json_option
@click.option("--kind", type=click.Choice(KINDS), help="workspace, or base for a suite, if none is given.")
@click.option("--mmdebstrap", "suite", metavar="SUITE", help="A base from this suite; SOURCE is left out.")
@click.option("--include", default="", metavar="PACKAGES", help="Of the suite, with commas between.")
@click.option("--mirror", "mirrors", multiple=True, help="URL or line of sources.list, for the suite.")
@click.option("--compress", default="", metavar="HOW", help="Such as lz4hc or lz4hc,12.")
@click.option("--label", "labels", multiple=True, metavar="K=V")
@click.option("-e", "--env", multiple=True, metavar="K=V", help="For all that runs on it.")
@click.option("-u", "--user", default="", help="Who runs commands by default.")
@click.option("-w", "--workdir", default="")
@click.option("--shell", default="", help="The shell of its sessions, with options, as one word.")
@click.option(
    "-f", "--file", "dockerfile", type=click.Path(path_type=Path), help="A Dockerfile; SOURCE is its context."
)
@click.option("--dockerfile", "has_dockerfile", is_flag=True, help="As -f SOURCE/Dockerfile.")
@click.option("--target", default="", metavar="STAGE", help="Of the Dockerfile.")
@click.option("--build-arg", "build_args", multiple=True, metavar="K=V", help="For ARG.")
@click.option("--url", envvar="DSEC_URL", help="Server on this store that runs the Dockerfile's steps.")
@click.option("--token", envvar="DSEC_TOKEN", help="Bearer token for it.")
@click.argument("name")
@click.argument("source", required=False, type=click.Path(path_type=Path))
def build(
    data: Path, as_json: bool, name: str, source: Path | None, suite: str | None, include: str, **options: Any
) -> None:
    """Build layer NAME (NAME:TAG, NAME@VERSION) from SOURCE, a directory or tar archive, or from a suite.

    With -f or --dockerfile: from a Dockerfile, whose steps run in sandboxes of the server.
    """
    if (source is None) == (suite is None):
        raise click.UsageError("name a directory or archive, or --mmdebstrap SUITE")
    if include and not suite:
        raise click.UsageError("--include goes with --mmdebstrap")
    from_file = _dockerfile(source, options)
    kind: Kind = options["kind"] or ("base" if suite or from_file else "workspace")
    wanted = Wanted(
        name=name,
        kind=kind,
        labels=pairs(options["labels"], "--label"),
        compress=options["compress"],
        command=["dsec", "layer", "build", *sys.argv[sys.argv.index("build") + 1 :]]
        if "build" in sys.argv
        else [],
        config=ImageConfig(
            env=pairs(options["env"], "--env"),
            user=options["user"],
            workdir=options["workdir"],
            shell=shlex.split(options["shell"]),
        ),
    )
    if from_file:
        assert source is not None
        layer = _build_dockerfile(data, source, from_file, wanted, options)
        _tell_built(layer, as_json)
        return
    with open_store(data) as store, Shown() as shown:
        builder = Builder(store, shown)
        if suite:
            packages = [p for p in include.split(",") if p]
            layer = builder.from_suite(suite, packages, wanted, options["mirrors"])
        else:
            assert source is not None
            layer = (
                builder.from_directory(source, wanted)
                if source.is_dir()
                else builder.from_tar(source, wanted)
            )
    _tell_built(layer, as_json)


def _tell_built(layer: Layer, as_json: bool) -> None:
    if as_json:
        print_json(layer)
    else:
        console.print(f"{layer.name}  {layer.digest[:12]}  {size(layer.total)}", markup=False)


def _dockerfile(source: Path | None, options: dict[str, Any]) -> Path | None:
    """The Dockerfile to build from, if there is one."""
    if not options["dockerfile"] and not options["has_dockerfile"]:
        if options["target"] or options["build_args"]:
            raise click.UsageError("--target and --build-arg go with -f or --dockerfile")
        return None
    if source is None or options["compress"]:
        raise click.UsageError("a Dockerfile needs SOURCE, its context, and goes with no --compress")
    given: Path | None = options["dockerfile"]
    return given or source / "Dockerfile"


def _build_dockerfile(data: Path, source: Path, file: Path, wanted: Wanted, options: dict[str, Any]) -> Layer:
    from dsec.cli.layer_build import build_dockerfile  # it loads the SDK
    from dsec.client import DSecClient

    async def go() -> Layer:
        with open_store(data) as store:
            async with DSecClient(url=options["url"], token=options["token"]) as client:
                return await build_dockerfile(
                    Builder(store),
                    client,
                    source,
                    file,
                    wanted,
                    target=options["target"],
                    build_args=pairs(options["build_args"], "--build-arg"),
                )

    return asyncio.run(go())


@layer_group.command()
@data_option
@click.argument("reference")
@click.argument("name")
def tag(data: Path, reference: str, name: str) -> None:
    """Give a layer another name."""
    with open_store(data) as store:
        console.print(store.tag(reference, name).name, markup=False)


@layer_group.command()
@data_option
@click.argument("references", nargs=-1, required=True)
def rm(data: Path, references: tuple[str, ...]) -> None:
    """Remove names, and layers that no name means any more. Running sandboxes keep what they stand on."""
    with open_store(data) as store:
        for reference in references:
            for gone in store.remove(reference):
                console.print(gone, markup=False)


@layer_group.command()
@data_option
@json_option
@click.argument("references", nargs=-1)
def verify(data: Path, as_json: bool, references: tuple[str, ...]) -> None:
    """Read layers whole (all, if none is named) and compare them with their digests."""
    found: list[dict[str, str]] = []
    with open_store(data) as store, Shown() as shown:
        layers = [store.find(r) for r in references] if references else store.list()
        for layer in {layer.digest: layer for layer in layers}.values():
            shown.begin(f"reading {layer.name or layer.digest[:12]}", layer.total)
            found.append({"name": layer.name, "digest": layer.digest, "fault": _fault(store, layer, shown)})
    if as_json:
        print_json(found)
    else:
        table(
            ["NAME", "DIGEST", ""],
            ([f["name"] or "-", f["digest"][:12], _escaped(f["fault"]) or "[green]whole[/]"] for f in found),
        )
    if any(f["fault"] for f in found):
        sys.exit(1)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def _fault(store: LayerStore, layer: Layer, shown: Shown) -> str:
    try:
        store.verify(layer.digest, shown.bytes)
    except LayerCorrupt as e:
        return e.message
    except InvalidArgument as e:  # removed while we read
        return e.message
    return ""


class Shown(Progress):
    """A build's progress on stderr: bars on a terminal, else a line a stage."""

    def __init__(self) -> None:
        self._live = errors.is_terminal
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=errors,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bars.add_task("", total=None)

    def __enter__(self) -> Shown:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, what: str, total: int | None = None) -> None:
        self._bars.reset(self._task, description=what, total=total)

    def stage(self, name: str) -> None:
        self.begin(STAGES.get(name, name))
        if not self._live and os.environ.get("DSEC_QUIET") is None:
            errors.print(f"{STAGES.get(name, name)} ...", markup=False)

    def bytes(self, done: int) -> None:
        self._bars.update(self._task, completed=done)

    def said(self, line: str) -> None:
        self._bars.update(self._task, description=f"{STAGES['suite']}: {line[:60]}".replace("[", r"\["))
