"""Bearer tokens, against a token service of the tests' own."""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layers.oci.conftest import QUICK, TARS, Handle, Server, answer
from tests.layers.oci.fake import Fake

from dsec.core.errors import NotFound, ProtocolError, Unauthenticated, Unavailable
from dsec.layers.oci import Credentials, ImageSource, NewImage, Reference, Registry, open_image, push
from dsec.layers.oci.auth import parse_challenge

Serve = Callable[[Handle], Server]
BASIC = "Basic " + base64.b64encode(b"u:p").decode()


class Tokens:
    """A token service, and the fake registry's side of it."""

    def __init__(self, fake: Fake, serve: Serve) -> None:
        self.given: list[str] = []
        self.answer: Callable[[str], Any] = lambda token: {"token": token, "expires_in": 300}
        self.status = 200
        self.wants = BASIC
        self.service = serve(self._give)
        self.realm = f"http://{self.service.host}/token"
        fake.hook = self._check
        self.registry = serve(fake)
        self.forms: list[dict[str, list[str]]] = []

    def _give(self, request: BaseHTTPRequestHandler) -> None:
        if request.command == "POST":
            body = request.rfile.read(int(request.headers["Content-Length"])).decode()
            self.forms.append(urllib.parse.parse_qs(body))
        elif request.headers.get("Authorization", "") != self.wants:
            answer(request, 401)
            return
        self.given.append(f"token{len(self.given)}")
        answer(request, self.status, json.dumps(self.answer(self.given[-1])).encode())

    def _check(self, request: BaseHTTPRequestHandler) -> bool:
        if self.given and request.headers.get("Authorization") == f"Bearer {self.given[-1]}":
            return False
        challenge = f'Bearer realm="{self.realm}",service="the, service",scope="repository:a/b:pull,push"'
        answer(request, 401, WWW_Authenticate=challenge)
        return True

    def open(self, auth: Credentials | None) -> ImageSource:
        return open_image(f"{self.registry.host}/a/b:1", auth=auth, patience=QUICK, plain_http=True)


USER = Credentials(username="u", password="p")


@pytest.fixture
def tokens(image: NewImage, tmp_path: Path, serve: Serve) -> Tokens:
    return Tokens(Fake(image, tmp_path / "fake"), serve)


def contents(image: ImageSource, number: int) -> bytes:
    with image.open_tar(number) as stream:
        return stream.read()


def test_a_token(tokens: Tokens) -> None:
    with tokens.open(USER) as image:
        assert [contents(image, n) for n in (0, 1)] == list(TARS)
    assert tokens.given == ["token0"]  # one serves them all
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(tokens.service.requests[0][1]).query)
    assert query == {"service": ["the, service"], "scope": ["repository:a/b:pull"]}
    assert all("Basic" not in h.get("authorization", "") for _, _, h in tokens.registry.requests)


def test_without_credentials(tokens: Tokens) -> None:
    tokens.wants = ""
    tokens.answer = lambda token: {"access_token": token}
    with tokens.open(None) as image:
        assert contents(image, 1) == TARS[1]


def test_an_identity_token(tokens: Tokens) -> None:
    with tokens.open(Credentials(identity_token="refresh")) as image:
        assert contents(image, 1) == TARS[1]
    assert tokens.forms[0]["refresh_token"] == ["refresh"]
    assert tokens.forms[0]["grant_type"] == ["refresh_token"]
    assert tokens.forms[0]["scope"] == ["repository:a/b:pull"]


def test_a_token_that_ends(tokens: Tokens) -> None:
    with tokens.open(USER) as image:
        tokens.given.append("another")
        assert contents(image, 0) == TARS[0]
    assert tokens.given == ["token0", "another", "token2"]


def test_refused(tokens: Tokens) -> None:
    with pytest.raises(Unauthenticated, match=r"a/b:1: a token of 127\.0\.0\.1: refused \(401\)"):
        tokens.open(Credentials(username="u", password="wrong"))


def test_a_token_that_does_not_help(tokens: Tokens) -> None:
    tokens.answer = lambda token: {"token": "other"}
    with pytest.raises(Unauthenticated, match=r"a/b:1: .* answers 401"):
        tokens.open(USER)
    assert len(tokens.given) == 1


@pytest.mark.parametrize("bad", ["", "a\r\nX: y", "a b", "é", "x" * (65 << 10), None])
def test_what_is_no_token(tokens: Tokens, bad: Any) -> None:
    tokens.answer = lambda token: {"token": bad}
    with pytest.raises(ProtocolError, match="gives no token"):
        tokens.open(USER)


def test_a_service_that_fails(tokens: Tokens) -> None:
    tokens.status = 503
    with pytest.raises(Unavailable, match="answers 503"):
        tokens.open(USER)
    assert len(tokens.given) == QUICK.attempts


@pytest.mark.parametrize(
    "realm",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "gopher://x/",
        "http://example.com/token",
        "http://u:p@127.0.0.1/token",
        "//127.0.0.1/token",
        "http://[::/",
        "",
    ],
)
def test_a_realm_elsewhere(tokens: Tokens, realm: str) -> None:
    tokens.realm = realm
    with pytest.raises(ProtocolError, match=r"a/b:1: the registry sends for a token to"):
        tokens.open(USER)
    assert not tokens.service.requests


@pytest.mark.parametrize("challenge", ["", "Negotiate", "Bearer", "Basic realm=x", "\x01"])
def test_other_challenges(image: NewImage, tmp_path: Path, serve: Serve, challenge: str) -> None:
    fake = Fake(image, tmp_path / "fake")

    def hook(request: BaseHTTPRequestHandler) -> bool:
        answer(request, 401, WWW_Authenticate=challenge)
        return True

    fake.hook = hook
    server = serve(fake)
    with pytest.raises((Unauthenticated, ProtocolError), match="a/b:1"):
        open_image(f"{server.host}/a/b:1", patience=QUICK, plain_http=True)


def test_push_asks_for_more(tokens: Tokens, image: NewImage) -> None:
    to = Registry(tokens.registry.host, credentials=USER, patience=QUICK, plain_http=True)
    with to, pytest.raises(NotFound, match=r"pushing .*/c/d@"):
        push(to, Reference.parse(f"{tokens.registry.host}/c/d:2"), image)
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(tokens.service.requests[0][1]).query)
    assert query["scope"] == ["repository:c/d:pull,push"]


def test_challenges() -> None:
    assert parse_challenge('Bearer realm="https://a/?x=1,2",service = s ,scope="a \\"b\\""') == (
        "bearer",
        {"realm": "https://a/?x=1,2", "service": "s", "scope": 'a "b"'},
    )
    assert parse_challenge("Basic") == ("basic", {})
    assert parse_challenge('Bearer realm="unfinished') == ("bearer", {})
    assert parse_challenge("Bearer " + "a=b," * 100_000)[0] == "bearer"


@given(st.text(alphabet='Bearer ="\\,\x00', max_size=200))
def test_any_challenge(text: str) -> None:
    scheme, found = parse_challenge(text)
    assert scheme == scheme.lower() and all(isinstance(v, str) for v in found.values())
