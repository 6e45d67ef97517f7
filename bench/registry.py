"""A registry of the distribution's on this machine, with an image: a Debian base and a layer of libraries."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.tools import CACHE, Unavailable, base_dir, base_tar, run
from dsec.layers.oci import NewImage, NewLayer, OciConfig, Reference, Registry, push

START_LIMIT_S: Final = 30
NAME: Final = "bench/image:1"


@contextmanager
def served() -> Iterator[str]:
    """The image's reference. What was pushed once stays in build/bench."""
    top = CACHE / "registry"
    with TemporaryDirectory(prefix="dsec-bench-registry-") as scratch:
        process, host = _start(top, Path(scratch))
        try:
            reference = f"{host}/{NAME}"
            if not (top / "complete").exists():
                _push(reference)
                (top / "complete").touch()
            yield reference
        finally:
            process.terminate()
            process.wait()


def _start(top: Path, scratch: Path) -> tuple[subprocess.Popen[bytes], str]:
    program = shutil.which("docker-registry")
    if program is None:
        raise Unavailable("docker-registry is not installed: scripts/setup docker-registry")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{s.getsockname()[1]}"
    config = scratch / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {top}/data}}}}\n"
        f"http: {{addr: {host}}}\n"
    )
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    _await(process, host)
    return process, host


def _await(process: subprocess.Popen[bytes], host: str) -> None:
    """It has no way to tell that it serves, but its port."""
    name, _, port = host.partition(":")
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as s:
            if s.connect_ex((name, int(port))) == 0:
                return
        time.sleep(0.02)
    process.kill()
    raise Unavailable(f"docker-registry did not serve (status {process.wait()})")


def _push(reference: str) -> None:
    """Its second layer is as large as a few libraries."""
    with TemporaryDirectory(dir=CACHE, prefix="image-") as top:
        libraries = Path(top) / "libraries.tar"
        run("tar", "-C", base_dir(), "--transform", "s,^,opt/,rh", "-cf", libraries, "usr/lib")
        tars = (base_tar(), libraries)
        layers = [NewLayer(lambda tar=tar: tar.open("rb")) for tar in tars]  # type: ignore[misc]
        parsed = Reference.parse(reference)
        with Registry(parsed.host) as registry:
            push(registry, parsed, NewImage(OciConfig(cmd=["/bin/sh"]), layers))
