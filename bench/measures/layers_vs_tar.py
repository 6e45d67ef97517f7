"""200 sandboxes with a workspace and two toolkits: as layers, and by unpacking the same archives into each.

Bytes written are those of /proc/PID/io, of the server, all that it started, and all in the sandboxes.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from bench import host
from bench.load import Fleet, flight
from bench.measures import Options
from bench.measures.common import with_client
from bench.result import Result, ratio, rounded
from bench.server import IMAGE, Target, layer_build, on_store, stock
from bench.tools import CACHE, Unavailable, base_dir, run
from dsec.client import DSecClient

CONCURRENCY = 32
PARTS = {"workspace": "usr/share/git-core", "toolkit": "usr/lib/python3.11", "toolkit-2": "usr/lib/python3"}
"""What each is made of, out of the base; it lies in /opt/NAME."""


def measure(options: Options) -> Result:
    """`count` is the number of sandboxes."""
    count = options.count or 200
    with TemporaryDirectory(dir=CACHE, prefix="layers-") as top:
        trees = _trees(Path(top) / "trees")
        archives = [_archive(tree) for tree in trees]
        run("cp", "-al", stock() / "store", Path(top) / "store")
        for tree in trees:
            layer_build(Path(top), f"{tree.name}:1", tree, "workspace")
        names = tuple(f"{tree.name}:1" for tree in trees)
        ours = _run(Path(top) / "store", count, options, names, [])
        theirs = _run(Path(top) / "store", count, options, (), archives)
    return _result(count, ours, theirs, sum(map(len, archives)) / 1e6)


def _result(count: int, ours: dict[str, float], theirs: dict[str, float], archives_mb: float) -> Result:
    return Result(
        measure="layers-vs-tar",
        value=round(ours["s"], 2),
        unit="s",
        ratios=rounded(
            {
                "speedup": ratio(theirs["s"], ours["s"]),
                "bytes_written_less": ratio(theirs["written"], ours["written"]),
            }
        ),
        figures=rounded(
            {
                "unpacking_s": theirs["s"],
                "written_mb": ours["written"],
                "unpacking_written_mb": theirs["written"],
                "archives_mb": archives_mb,
            }
        ),
        samples=count,
        host=host.describe(),
    )


def _trees(top: Path) -> list[Path]:
    for name, part in PARTS.items():
        where = top / name / "opt" / name
        where.parent.mkdir(parents=True)
        run("cp", "-a", base_dir() / part, where)
    return [top / name for name in PARTS]


def _archive(tree: Path) -> bytes:
    out = tree.with_suffix(".tar.gz")
    run("tar", "-C", tree, "-czf", out, ".")
    return out.read_bytes()


def _run(
    store: Path, count: int, options: Options, layers: tuple[str, ...], archives: list[bytes]
) -> dict[str, float]:
    """Seconds until all have what they need, and MB written until then."""

    async def go(client: DSecClient, to: Target) -> dict[str, float]:
        fleet = Fleet(client, to, layers=list(layers))
        before = host.written_mb(to.pids)

        async def one(_: int) -> None:
            sandbox = await fleet.make()
            for archive in archives:
                done = await sandbox.exec(["tar", "-xzf", "-", "-C", "/"], stdin=archive)
                if done.exit_code:
                    raise Unavailable(f"unpacking: {done.stderr!r:.300}")
            done = await sandbox.exec(["test", "-d", *(f"/opt/{n}" for n in list(PARTS)[:1])])
            if done.exit_code:
                raise Unavailable("a sandbox lacks its workspace")

        timings = await flight(count, options.concurrency or CONCURRENCY, one)
        timings.complain("make ready")
        run("sync", "-f", to.data or store)
        written = host.written_mb(to.pids | host.members(host.groups_of(to.edge))) - before
        await fleet.stop()
        if timings.failed:
            raise Unavailable(f"{timings.failed} of {count} sandboxes failed")
        return {"s": timings.seconds, "written": written}

    with on_store(store, IMAGE, "--no-prefetch") as to:
        return with_client(to, lambda client: go(client, to))
