"""Docker from the distribution, started by hand with everything below one directory, for comparison only.

A dockerd that is installed is used; otherwise the distribution's packages are fetched and unpacked beside the
benchmarks, so that nothing is installed and no service starts. Containers get no network, as ours do.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp

from bench.result import percentile
from bench.tools import CACHE, Unavailable, base_tar, run

PACKAGES = ("docker.io", "containerd", "runc", "tini", "libdevmapper1.02.1")
START_LIMIT_S = 60
IMAGE = "bench:base"
LIMITS = ("--network=none", "--memory=2g", "--pids-limit=1024", "--cpus=1")


def find() -> dict[str, str]:
    """An environment whose PATH and libraries have dockerd. Raises Unavailable."""
    if shutil.which("dockerd"):
        return dict(os.environ)
    top = CACHE / "docker"
    if not (top / "usr/sbin/dockerd").exists():
        _fetch(top)
    paths = [str(top / d) for d in ("usr/bin", "usr/sbin")]
    lib = top / "usr/lib"
    libraries = map(str, (lib, *lib.glob("*-linux-gnu"), *(top / "lib").glob("*-linux-gnu")))
    path = ":".join([*paths, os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return {**os.environ, "PATH": path, "LD_LIBRARY_PATH": ":".join(libraries)}


def _fetch(top: Path) -> None:
    if not shutil.which("apt-get"):
        raise Unavailable("dockerd is not installed, and this is no Debian")
    debs = CACHE / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    run("apt-get", "download", *PACKAGES, cwd=debs)
    part = top.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    for deb in debs.glob("*.deb"):
        run("dpkg", "-x", deb, part)
    part.rename(top)


@dataclass
class Docker:
    """A running dockerd of our own."""

    top: Path
    env: dict[str, str]
    process: subprocess.Popen[bytes]
    names: list[str] = field(default_factory=list)

    @property
    def socket(self) -> str:
        return str(self.top / "docker.sock")

    def __call__(self, *argv: str) -> str:
        return run(self._client(), "-H", f"unix://{self.socket}", *argv, env=self.env)

    def _client(self) -> str:
        return shutil.which("docker", path=self.env["PATH"]) or "docker"

    async def client(self, *argv: str) -> float:
        """One `docker` command; how long it took, in ms."""
        start = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            self._client(), "-H", f"unix://{self.socket}", *argv,
            env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        if process.returncode:
            raise Unavailable(f"docker {argv[0]}: {said.decode(errors='replace').strip()[-300:]}")
        return (time.perf_counter() - start) * 1e3

    def remove(self, names: list[str]) -> None:
        if names:
            self("rm", "-f", *names)


@contextmanager
def started() -> Iterator[Docker]:
    """dockerd with the benchmark's base root imported. Ends and removes all of it."""
    env = find()
    tar = base_tar()
    top = Path(mkdtemp(prefix="dsec-bench-docker-"))
    parent = f"/{top.name}"
    try:
        with (top / "log").open("wb") as log:
            process = subprocess.Popen(
                _argv(top, parent), env=env, stdout=log, stderr=log, start_new_session=True
            )
        docker = Docker(top, env, process)
        try:
            _await_ready(docker)
            docker("import", str(tar), IMAGE)
            yield docker
        finally:
            _stop(docker)
    finally:
        _sweep(top, parent)


def _argv(top: Path, parent: str) -> list[str]:
    return [
        "dockerd", "--data-root", f"{top}/data", "--exec-root", f"{top}/run", "--pidfile", f"{top}/pid",
        "-H", f"unix://{top}/docker.sock", "--bridge=none", "--iptables=false", "--cgroup-parent", parent,
    ]  # fmt: skip


def _await_ready(docker: Docker) -> None:
    """dockerd has no way to tell that it serves, but its socket."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if docker.process.poll() is not None:
            said = (docker.top / "log").read_text(errors="replace").strip().splitlines()[-2:]
            raise Unavailable(f"dockerd ended with {docker.process.returncode}: {'; '.join(said)[-400:]}")
        with suppress(Unavailable):
            docker("version")
            return
        time.sleep(0.1)
    raise Unavailable(f"dockerd did not serve within {START_LIMIT_S} s")


def _stop(docker: Docker) -> None:
    with suppress(Unavailable):
        docker.remove(docker("ps", "-aq").split())
    docker.process.send_signal(signal.SIGTERM)
    try:
        docker.process.wait(timeout=START_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(docker.process.pid, signal.SIGKILL)
        docker.process.wait()


def _sweep(top: Path, parent: str) -> None:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{top}/")), reverse=True):
        subprocess.run(["umount", "-l", mount], check=False)
    for group in Path("/sys/fs/cgroup").glob(f"*{parent}"):
        for path in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
            path.rmdir()
        group.rmdir()
    shutil.rmtree(top, ignore_errors=True)


# --- measures ---


async def at_once(count: int, concurrency: int, one: Any) -> tuple[list[float], float]:
    """`count` calls of `one(i)` with so many in flight: each one's ms, and how many a second."""
    gate = asyncio.Semaphore(concurrency)

    async def guarded(i: int) -> float:
        async with gate:
            took: float = await one(i)
            return took

    start = time.perf_counter()
    took = await asyncio.gather(*(guarded(i) for i in range(count)))
    return list(took), count / (time.perf_counter() - start)


def run_argv(name: str) -> tuple[str, ...]:
    return ("run", "-d", "--name", name, *LIMITS, IMAGE, "sleep", "infinity")


async def creations(
    docker: Docker, *, alone: int = 10, burst: int = 32, concurrency: int = 8
) -> dict[str, float]:
    """`docker run -d` to started: p50 alone in ms, and per second with several in flight."""
    one, _ = await at_once(alone, 1, lambda i: docker.client(*run_argv(f"a{i}")))
    docker.remove([f"a{i}" for i in range(alone)])
    _, rate = await at_once(burst, concurrency, lambda i: docker.client(*run_argv(f"b{i}")))
    docker.remove([f"b{i}" for i in range(burst)])
    return {"p50_ms": percentile(one, 0.5), "rate": rate}


async def api_creations(docker: Docker, *, burst: int = 32, concurrency: int = 8) -> float:
    """The same through Docker's HTTP interface, with no client program to start: per second."""
    body = {
        "Image": IMAGE,
        "Cmd": ["sleep", "infinity"],
        "HostConfig": {"NetworkMode": "none", "Memory": 2 << 30, "PidsLimit": 1024, "NanoCpus": 10**9},
    }
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(docker.socket, limit=0)) as session:

        async def one(i: int) -> float:
            async with session.post(
                "http://docker/containers/create", params={"name": f"c{i}"}, json=body
            ) as r:
                made = await r.json()
            async with session.post(f"http://docker/containers/{made['Id']}/start") as r:
                if r.status != 204:
                    raise Unavailable(f"docker start: {await r.text()}")
            return 0.0

        _, rate = await at_once(burst, concurrency, one)
    docker.remove([f"c{i}" for i in range(burst)])
    return rate


async def execs(docker: Docker, *, count: int = 20) -> float:
    """`docker exec ... true` alone: p50 in ms."""
    await docker.client(*run_argv("e0"))
    took, _ = await at_once(count, 1, lambda _: docker.client("exec", "e0", "/bin/true"))
    docker.remove(["e0"])
    return percentile(took, 0.5)


async def cycles(docker: Docker, *, count: int = 32, concurrency: int = 8) -> float:
    """`docker run --rm ... true`: per second."""
    _, rate = await at_once(
        count, concurrency, lambda _: docker.client("run", "--rm", *LIMITS, IMAGE, "/bin/true")
    )
    return rate
