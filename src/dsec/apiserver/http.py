"""A request as a handler sees it, and the answers it gives. Bare ASGI: this is the hot path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from dsec.core.errors import DSecError, InvalidArgument, PathInvalid, PayloadTooLarge
from dsec.iam.tokens import Principal
from dsec.wire.api import ErrorAnswer, ErrorBody, Operation

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON_LIMIT: Final = 12 << 20
"""Bytes of a JSON body: a command with its stdin."""
BODY_PAUSE_S: Final = 60.0
"""Longest pause between two parts of a body."""
MAX_PATH: Final = 4095
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The connection is closed: nobody is there to be answered."""


class OperationFailed(Exception):
    """An operation's own error, with what is known of the operation."""

    def __init__(self, error: DSecError, operation: Operation) -> None:
        super().__init__(error.message)
        self.error = error
        self.operation = operation


class Request:
    __slots__ = ("_query", "noted", "params", "principal", "receive", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.params: tuple[str, ...] = ()
        """What stands for `{…}` in the route's path, in order."""
        self.principal: Principal
        self.noted: dict[str, Any] | None = None
        """What a handler gives the audit record besides (`sandbox`, `project`, or a detail)."""
        self._query: dict[str, list[bytes]] | None = None

    def note(self, **noted: Any) -> None:
        """For the audit record; never a secret, an environment, or what a file holds."""
        self.noted = {**(self.noted or {}), **noted}

    def header(self, name: bytes) -> str | None:
        """`name` in lower case."""
        for k, v in self.scope["headers"]:
            if k == name:
                return str(v, "latin-1")
        return None

    # --- query ---

    @property
    def query(self) -> dict[str, list[bytes]]:
        """Values are bytes: paths need not be UTF-8."""
        if self._query is None:
            self._query = {}
            for part in self.scope["query_string"].split(b"&"):
                if part:
                    name, _, value = part.replace(b"+", b" ").partition(b"=")
                    key = unquote_to_bytes(name).decode(errors="replace")
                    self._query.setdefault(key, []).append(unquote_to_bytes(value))
        return self._query

    def text(self, name: str, default: str = "") -> str:
        return _text(name, self.query[name][-1]) if name in self.query else default

    def texts(self, name: str) -> list[str]:
        return [_text(name, v) for v in self.query.get(name, ())]

    def number(self, name: str, default: int, low: int, high: int) -> int:
        if name not in self.query:
            return default
        return int(_number(name, self.query[name][-1], int, low, high))

    def octal(self, name: str) -> int:
        """A file mode, in octal as chmod takes it; -1 when absent."""
        if name not in self.query:
            return -1
        try:
            mode = int(self.query[name][-1], 8)
        except ValueError:
            mode = -1
        if not 0 <= mode <= 0o7777:
            raise InvalidArgument(f"{name}: octal digits, 0 to 7777")
        return mode

    def seconds(self, name: str, default: float | None, high: float) -> float | None:
        if name not in self.query:
            return default
        return float(_number(name, self.query[name][-1], float, 0, high))

    def flag(self, name: str, default: bool = False) -> bool:
        if name not in self.query:
            return default
        value = self.query[name][-1].lower()
        if value in (b"1", b"true", b"yes", b""):
            return True
        if value in (b"0", b"false", b"no"):
            return False
        raise InvalidArgument(f"{name}: true or false")

    def path(self, name: str = "path") -> bytes:
        """An absolute path inside the sandbox. Raises PathInvalid."""
        return check_path(self.query.get(name, [b""])[-1], name)

    # --- body ---

    def length(self) -> int | None:
        """Content-Length, when it was sent."""
        value = self.header(b"content-length")
        if value is None:
            return None
        if not value.isdigit() or len(value) > 18:
            raise InvalidArgument("Content-Length is no number")
        return int(value)

    async def chunks(self, limit: int) -> AsyncIterator[bytes]:
        """The body as it comes. Raises PayloadTooLarge past `limit`, ClientGone when it is cut off."""
        if (self.length() or 0) > limit:
            raise PayloadTooLarge(f"a body of {self.length()} bytes; at most {limit}")
        got = 0
        while True:
            try:
                async with asyncio.timeout(BODY_PAUSE_S):
                    message = await self.receive()
            except TimeoutError:
                raise InvalidArgument(f"no more of the body within {BODY_PAUSE_S:g} s") from None
            if message["type"] != "http.request":
                raise ClientGone
            if chunk := message["body"]:
                if (got := got + len(chunk)) > limit:
                    raise PayloadTooLarge(f"a body of more than {limit} bytes")
                yield chunk
            if not message["more_body"]:
                return

    async def body(self, limit: int = JSON_LIMIT) -> bytes:
        parts = [chunk async for chunk in self.chunks(limit)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def json(self, decoder: msgspec.json.Decoder[T], limit: int = JSON_LIMIT) -> T:
        """Raises InvalidArgument that says where the body is wrong."""
        return decode(decoder, await self.body(limit))


def decode(decoder: msgspec.json.Decoder[T], data: bytes | str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"body: {e}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise InvalidArgument(f"body: no JSON: {e}") from None


def check_path(path: bytes, name: str = "path") -> bytes:
    """Dots and symlinks are resolved below the sandbox's root, where they cannot lead out; NULs are refused
    here."""
    if not path.startswith(b"/"):
        raise PathInvalid(f"{name}: must be absolute")
    if b"\0" in path:
        raise PathInvalid(f"{name}: holds a NUL")
    if len(path) > MAX_PATH:
        raise PathInvalid(f"{name}: longer than {MAX_PATH} bytes")
    return path


def _text(name: str, value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{name}: no UTF-8") from None
    if "\0" in text:
        raise InvalidArgument(f"{name}: holds a NUL")
    return text


def _number(name: str, value: bytes, kind: type[int] | type[float], low: float, high: float) -> float:
    try:
        number = kind(value)
    except ValueError:
        raise InvalidArgument(f"{name}: {value[:40]!r} is no number") from None
    if not low <= number <= high:
        raise InvalidArgument(f"{name}: not in {low:g}..{high:g}")
    return number


# --- answers ---


async def answer(r: Request, body: Any, status: int = 200) -> None:
    """A struct as JSON."""
    await answer_bytes(r, _encode(body), status)


async def answer_bytes(
    r: Request,
    data: bytes,
    status: int = 200,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    content_type: bytes = b"application/json",
) -> None:
    await r.send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(data)),
                *headers,
            ],
        }
    )
    await r.send({"type": "http.response.body", "body": data})


def error_body(e: DSecError) -> ErrorBody:
    return ErrorBody(code=e.code, message=e.message, retry=e.retry, details=e.details)


async def answer_error(r: Request, e: DSecError, operation: Operation | None = None) -> None:
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if e.http_status == 401:
        headers = ((b"www-authenticate", b"Bearer"),)
    elif e.http_status in (429, 503) and e.retry == "safe":
        headers = ((b"retry-after", b"1"),)
    data = _encode(ErrorAnswer(error=error_body(e), operation=operation))
    await answer_bytes(r, data, e.http_status, headers)


class Stream:
    """A response whose end is not known when it begins. Not ended with `end`, it is cut, so that no reader
    takes a part for the whole."""

    def __init__(
        self, r: Request, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self._r = r
        self._headers = [(b"content-type", content_type), *headers]
        self.started = False

    async def start(self) -> None:
        if not self.started:
            self.started = True
            head = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._r.send(head)

    async def write(self, data: bytes) -> None:
        await self.start()
        await self._r.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self.start()
        await self._r.send({"type": "http.response.body", "body": b"", "more_body": False})
