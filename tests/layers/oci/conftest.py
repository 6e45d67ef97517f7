"""Real registries on this machine, and images to put into them."""

from __future__ import annotations

import io
import random
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from dsec.layers.oci import NewImage, NewLayer, OciConfig, Patience
from dsec.layers.oci.model import History

USER, PASSWORD = "alice", "s3cret"
HTPASSWD = "alice:$2b$04$YVOGEbVTmEWjr0NkU0ZS1.Cqdq.DDd6gK7Kb2yUsUuHSEdT55Wz8e\n"
QUICK = Patience(connect=20, read=20, commit=20, head=20, document=20, attempts=3, backoff=0.01, longest=2)


class Served(msgspec.Struct):
    """A registry that listens."""

    host: str
    root: Path
    ca: Path | None = None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def layer_of(data: bytes) -> NewLayer:
    def opened() -> IO[bytes]:
        return io.BytesIO(data)

    return NewLayer(opened)


def _history(command: str, empty: bool | None = None) -> History:
    return History(created="2024-01-01T00:00:00Z", created_by=command, empty_layer=empty)


def new_image(*tars: bytes) -> NewImage:
    config = OciConfig(
        env=["PATH=/bin", "A=b=c"],
        working_dir="/w",
        user="1000:1000",
        entrypoint=["/bin/sh"],
        cmd=["-c", "true"],
        labels={"a": "b"},
        stop_signal="SIGINT",
        shell=["/bin/sh", "-c"],
        history=[_history("one"), _history("env", True), _history("two")],
        created="2024-01-01T00:00:00Z",
    )
    return NewImage(config, [layer_of(t) for t in tars])


TARS = (
    tar_of({"etc/one": b"1" * 10_000, "big": random.Random(1).randbytes(700_000)}),
    tar_of({"etc/two": b"2", "etc/.wh.one": b""}),
)


@pytest.fixture
def image() -> NewImage:
    return new_image(*TARS)


def _wait(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if child.poll() is not None:
            break
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    child.kill()
    child.wait()
    pytest.fail(f"docker-registry does not listen: {log.read_text()[-2000:]}")


def _start(root: Path, extra: str, tls: str) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    config = root / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {root}/data}}}}\n"
        f"http:\n  addr: 127.0.0.1:{port}\n{tls}{extra}"
    )
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("needs docker-registry: scripts/setup docker-registry skopeo umoci openssl")
    log = root / "log"
    with log.open("wb") as out:
        child = subprocess.Popen([program, "serve", str(config)], stdout=out, stderr=out)
    _wait(port, child, log)
    return child, port


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with cert.pem, which vouches for itself, and key.pem."""
    root = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=registry",
            ),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", root / "key.pem", "-out", root / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return root


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Without TLS, open to all."""
    root = tmp_path_factory.mktemp("registry")
    child, port = _start(root, "", "")
    yield Served(f"127.0.0.1:{port}", root)
    child.terminate()
    child.wait(10)


@pytest.fixture(scope="session")
def locked_registry(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Served]:
    """With TLS and Basic."""
    root = tmp_path_factory.mktemp("locked")
    (root / "htpasswd").write_text(HTPASSWD)
    auth = f"auth: {{htpasswd: {{realm: test, path: {root}/htpasswd}}}}\n"
    tls = f"  tls: {{certificate: {certificate}/cert.pem, key: {certificate}/key.pem}}\n"
    child, port = _start(root, auth, tls)
    yield Served(f"127.0.0.1:{port}", root, certificate / "cert.pem")
    child.terminate()
    child.wait(10)


Handle = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """An HTTP server of a test's own; `handle` may do what it likes."""

    def __init__(self, handle: Handle) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                outer.requests.append(
                    (self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
                )
                handle(self)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # clients here hang up in the middle

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Handle], Server]]:
    servers: list[Server] = []

    def start(handle: Handle) -> Server:
        servers.append(Server(handle))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def answer(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    """`content_type=...` is Content-Type."""
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    if "content_length" not in headers:
        request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
