"""The first message of a TLS client, read strictly: which server does it name? (RFC 8446, 6066, 9849)"""

from __future__ import annotations

import re
from typing import Final

MAX_HELLO: Final = 16 << 10
HANDSHAKE: Final = 22
CLIENT_HELLO: Final = 1
SERVER_NAME: Final = 0
ENCRYPTED_CLIENT_HELLO: Final = 0xFE0D
ENCRYPTED_SERVER_NAME: Final = 0xFFCE
"""Its forerunner, which was never standardised."""
HOST_NAME: Final = re.compile(
    rb"^(?=.{1,253}\Z)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z"
)


class HelloRefused(Exception):
    """`reason` is for the event."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Reader:
    """Bytes with a length in front of each part; running past the end refuses."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, n: int) -> bytes:
        part = self._data[self._at : self._at + n]
        if len(part) != n:
            raise HelloRefused("malformed")
        self._at += n
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> Reader:
        return Reader(self.take(self.number(size)))

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def server_name(data: bytes) -> str | None:
    """The name, in lower case; None while more of the hello is to come. Raises HelloRefused."""
    message = _handshake(data)
    if message is None:
        return None
    hello = Reader(message)
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session
    hello.vector(2)  # ciphers
    hello.vector(1)  # compression
    if not hello.left:
        raise HelloRefused("no_name")
    extensions = hello.vector(2)
    if hello.left:
        raise HelloRefused("malformed")
    return _name(extensions)


def _handshake(data: bytes) -> bytes | None:
    """The body of the ClientHello, put together of its records; None while it is not whole."""
    body, at = b"", 0
    while True:
        if len(data) - at < 5:
            _no_more_than(len(data))
            if data[at : at + 1] not in (b"", bytes([HANDSHAKE])):
                raise HelloRefused("not_tls")
            return None
        kind, major, size = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind != HANDSHAKE or major != 3 or not 1 <= size <= MAX_HELLO:
            raise HelloRefused("not_tls")
        part = data[at + 5 : at + 5 + size]
        body += part
        if body[:1] not in (b"", bytes([CLIENT_HELLO])):
            raise HelloRefused("not_tls")
        if len(body) >= 4:
            wanted = int.from_bytes(body[1:4], "big")
            _no_more_than(wanted)
            if len(body) >= 4 + wanted:
                return body[4 : 4 + wanted]
        if len(part) < size:
            _no_more_than(len(data))
            return None
        at += 5 + size


def _no_more_than(size: int) -> None:
    if size > MAX_HELLO:
        raise HelloRefused("too_long")


def _name(extensions: Reader) -> str:
    name: str | None = None
    seen = set()
    while extensions.left:
        kind = extensions.number(2)
        body = extensions.vector(2)
        if kind in seen:
            raise HelloRefused("malformed")
        seen.add(kind)
        if kind in (ENCRYPTED_CLIENT_HELLO, ENCRYPTED_SERVER_NAME):
            raise HelloRefused("encrypted_hello")
        if kind == SERVER_NAME:
            name = _host_name(body)
    if name is None:
        raise HelloRefused("no_name")
    return name


def _host_name(body: Reader) -> str:
    names = body.vector(2)
    if body.left or names.number(1) != 0:
        raise HelloRefused("malformed")
    host = names.take(names.number(2)).lower()
    if names.left:
        raise HelloRefused("malformed")
    return checked_name(host)


def checked_name(host: bytes) -> str:
    """A name of DNS, no address. Raises HelloRefused."""
    host = host.removesuffix(b".")
    if not HOST_NAME.match(host) or host.rpartition(b".")[2].isdigit():
        raise HelloRefused("no_name")
    return host.decode()
