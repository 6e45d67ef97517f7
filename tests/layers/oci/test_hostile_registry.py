"""Registries that are slow, broken or hostile. Every error is typed and names the image."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest
from tests.layers.oci.conftest import QUICK, TARS, Handle, Server, answer
from tests.layers.oci.fake import Fake

from dsec.core.errors import (
    LayerCorrupt,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    ProtocolError,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from dsec.layers.oci import Credentials, ImageSource, NewImage, open_image

Serve = Callable[[Handle], Server]


@pytest.fixture
def fake(image: NewImage, tmp_path: Path) -> Fake:
    return Fake(image, tmp_path / "fake")


def opened(server: Server) -> ImageSource:
    return open_image(f"{server.host}/a/b:1", patience=QUICK, plain_http=True)


def read(server: Server, number: int = 0) -> bytes:
    with opened(server) as image, image.open_tar(number) as stream:
        return stream.read()


def blobs(fake: Fake, act: Callable[[BaseHTTPRequestHandler, bytes], None]) -> None:
    """What is done when the first layer is asked for."""

    def hook(request: BaseHTTPRequestHandler) -> bool:
        if not request.path.endswith(fake.layer):
            return False
        act(request, fake.data(fake.layer))
        return True

    fake.hook = hook


def cut(request: BaseHTTPRequestHandler, data: bytes, length: int | None, sent: int) -> None:
    request.send_response(200)
    if length is not None:
        request.send_header("Content-Length", str(length))
    request.end_headers()
    request.wfile.write(data[:sent])
    request.close_connection = True


def test_a_good_one(fake: Fake, serve: Serve) -> None:
    server = serve(fake)
    assert [read(server, n) for n in (0, 1)] == list(TARS)


def test_a_broken_connection_is_taken_up_again(fake: Fake, serve: Serve) -> None:
    ranges: list[str | None] = []

    def act(request: BaseHTTPRequestHandler, data: bytes) -> None:
        ranges.append(request.headers.get("Range"))
        start = 300_000 * (len(ranges) - 1)
        if len(ranges) > 1:
            assert request.headers["Range"] == f"bytes={start}-"
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        request.wfile.write(data[start : start + 300_000])
        request.close_connection = True

    blobs(fake, act)
    assert read(serve(fake)) == TARS[0]
    assert ranges == [None, "bytes=300000-", "bytes=600000-"]


def test_one_that_knows_no_ranges(fake: Fake, serve: Serve) -> None:
    tries = []

    def act(request: BaseHTTPRequestHandler, data: bytes) -> None:
        tries.append(1)
        cut(request, data, len(data), len(data) if len(tries) > 1 else 300_000)

    blobs(fake, act)
    assert read(serve(fake)) == TARS[0] and len(tries) == 2


def test_one_that_breaks_off_for_ever(fake: Fake, serve: Serve) -> None:
    blobs(fake, lambda request, data: cut(request, data, len(data), 1000))
    with pytest.raises(Unavailable, match=r"a/b:1: layer 0 .*broke off 3 times, the last after 1000 of"):
        read(serve(fake))


def test_other_bytes_than_asked_for(fake: Fake, serve: Serve) -> None:
    def act(request: BaseHTTPRequestHandler, data: bytes) -> None:
        if "Range" in request.headers:
            answer(request, 206, data[:10], Content_Range=f"bytes 0-9/{len(data)}")
        else:
            cut(request, data, len(data), 1000)

    blobs(fake, act)
    with pytest.raises(ProtocolError, match="sends other bytes"):
        read(serve(fake))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda data: data[:-1], LayerCorrupt, r"the registry has \d+ bytes, not"),
        (lambda data: data + b"x", LayerCorrupt, r"the registry has \d+ bytes, not"),
        (lambda data: data[:-9] + bytes(9), LayerCorrupt, "its content is sha256:|damaged"),
        (lambda data: bytes(len(data)), LayerCorrupt, "its content is sha256:"),
    ],
)
def test_another_blob(
    fake: Fake, serve: Serve, change: Callable[[bytes], bytes], error: type[Exception], says: str
) -> None:
    blobs(fake, lambda request, data: answer(request, 200, change(data)))
    with pytest.raises(error, match=rf"a/b:1: layer 0 .*({says})"):
        read(serve(fake))


def test_more_than_was_said(fake: Fake, serve: Serve) -> None:
    """Without a length, it is the bytes that tell."""
    blobs(fake, lambda request, data: cut(request, data + bytes(1 << 20), None, len(data) + (1 << 20)))
    with pytest.raises(LayerCorrupt, match=r"more than the \d+ bytes that were promised"):
        read(serve(fake))


def test_less_than_was_said(fake: Fake, serve: Serve) -> None:
    blobs(fake, lambda request, data: cut(request, data, None, 5000))
    with pytest.raises(Unavailable, match=r"broke off 3 times"):
        read(serve(fake))


def manifests(fake: Fake, act: Callable[[BaseHTTPRequestHandler], None]) -> None:
    def hook(request: BaseHTTPRequestHandler) -> bool:
        if "/manifests/" not in request.path:
            return False
        act(request)
        return True

    fake.hook = hook


def test_another_manifest_than_its_digest(fake: Fake, serve: Serve) -> None:
    data = fake.data(fake.written.manifest.digest)
    manifests(fake, lambda request: answer(request, 200, data + b" "))
    server = serve(fake)
    with pytest.raises(LayerCorrupt, match=r"a/b@sha256:.*its content is sha256:"):
        open_image(f"{server.host}/a/b@{fake.written.manifest.digest}", patience=QUICK, plain_http=True)


def test_another_configuration(fake: Fake, serve: Serve) -> None:
    good = fake.data

    def data(digest: str) -> bytes:
        return good(digest).replace(b"/w", b"/x")

    fake.data = data  # type: ignore[method-assign]
    with pytest.raises(LayerCorrupt, match=r"configuration: its content is"):
        opened(serve(fake))


def test_a_huge_manifest(fake: Fake, serve: Serve) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.close_connection = True
        for _ in range(200):
            request.wfile.write(b" " * (1 << 20))

    manifests(fake, endless)
    with pytest.raises(PayloadTooLarge, match="a/b:1: the server sends more than 4194304 bytes"):
        opened(serve(fake))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, Unauthenticated),
        (403, PermissionDenied),
        (404, NotFound),
        (429, TooManyRequests),
        (500, Unavailable),
        (418, ProtocolError),
        (204, ProtocolError),
    ],
)
def test_statuses(fake: Fake, serve: Serve, status: int, error: type[Exception]) -> None:
    body = b'{"errors":[{"code":"OOPS","message":"look\\u0007here"}]}'
    manifests(fake, lambda request: answer(request, status, body if status != 204 else b""))
    with pytest.raises(error, match=r"image 127\.0\.0\.1:\d+/a/b:1: .*"):
        opened(serve(fake))


def test_it_is_asked_again(fake: Fake, serve: Serve) -> None:
    left = [503, 429]

    def hook(request: BaseHTTPRequestHandler) -> bool:
        if not left:
            return False
        answer(request, left.pop(), Retry_After="0")
        return True

    fake.hook = hook
    assert read(serve(fake), 1) == TARS[1]


def test_a_pause_that_is_too_long(fake: Fake, serve: Serve) -> None:
    manifests(fake, lambda request: answer(request, 429, Retry_After="86400"))
    with pytest.raises(TooManyRequests, match=r"a/b:1: the registry asks to come back in 86400 s"):
        opened(serve(fake))


def test_a_pause_is_kept(fake: Fake, serve: Serve) -> None:
    times: list[float] = []

    def act(request: BaseHTTPRequestHandler) -> None:
        times.append(time.monotonic())
        answer(request, 429, Retry_After="1")

    manifests(fake, act)
    with pytest.raises(TooManyRequests, match="answers 429"):
        opened(serve(fake))
    assert len(times) == QUICK.attempts and times[1] - times[0] >= 0.95


# Redirects


def test_credentials_stay_at_home(fake: Fake, serve: Serve) -> None:
    other = serve(lambda request: fake.blob(request, request.path.removeprefix("/elsewhere/")))

    def hook(request: BaseHTTPRequestHandler) -> bool:
        if request.headers.get("Authorization") != "Basic dTpw":
            answer(request, 401, WWW_Authenticate='Basic realm="x"')
        elif "/blobs/" in request.path:
            digest = request.path.rpartition("/")[2]
            answer(request, 307, Location=f"http://{other.host}/elsewhere/{digest}")
        else:
            return False
        return True

    fake.hook = hook
    server = serve(fake)
    auth = Credentials(username="u", password="p")
    image = open_image(f"{server.host}/a/b:1", auth=auth, patience=QUICK, plain_http=True)
    with image, image.open_tar(0) as stream:
        assert stream.read() == TARS[0]
    assert len(other.requests) == 2 and all("authorization" not in h for _, _, h in other.requests)


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("/v2/a/b/manifests/1", "more than 5 redirects"),
        ("file:///etc/passwd", "no place to go"),
        ("http://u:p@127.0.0.1/", "no place to go"),
        ("http://[/", "no place to go"),
        ("", "no place to go"),
        ("/" + "x" * 9000, "no place to go"),
    ],
)
def test_redirects(fake: Fake, serve: Serve, location: str, says: str) -> None:
    manifests(fake, lambda request: answer(request, 302, Location=location))
    server = serve(fake)
    with pytest.raises(ProtocolError, match=rf"a/b:1: .*{says}"):
        opened(server)
    assert len(server.requests) <= 6


# Below HTTP


@pytest.fixture
def raw() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """A server that speaks what it likes: gives its address."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(act: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def one(s: socket.socket) -> None:
            with s:
                try:
                    act(s)
                except OSError:
                    pass

        def loop() -> None:
            while True:
                try:
                    s = listener.accept()[0]
                except OSError:
                    return
                threads.append(threading.Thread(target=one, args=(s,), daemon=True))
                threads[-1].start()

        threads.append(threading.Thread(target=loop, daemon=True))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(5)


