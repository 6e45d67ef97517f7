"""Registries that take what is pushed badly, and where credentials may go."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest
from tests.layers.oci.conftest import QUICK, Handle, Server, answer

from dsec.core.errors import InvalidArgument, ProtocolError, TooManyRequests, Unavailable
from dsec.layers.oci import Credentials, NewImage, Reference, Registry, http, push
from dsec.layers.oci.http import Http, follow, is_local, origin

Serve = Callable[[Handle], Server]
Hook = Callable[[BaseHTTPRequestHandler, bytes], bool]


class Taker:
    """Takes blobs and manifests, unless the hook has answered."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.hook: Hook = lambda request, body: False
        self._pieces = b""

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", "0")))
        if self.hook(request, body):
            return
        if request.command == "HEAD":
            answer(request, 200 if request.path.rpartition("/")[2] in self.kept else 404)
        elif request.command == "POST":
            self._pieces = b""
            answer(request, 202, Location="/up/1?state=x")
        elif request.command == "PATCH":
            self._pieces += body
            answer(request, 202, Location="/up/1?state=y", Range=f"0-{len(self._pieces) - 1}")
        else:
            self._keep(request, body)

    def _keep(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        data = self._pieces + body if "/up/" in request.path else body
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.kept[digest] = data
        answer(request, 201, Docker_Content_Digest=digest)


@pytest.fixture
def taker() -> Taker:
    return Taker()


def pushed(server: Server, image: NewImage, chunk: int = 0) -> None:
    with Registry(server.host, patience=QUICK, plain_http=True) as to:
        written = push(to, Reference.parse(f"{server.host}/a/b:1"), image, chunk=chunk)
    assert written.manifest.size


@pytest.mark.parametrize("chunk", [0, 200_000])
def test_a_good_one(taker: Taker, serve: Serve, image: NewImage, chunk: int) -> None:
    server = serve(taker)
    pushed(server, image, chunk=chunk)
    assert len(taker.kept) == 4  # two layers, a configuration, a manifest
    patches = [h["content-range"] for m, _, h in server.requests if m == "PATCH"]
    assert bool(patches) == bool(chunk)
    assert not chunk or patches[:2] == ["0-199999", "200000-399999"]


def failing(taker: Taker, method: str, times: int, act: Callable[[BaseHTTPRequestHandler], None]) -> None:
    left = [times]

    def hook(request: BaseHTTPRequestHandler, body: bytes) -> bool:
        if request.command != method or not left[0] or "/manifests/" in request.path:
            return False
        left[0] -= 1
        act(request)
        return True

    taker.hook = hook


def hang_up(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    request.connection.close()


@pytest.mark.parametrize("chunk", [0, 200_000])
@pytest.mark.parametrize("act", [hang_up, lambda request: answer(request, 503)])
def test_an_upload_is_begun_anew(
    taker: Taker, serve: Serve, image: NewImage, chunk: int, act: Callable[[BaseHTTPRequestHandler], None]
) -> None:
    failing(taker, "PATCH" if chunk else "PUT", 1, act)
    pushed(serve(taker), image, chunk=chunk)
    assert len(taker.kept) == 4


def test_but_not_for_ever(taker: Taker, serve: Serve, image: NewImage) -> None:
    failing(taker, "PUT", 100, hang_up)
    server = serve(taker)
    with pytest.raises(Unavailable, match=r"pushing .*/a/b@sha256:.*broke"):
        pushed(server, image)
    assert sum(m == "POST" for m, _, _ in server.requests) == QUICK.attempts


@pytest.mark.parametrize("location", ["", "file:///x", "http://u:p@h/", "gopher://x/"])
def test_led_astray(taker: Taker, serve: Serve, image: NewImage, location: str) -> None:
    failing(taker, "POST", 9, lambda request: answer(request, 202, Location=location))
    with pytest.raises(ProtocolError, match="no place to go"):
        pushed(serve(taker), image)


def test_an_upload_elsewhere_gets_no_credentials(taker: Taker, serve: Serve, image: NewImage) -> None:
    other = serve(taker)

    def hook(request: BaseHTTPRequestHandler, body: bytes) -> bool:
        if request.headers.get("Host") == other.host:
            return False
        if "Authorization" not in request.headers:
            answer(request, 401, WWW_Authenticate='Basic realm="x"')
        elif request.command == "POST":
            answer(request, 202, Location=f"http://{other.host}/up/1")
        else:
            return False
        return True

    taker.hook = hook
    server = serve(taker)
    auth = Credentials(username="u", password="p")
    with Registry(server.host, credentials=auth, patience=QUICK, plain_http=True) as to:
        push(to, Reference.parse(f"{server.host}/a/b:1"), image)
    assert len(other.requests) == 3 and all("authorization" not in h for _, _, h in other.requests)


def test_an_answer_that_never_comes(taker: Taker, serve: Serve, image: NewImage) -> None:
    waiting = threading.Event()

    def wait(request: BaseHTTPRequestHandler) -> None:
        waiting.wait(10)

    failing(taker, "PUT", 9, wait)
    server = serve(taker)
    patience = msgspec.structs.replace(QUICK, commit=0.2, head=0.2, attempts=2)
    to = Registry(server.host, patience=patience, plain_http=True)
    with to, pytest.raises(Unavailable, match=r"pushing .*does not answer"):
        push(to, Reference.parse(f"{server.host}/a/b:1"), image)
    waiting.set()


def test_pieces_that_get_lost(taker: Taker, serve: Serve, image: NewImage) -> None:
    failing(taker, "PATCH", 9, lambda request: answer(request, 202, Location="/up/1", Range="0-5"))
    with pytest.raises(ProtocolError, match="did not keep all of"):
        pushed(serve(taker), image, chunk=100_000)


def test_another_manifest_is_kept(taker: Taker, serve: Serve, image: NewImage) -> None:
    def hook(request: BaseHTTPRequestHandler, body: bytes) -> bool:
        if "/manifests/" not in request.path:
            return False
        answer(request, 201, Docker_Content_Digest="sha256:" + "0" * 64)
        return True

    taker.hook = hook
    with pytest.raises(ProtocolError, match=r"pushing .*/a/b:1: the registry keeps sha256:0000"):
        pushed(serve(taker), image)


def test_too_many(taker: Taker, serve: Serve, image: NewImage) -> None:
    failing(taker, "POST", 99, lambda request: answer(request, 429))
    with pytest.raises(TooManyRequests, match="pushing .*: wait, or log in".replace(".*", r"\S+ .*")):
        pushed(serve(taker), image)


def test_under_a_digest_that_it_has_not(taker: Taker, serve: Serve, image: NewImage) -> None:
    server = serve(taker)
    reference = Reference.parse(f"{server.host}/a/b@sha256:{'0' * 64}")
    with (
        Registry(server.host, patience=QUICK, plain_http=True) as to,
        pytest.raises(InvalidArgument, match="is sha256:"),
    ):
        push(to, reference, image)


# Where things lead


def test_following() -> None:
    assert follow("https://h/a/b", "../c?d=e", "x") == "https://h/c?d=e"
    assert follow("https://h/a", "//other/c", "x") == "https://other/c"
    assert follow("http://h/a", "https://other/c", "x") == "https://other/c"
    with pytest.raises(ProtocolError, match="from https to 'http://h/a': not followed"):
        follow("https://h/a", "http://h/a", "x")
    with pytest.raises(ProtocolError, match="no place to go"):
        follow("https://h/a", "https://h:99999/a", "x")


def test_origins() -> None:
    assert origin("https://H/x") == origin("https://h:443/y") != origin("http://h/x")
    assert origin("https://h:444/") != origin("https://h/")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:5000", "127.0.0.1", "127.0.0.9:1", "[::1]", "[::1]:5000"]
)
def test_this_machine(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize(
    "host", ["localhost.example", "127.example:5000", "127.0.0.1.example", "[::2]", "h", "10.0.0.1"]
)
def test_other_machines(host: str) -> None:
    assert not is_local(host)


def test_proxies(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    proxy = serve(lambda request: answer(request, 200, b"by proxy"))
    monkeypatch.setenv("http_proxy", f"http://{proxy.host}")
    monkeypatch.setenv("no_proxy", "near.test")
    client = Http(patience=QUICK)
    response = client.send("GET", "http://far.test/x", {}, None, "x")
    assert client.read(response, 100, "x") == b"by proxy"
    assert proxy.requests[0][1] == "http://far.test/x"
    assert http._proxy("http://near.test/") == http._proxy("http://127.0.0.1:1/") == ""
    client.close()


def test_a_certificate_authority_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(InvalidArgument, match="certificate authority"):
            Http(ca=path)
