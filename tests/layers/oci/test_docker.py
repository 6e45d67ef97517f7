"""Docker itself as a witness, where its daemon answers or can be started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.layers.oci.conftest import TARS, Served, new_image, tar_of

from dsec.layers.oci import NewImage, Reference, Registry, open_image, push, write_archive

Docker = Callable[..., bytes]
NAME = "dsec-test/loaded:1"


def run(host: list[str], *arguments: object) -> subprocess.CompletedProcess[bytes]:
    command = ["docker", *host, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False)


def answers(host: list[str]) -> bool:
    return run(host, "info", "--format", "{{.ServerVersion}}").returncode == 0


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """Runs a docker command, and gives what it prints."""
    if shutil.which("docker") is None:
        pytest.skip("no docker here")
    if answers([]):
        yield commands([])
        return
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        pytest.skip("no Docker daemon answers, and none can be started: no dockerd, or not root")
    yield from started(tmp_path_factory.mktemp("docker"))


def started(root: Path) -> Iterator[Docker]:
    host = ["-H", f"unix://{root}/sock"]
    where = [f"--data-root={root}/data", f"--exec-root={root}/run", f"--pidfile={root}/pid"]
    how = ["--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs"]
    with (root / "log").open("wb") as log:
        daemon = subprocess.Popen(["dockerd", *where, *how, *host], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 30
        while not answers(host):
            if daemon.poll() is not None or time.monotonic() > until:
                said = (root / "log").read_text()[-500:]
                pytest.skip(f"dockerd does not start here: {said}")
            time.sleep(0.1)
        yield commands(host)
    finally:
        daemon.terminate()
        daemon.wait(30)


def commands(host: list[str]) -> Docker:
    def docker(*arguments: object) -> bytes:
        done = run(host, *arguments)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    return docker


def check(docker: Docker, name: str) -> None:
    seen = json.loads(docker("inspect", name))[0]
    config = seen["Config"]
    assert config["Env"] == ["PATH=/bin", "A=b=c"] and config["WorkingDir"] == "/w"
    assert config["Labels"] == {"a": "b"} and config["User"] == "1000:1000"
    assert len(seen["RootFS"]["Layers"]) == 2


@pytest.mark.parametrize("form", ["oci", "docker"])
def test_load(docker: Docker, image: NewImage, tmp_path: Path, form: Any) -> None:
    write_archive(tmp_path / "a.tar", image, form, name=NAME)
    try:
        assert NAME.encode() in docker("load", "-i", tmp_path / "a.tar")
        check(docker, NAME)
        container = docker("create", "--network=none", NAME).decode().strip()
        docker("export", container, "-o", tmp_path / "root.tar")
        docker("rm", container)
    finally:
        docker("rmi", NAME)
    listing = subprocess.run(["tar", "-tf", tmp_path / "root.tar"], capture_output=True, check=True).stdout
    assert b"etc/two\n" in listing and b"etc/one\n" not in listing


def test_save(docker: Docker, tmp_path: Path) -> None:
    """What `docker save` writes, with a layer that comes twice."""
    tars = [tar_of({"a": b"1"}), tar_of({"b": b"2"}), tar_of({"a": b"1"})]
    write_archive(tmp_path / "a.tar", new_image(*tars), "docker", name=NAME)
    try:
        docker("load", "-i", tmp_path / "a.tar")
        docker("save", "-o", tmp_path / "saved.tar", NAME)
    finally:
        docker("rmi", NAME)
    for source in (f"docker-archive:{tmp_path}/saved.tar", f"docker-archive:{tmp_path}/saved.tar:{NAME}"):
        with open_image(source) as found:
            for number, tar in enumerate(tars):
                with found.open_tar(number) as stream:
                    assert stream.read() == tar
            assert found.config.labels == {"a": "b"}


def test_pull_and_push(docker: Docker, image: NewImage, registry: Served) -> None:
    name = f"{registry.host}/docker/image"
    with Registry(registry.host) as to:
        push(to, Reference.parse(f"{name}:1"), image)
    docker("pull", f"{name}:1")
    try:
        check(docker, f"{name}:1")
        docker("tag", f"{name}:1", f"{name}:2")
        docker("push", f"{name}:2")
    finally:
        docker("rmi", "-f", f"{name}:1", f"{name}:2")
    with open_image(f"{name}:2") as found:
        for number, tar in enumerate(TARS):
            with found.open_tar(number) as stream:
                assert stream.read() == tar