IMPATIENT = msgspec.structs.replace(QUICK, read=0.3, head=0.6, document=0.6, attempts=2)
Raw = Callable[[Callable[[socket.socket], None]], str]


def ask(s: socket.socket) -> None:
    s.recv(65536)


def silent(s: socket.socket) -> None:
    ask(s)
    s.recv(1)


def trickle(head: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def act(s: socket.socket) -> None:
        ask(s)
        s.sendall(head)
        for _ in range(600):
            s.sendall(piece)
            time.sleep(0.05)

    return act


def flood(head: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def act(s: socket.socket) -> None:
        ask(s)
        s.sendall(head)
        for _ in range(10_000):
            s.sendall(piece)

    return act


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (silent, Unavailable, "does not answer"),
        (lambda s: None, Unavailable, "broke"),
        (trickle(OK, b"x"), Unavailable, "does not answer"),
        (trickle(OK + b"\r\n", b"x"), Unavailable, "not there within"),
        (flood(OK, b"X: y\r\n"), ProtocolError, "no HTTP"),
        (flood(OK + b"X: ", b"y" * 1000), ProtocolError, "no HTTP"),
        (flood(b"", b"garbage"), ProtocolError, "no HTTP"),
        (flood(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n"), Unavailable, "broke"),
    ],
    ids=["silent", "closes", "slow head", "slow body", "endless headers", "long header", "garbage", "chunks"],
)
def test_below_http(
    raw: Raw, act: Callable[[socket.socket], None], error: type[Exception], says: str
) -> None:
    host = raw(act)
    began = time.monotonic()
    with pytest.raises(error, match=rf"{re.escape(host)}/a/b:1: .*{says}"):
        open_image(f"{host}/a/b:1", patience=IMPATIENT, plain_http=True)
    assert time.monotonic() - began < 20  # it would go on for 30


def test_nobody_listens() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        with pytest.raises(Unavailable, match=r"a/b:1: no connection to"):
            open_image(f"127.0.0.1:{port}/a/b:1", patience=IMPATIENT)


def test_a_blob_that_trickles(fake: Fake, serve: Serve) -> None:
    def act(request: BaseHTTPRequestHandler, data: bytes) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        for at in range(100):
            request.wfile.write(data[at : at + 1])
            time.sleep(0.05)

    blobs(fake, act)
    server = serve(fake)
    image = open_image(f"{server.host}/a/b:1", patience=IMPATIENT, plain_http=True)
    with image, pytest.raises(Unavailable, match=r"layer 0 .*broke off"), image.open_layer(0) as stream:
        stream.read()
