"""What measures stand on: the C programs built, a base root made once, a pool for the limit program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / "build" / "bench"
PROGRAMS = {"limit": ("limit.c", "limit_host.c", "limit_sandbox.c"), "spawn_limit": ("spawn_limit.c",)}
CFLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-static")
SUITE = "bookworm"
POOL_SIZE = 16 << 30


class Unavailable(Exception):
    """This host lacks what a measure or a comparison needs; the text says what."""


def run(*argv: str | Path, **options: Any) -> str:
    """The program's output. Raises Unavailable with its last words when it fails."""
    try:
        done = subprocess.run([*map(str, argv)], capture_output=True, text=True, check=True, **options)
    except FileNotFoundError:
        raise Unavailable(f"{argv[0]} is not installed") from None
    except subprocess.CalledProcessError as e:
        said = "; ".join((e.stderr or e.stdout or "").strip().splitlines()[-3:])
        raise Unavailable(f"{Path(argv[0]).name} failed with {e.returncode}: {said}") from None
    return str(done.stdout)


def program(name: str) -> Path:
    """One of the C programs here, built anew when its source is newer."""
    out = CACHE / name
    sources = [HERE / file for file in PROGRAMS[name]]
    newest = max(path.stat().st_mtime for path in (*sources, HERE / "limit.h"))
    if not out.exists() or out.stat().st_mtime < newest:
        CACHE.mkdir(parents=True, exist_ok=True)
        run("cc", *CFLAGS, "-o", out, *sources)
    return out


def base_tar() -> Path:
    """A Debian root with Python and git, made once."""
    out = CACHE / f"{SUITE}.tar"
    if not out.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part.tar")
        run("mmdebstrap", "--variant=minbase", "--include=python3,git", SUITE, part)
        part.rename(out)
    return out


def base_dir() -> Path:
    """The same, unpacked (device nodes apart: a sandbox brings its own)."""
    out = CACHE / SUITE
    if not out.exists():
        part = CACHE / f"{SUITE}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        run("tar", "-C", part, "--numeric-owner", "--xattrs", "-xf", base_tar(), "--exclude=./dev/*")
        part.rename(out)
    return out


def small_dirs() -> list[Path]:
    """A workspace and a toolkit, next to nothing in each: they cost a creation a layer, not bytes."""
    made = []
    for name, file in (("workspace", "workspace/README"), ("toolkit", "opt/toolkit/README")):
        top = CACHE / name
        (top / file).parent.mkdir(parents=True, exist_ok=True)
        (top / file).write_text(f"{name}\n")
        made.append(top)
    return made


def erofs_layers() -> list[Path]:
    """The benchmark's stack as EROFS images, bottom to top: base, workspace, toolkit."""
    images = []
    for source in (base_dir(), *small_dirs()):
        image = CACHE / f"{source.name}.erofs"
        if not image.exists():
            run("mkfs.erofs", image.with_suffix(".part"), source)
            image.with_suffix(".part").rename(image)
        images.append(image)
    return images


def limit(count: int, jobs: int, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run the limit program on a fresh pool. Its JSON."""
    pool = CACHE / f"pool-{os.getpid()}.img"
    stack = [arg for layer in erofs_layers() for arg in ("--layer", str(layer))]
    try:
        with pool.open("wb") as f:
            f.truncate(POOL_SIZE)
        run("mkfs.btrfs", "-q", "-f", pool)
        said = run(
            program("limit"), "--pool", pool, *stack, "--count", str(count), "--jobs", str(jobs), *options
        )
    finally:
        pool.unlink(missing_ok=True)
    parsed: dict[str, Any] = json.loads(said)
    return parsed


def best_limit(count: int, concurrency: int) -> dict[str, Any]:
    """The limit program at its fastest: as many workers as cores, some more, or as many as are in flight.

    More workers than cores hide what the kernel waits for (RCU, the loop device), so that is tried too.
    """
    cores = os.cpu_count() or 1
    runs = [limit(count, jobs) for jobs in sorted({cores, 4 * cores, concurrency})]
    best = max(runs, key=lambda r: float(r["rate"]))
    return {**best, "rate_by_jobs": {str(r["jobs"]): r["rate"] for r in runs}}


def spawn_limit(count: int, concurrency: int) -> dict[str, Any]:
    """A bare posix_spawn loop of /bin/true."""
    said = run(program("spawn_limit"), "--count", str(count), "--concurrency", str(concurrency))
    parsed: dict[str, Any] = json.loads(said)
    return parsed
