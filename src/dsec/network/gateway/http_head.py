"""The head of an HTTP/1 request, read strictly and written anew: one request a connection, to the host named.

What could be read in two ways is refused: that is how requests are smuggled past a proxy (RFC 9112, 11).
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from dsec.network.gateway.client_hello import HelloRefused, checked_name

MAX_HEAD: Final = 32 << 10
MAX_HEADERS: Final = 100
METHODS: Final = frozenset(
    {b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"PROPFIND", b"REPORT"}
)
NAME: Final = re.compile(rb"^[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
VALUE: Final = re.compile(rb"^[\t\x20-\x7e\x80-\xff]*\Z")
TARGET: Final = re.compile(rb"^[\x21-\x7e]+\Z")
DROPPED: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"upgrade", b"http2-settings", b"te"}
)


class Head(msgspec.Struct, frozen=True):
    host: str
    """In lower case, without its port."""
    port: int
    data: bytes
    """As it goes to the server."""
    length: int
    """Bytes of the body; -1: in chunks, until their end."""


def read(data: bytes) -> tuple[Head, bytes] | None:
    """The head, and what of the body came with it; None while it is not whole. Raises HelloRefused."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > MAX_HEAD:
            raise HelloRefused("too_long")
        return None
    if end > MAX_HEAD:
        raise HelloRefused("too_long")
    lines = data[:end].split(b"\r\n")
    method, target = _request_line(lines[0])
    headers = _headers(lines[1:])
    host, port = _host(headers, target)
    length = _length(headers)
    return _written(method, target, headers, host, port, length), data[end + 4 :]


def _request_line(line: bytes) -> tuple[bytes, bytes]:
    parts = line.split(b" ")
    if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not TARGET.match(parts[1]):
        raise HelloRefused("not_http")
    if parts[0] not in METHODS:
        raise HelloRefused("method")
    return parts[0], parts[1]


def _headers(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    if len(lines) > MAX_HEADERS:
        raise HelloRefused("too_long")
    found = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not NAME.match(name) or not VALUE.match(value):
            raise HelloRefused("malformed")
        found.append((name, value.strip(b" \t")))
    return found


def _values(headers: list[tuple[bytes, bytes]], wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name.lower() == wanted]


def _host(headers: list[tuple[bytes, bytes]], target: bytes) -> tuple[str, int]:
    hosts = _values(headers, b"host")
    if len(hosts) != 1:
        raise HelloRefused("no_name")
    authority = hosts[0].lower()
    if not target.startswith(b"/") and target != b"*":
        found = re.match(rb"^http://([^/?#]+)", target.lower())
        if not found or found[1] != authority:
            raise HelloRefused("host_mismatch")
    name, colon, port = authority.partition(b":")
    if colon and not (port.isdigit() and 1 <= int(port) <= 65535):
        raise HelloRefused("malformed")
    return checked_name(name), int(port) if colon else 80


def _length(headers: list[tuple[bytes, bytes]]) -> int:
    lengths, codings = _values(headers, b"content-length"), _values(headers, b"transfer-encoding")
    if codings:
        if lengths or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise HelloRefused("malformed")
        return -1
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 15:
        raise HelloRefused("malformed")
    return int(lengths[0])


def _written(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], host: str, port: int, length: int
) -> Head:
    if not target.startswith(b"/") and target != b"*":
        target = b"/" + target.split(b"/", 3)[3] if target.count(b"/") >= 3 else b"/"
    kept = [(n, v) for n, v in headers if n.lower() not in DROPPED]
    lines = [
        b"%s %s HTTP/1.1" % (method, target),
        *(b"%s: %s" % (n, v) for n, v in kept),
        b"Connection: close",
    ]
    return Head(host, port, b"\r\n".join(lines) + b"\r\n\r\n", length)


def refusal(status: str, text: str) -> bytes:
    """A whole answer."""
    body = text.encode() + b"\n"
    lines = (
        f"HTTP/1.1 {status}",
        "Content-Type: text/plain",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode() + body
