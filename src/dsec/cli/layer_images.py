"""dsec layer import, export, push, gc: images of others, and space."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dsec.cli.layer import Shown, data_option, json_option, layer_group, open_store, pairs
from dsec.cli.output import console, print_json, size
from dsec.layers.build import Builder, Wanted
from dsec.layers.exporter import Exporter
from dsec.layers.importer import COLLAPSE_BELOW, Importer, name_of
from dsec.layers.model import KINDS, Kind
from dsec.layers.oci.credentials import find
from dsec.layers.oci.reference import Reference


def registry_options(f: Any) -> Any:
    f = click.option("--plain-http", is_flag=True, help="No TLS. (Not needed for localhost.)")(f)
    f = click.option("--ca", type=click.Path(path_type=Path), help="Certificates of the registry.")(f)
    return click.option("--insecure", is_flag=True, help="Believe any certificate.")(f)


def registry(plain_http: bool, ca: Path | None, insecure: bool) -> dict[str, Any]:
    return {"plain_http": plain_http or None, "ca": ca, "verify": not insecure}


@layer_group.command("import")
@data_option
@json_option
@click.option("--kind", type=click.Choice(KINDS), default="base", show_default=True)
@click.option("--label", "labels", multiple=True, metavar="K=V")
@click.option("--platform", help="Such as linux/arm64; this machine's if it is not given.")
@click.option(
    "--collapse-below",
    type=click.IntRange(0),
    default=COLLAPSE_BELOW,
    show_default=True,
    metavar="BYTES",
    help="Consecutive layers of the image become one up to this.",
)
@registry_options
@click.argument("source")
@click.argument("name", default="")
def import_(
    data: Path,
    as_json: bool,
    kind: Kind,
    labels: tuple[str, ...],
    platform: str | None,
    collapse_below: int,
    source: str,
    name: str,
    **how: Any,
) -> None:
    """Import an image as layer NAME.

    SOURCE: HOST/REPOSITORY:TAG of a registry, docker://..., oci:DIR, oci-archive:FILE, docker-archive:FILE,
    or the path of one of these.
    """
    wanted = Wanted(
        name=name or name_of(source),
        kind=kind,
        labels=pairs(labels, "--label"),
        command=["dsec", "layer", "import", *sys.argv[sys.argv.index("import") + 1 :]]
        if "import" in sys.argv
        else [],
    )
    with open_store(data) as store, Shown() as shown:
        importer = Importer(Builder(store, shown), collapse_below=collapse_below)
        layer = importer.load(source, wanted, platform=platform, **registry(**how))
        total = sum(one.total for one in store.expand([layer]))
    if as_json:
        print_json(layer)
    else:
        console.print(f"{layer.name or layer.digest}  {layer.digest[:12]}  {size(total)}", markup=False)


@layer_group.command()
@data_option
@click.option("--form", type=click.Choice(["oci", "docker", "layout"]), default="docker", show_default=True)
@click.option("--name", default="", help="What `docker load` is to call it; the last layer's name.")
@click.option("--level", type=click.IntRange(1, 9), default=6, show_default=True, help="Of gzip.")
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("references", nargs=-1, required=True)
def export(data: Path, form: str, name: str, level: int, target: Path, references: tuple[str, ...]) -> None:
    """Write layers, bottom to top, as one image: TARGET is an archive, or a directory for `layout`."""
    with open_store(data) as store:
        exporter = Exporter(store)
        name = name or store.find(references[-1]).name
        if form == "layout":
            written = exporter.to_layout(references, target, level=level)
        elif form == "oci":
            written = exporter.to_archive(references, target, "oci", name=name, level=level)
        else:
            written = exporter.to_archive(references, target, "docker", name=name, level=level)
    console.print(f"{target}  {written.manifest.digest}", markup=False)


@layer_group.command()
@data_option
@click.option("--level", type=click.IntRange(1, 9), default=6, show_default=True, help="Of gzip.")
@registry_options
@click.argument("references", nargs=-1, required=True)
@click.argument("target")
def push(data: Path, level: int, references: tuple[str, ...], target: str, **how: Any) -> None:
    """Push layers, bottom to top, as one image to TARGET, HOST/REPOSITORY:TAG."""
    credentials = find(Reference.parse(target).host, None)
    with open_store(data) as store:
        written = Exporter(store).to_registry(
            references, target, level=level, credentials=credentials, **registry(**how)
        )
    console.print(f"{target}  {written.manifest.digest}", markup=False)


@layer_group.command()
@data_option
@json_option
@click.option("--grace", type=click.FloatRange(0), default=24.0, show_default=True, metavar="HOURS")
def gc(data: Path, as_json: bool, grace: float) -> None:
    """Remove layers that no name needs and nobody has used for the grace period, and their blobs."""
    with open_store(data) as store:
        gone = store.collect(grace * 3600)
    if as_json:
        print_json(gone)
    else:
        console.print(
            f"{len(gone.layers)} layers, {len(gone.blobs)} blobs, {size(gone.bytes)} freed", markup=False
        )
