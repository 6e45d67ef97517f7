"""Heads of requests: what could be read in two ways is refused, and what goes on is written anew."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.network.gateway import http_head
from dsec.network.gateway.client_hello import HelloRefused

GOOD = (
    b"POST /a?b=1 HTTP/1.1\r\nHost: Www.Example.org\r\nContent-Length: 3\r\nConnection: keep-alive\r\n\r\nabc"
)


def test_a_plain_request() -> None:
    found = http_head.read(GOOD)
    assert found is not None
    head, rest = found
    assert (head.host, head.port, head.length, rest) == ("www.example.org", 80, 3, b"abc")
    assert b"keep-alive" not in head.data and b"Connection: close\r\n\r\n" in head.data


def test_byte_by_byte() -> None:
    end = GOOD.index(b"abc")
    assert all(http_head.read(GOOD[:n]) is None for n in range(end))


def test_absolute_form_becomes_origin_form() -> None:
    found = http_head.read(b"GET http://a.org/x HTTP/1.1\r\nHost: a.org\r\n\r\n")
    assert found is not None and found[0].data.startswith(b"GET /x HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "no_name"),
        (b"GET / HTTP/1.1\r\nHost: a.org\r\nHost: b.org\r\n\r\n", "no_name"),
        (b"GET / HTTP/1.1\r\nHost: a.org\r\nhost: a.org\r\n\r\n", "no_name"),
        (b"GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n", "no_name"),
        (b"GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: a.org@b.org\r\n\r\n", "no_name"),
        (b"GET / HTTP/1.1\r\nHost: a.org, b.org\r\n\r\n", "no_name"),
        (b"GET http://b.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n", "host_mismatch"),
        (b"GET http://a.org@b.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n", "host_mismatch"),
        (b"GET a.org HTTP/1.1\r\nHost: a.org\r\n\r\n", "host_mismatch"),
        (b"CONNECT a.org:443 HTTP/1.1\r\nHost: a.org\r\n\r\n", "method"),
        (b"PRI * HTTP/2.0\r\n\r\n", "not_http"),
        (b"GET / HTTP/1.1\r\nHost : a.org\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: a.org\r\n X: folded\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: a.org\nX: y\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: a.org\0\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: a.org\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: a.org\r\nContent-Length: +1\r\n\r\n", "malformed"),
        (
            b"GET / HTTP/1.1\r\nHost: a.org\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            "malformed",
        ),
        (b"GET / HTTP/1.1\r\nHost: a.org\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: a.org\r\n" + b"X: y\r\n" * 200 + b"\r\n", "too_long"),
        (b"G" * 40_000, "too_long"),
    ],
)
def test_refused(data: bytes, reason: str) -> None:
    with pytest.raises(HelloRefused, match=f"^{reason}$"):
        http_head.read(data)


def _agrees(data: bytes) -> None:
    """Another reader of HTTP sees one request in what goes on, to the host that was found."""
    try:
        found = http_head.read(data)
    except HelloRefused:
        return
    if found is None:
        return
    head, _ = found
    other = h11.Connection(h11.SERVER)
    other.receive_data(head.data)
    request = other.next_event()
    assert isinstance(request, h11.Request)
    hosts = [value for name, value in request.headers if name == b"host"]
    assert [h.partition(b":")[0].rstrip(b".").decode().lower() for h in hosts] == [head.host]
    assert (b"connection", b"close") in list(request.headers)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    _agrees(data + b"\r\n\r\n")


WORDS = b"GET ,http://,a.org,b.org,/, HTTP/1.1,\r\n,\n,\r,Host:, ,:80,Content-Length:,Transfer-Encoding:"
PIECES = st.sampled_from([*WORDS.split(b","), *(bytes([c]) for c in b"5@,;\t\0#?*"), b"chunked"])


@given(st.lists(PIECES, max_size=25))
def test_pieces(parts: list[bytes]) -> None:
    _agrees(b"".join(parts) + b"\r\n\r\n")


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(max_size=3)), min_size=1, max_size=5))
def test_mutations(changes: list[tuple[int, bytes]]) -> None:
    data = GOOD
    for at, part in changes:
        data = data[:at] + part + data[at + 1 :]
    _agrees(data)
