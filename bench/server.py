"""A server of the measure's own: a real `dsec up` in another process, on layers that are built once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

from bench.host import descendants
from bench.tools import CACHE, Unavailable, base_dir, run, small_dirs

STOP_LIMIT_S = 300
IMAGE = "bench/base:1"
LAYERS = ("bench/workspace:1", "bench/toolkit:1")


@dataclass(frozen=True)
class Target:
    """Where the load goes. Of one that is not ours (`--url`), what only its host knows is not measured."""

    url: str
    token: str
    image: str = IMAGE
    layers: tuple[str, ...] = LAYERS
    pid: int = 0
    data: Path | None = None

    @property
    def pids(self) -> set[int]:
        """The server and what it started (launchers), not the sandboxes' own processes."""
        return {p for p in descendants(self.pid) if not _in_sandbox(p)} if self.pid else set()

    @property
    def edge(self) -> str:
        return (self.data / "edge-id").read_text().strip() if self.data else ""


def _in_sandbox(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return True


def stock() -> Path:
    """A data directory that holds the benchmark's layers, built once; servers get a copy of its store."""
    out = CACHE / "stock"
    if not (out / "complete").exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, mode=0o700)
        kinds = ("base", "workspace", "toolkit")
        for source, name, kind in zip((base_dir(), *small_dirs()), (IMAGE, *LAYERS), kinds, strict=True):
            layer_build(out, name, source, kind)
        (out / "complete").touch()
    return out


def layer_build(data: Path, name: str, source: Path, kind: str) -> None:
    """A layer in the store of a server's data directory."""
    run(*_dsec("layer", "build", "--data", str(data), "--kind", kind, name, str(source)))


def _dsec(*argv: str) -> list[str]:
    return [sys.executable, "-m", "dsec.cli.main", *argv]


@contextmanager
def started(*options: str) -> Iterator[Target]:
    """A fresh server; when it ends, everything that it made is gone with its directory."""
    with _fresh() as data:
        run("cp", "-al", stock() / "store", data / "store")
        yield from _serve(data, options)


@contextmanager
def on_store(store: Path, image: str, *options: str) -> Iterator[Target]:
    """A fresh server that holds nothing; its layers lie in `store`."""
    with _fresh() as data:
        for target in _serve(data, ("--store", str(store), *options)):
            yield replace(target, image=image, layers=())


@contextmanager
def _fresh() -> Iterator[Path]:
    if os.geteuid() != 0:
        raise Unavailable("a server of our own needs root; give --url to measure a running one")
    CACHE.mkdir(parents=True, exist_ok=True)
    data = Path(mkdtemp(prefix="server-", dir=CACHE))
    try:
        yield data
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _serve(data: Path, options: Sequence[str]) -> Iterator[Target]:
    token, log = data / "first-token", data / "log"
    with log.open("wb") as to:
        process = subprocess.Popen(
            _dsec("up", "--data", str(data), "--listen", "127.0.0.1:0", "--token-file", str(token), *options),
            stdout=subprocess.PIPE,
            stderr=to,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        url = _address(process, log)
        yield Target(url, token.read_text().strip(), pid=process.pid, data=data)
    finally:
        _stop(process)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("dsec serves on "):
            return line.split()[-1]
    said = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise Unavailable(f"the server ended with {process.wait()}: {' | '.join(said)[-600:]}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise Unavailable(f"the server did not stop within {STOP_LIMIT_S} s") from None
    finally:
        assert process.stdout is not None
        process.stdout.close()
