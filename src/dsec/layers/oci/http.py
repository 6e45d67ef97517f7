"""One exchange with a server that may be slow, broken or hostile: bounded in time and size, errors typed."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, Final

import msgspec
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from dsec.core.errors import InvalidArgument, PayloadTooLarge, ProtocolError, Unavailable
from dsec.layers.oci.model import printable

Body = bytes | Callable[[], IO[bytes]] | None
"""What is sent: bytes, or what opens a stream of them anew for each try."""
MAX_URL: Final = 8192
_BLOCK: Final = 1 << 18


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a server is waited for. All times in seconds."""

    connect: float = 10.0
    read: float = 30.0
    """Between two pieces of an answer."""
    commit: float = 300.0
    """For the first piece of the answer to what was sent: the registry puts it away meanwhile."""
    head: float = 60.0
    """For the whole head of an answer, however it trickles in."""
    document: float = 120.0
    """For a whole small document."""
    attempts: int = 4
    backoff: float = 0.3
    """Before the second try; doubled for each one more."""
    longest: float = 60.0
    """A server that asks for a longer pause than this is told to the caller instead."""
    slowest: int = 512
    """Bytes a second; a blob that comes slower for `head` seconds is broken off and taken up again."""


class _Watched:
    """`getresponse` ends by a deadline: a read timeout alone lets a server send a byte now and then."""

    deadline: ClassVar[float] = 60.0
    sock: Any
    timeout: float | None

    def getresponse(self) -> Any:
        late = threading.Event()

        def give_up() -> None:
            late.set()
            with contextlib.suppress(OSError, AttributeError):
                self.sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(self.deadline, self.timeout or 0), give_up)
        timer.daemon = True
        timer.start()
        response = None
        try:
            response = super().getresponse()  # type: ignore[misc]
        except (OSError, http.client.HTTPException):
            if not late.is_set():
                raise
        finally:
            timer.cancel()
        if not late.is_set():
            return response
        if response is not None:
            response.close()
        raise TimeoutError("its answer's head took too long")


class _QuietPool(urllib3.HTTPSConnectionPool):
    """Without the warning, at each request, that certificates are not looked at: that was asked for."""

    def _validate_conn(self, conn: Any) -> None:
        if conn.is_closed:
            conn.connect()


def _pool_classes(deadline: float) -> dict[str, Any]:
    plain = type("Plain", (_Watched, HTTPConnection), {"deadline": deadline})
    tls = type("Tls", (_Watched, HTTPSConnection), {"deadline": deadline})
    return {
        "http": type("PlainPool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": plain}),
        "https": type("TlsPool", (_QuietPool,), {"ConnectionCls": tls}),
    }


class Http:
    """Connections, kept and used again. Any thread may call."""

    def __init__(
        self, *, verify: bool = True, ca: Path | None = None, patience: Patience | None = None
    ) -> None:
        self.patience = patience or Patience()
        self._context = _tls(verify, ca)
        self._managers: dict[str, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def send(self, method: str, url: str, headers: Mapping[str, str], body: Body, what: str) -> Any:
        """One request; the answer's body is not read yet, and no redirect is followed.

        Raises Unavailable for a server that does not answer, ProtocolError for one that answers what is no
        HTTP or whose certificate is not trusted.
        """
        if not callable(body):
            return self._send(method, url, headers, body, what)
        with body() as stream:
            return self._send(method, url, headers, stream, what)

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None, what: str
    ) -> Any:
        read = self.patience.commit if method in ("PUT", "PATCH") else self.patience.read
        with translated(what, url):
            return self._manager(url).request(
                method,
                url,
                headers=dict(headers),
                body=body,
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=urllib3.Timeout(connect=self.patience.connect, read=read),
            )

    def read(self, response: Any, limit: int, what: str) -> bytes:
        """A small body, whole. Raises PayloadTooLarge, Unavailable and ProtocolError."""
        until = time.monotonic() + self.patience.document
        data = bytearray()
        try:
            with translated(what):
                while piece := response.read1(limit + 1 - len(data), decode_content=False):
                    data += piece
                    if len(data) > limit:
                        raise PayloadTooLarge(f"{what}: the server sends more than {limit} bytes")
                    if time.monotonic() > until:
                        raise Unavailable(f"{what}: not there within {self.patience.document:g} s")
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return bytes(data)

    def _manager(self, url: str) -> urllib3.PoolManager:
        proxy = _proxy(url)
        with self._lock:
            manager = self._managers.get(proxy)
            if manager is None:
                manager = self._managers[proxy] = self._new_manager(proxy)
            return manager

    def _new_manager(self, proxy: str) -> urllib3.PoolManager:
        given: dict[str, Any] = {
            "num_pools": 8,
            "maxsize": 8,
            "blocksize": _BLOCK,
            "ssl_context": self._context,
        }
        manager = urllib3.ProxyManager(proxy, **given) if proxy else urllib3.PoolManager(**given)
        manager.pool_classes_by_scheme = _pool_classes(self.patience.head)
        return manager

    def close(self) -> None:
        with self._lock:
            for manager in self._managers.values():
                manager.clear()


def _tls(verify: bool, ca: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except (OSError, ValueError) as e:
            raise InvalidArgument(f"certificate authority {ca}: {e}") from e
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _proxy(url: str) -> str:
    """The proxy that the environment names, or empty."""
    parts = urllib.parse.urlsplit(url)
    if is_local(parts.netloc) or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return urllib.request.getproxies().get(parts.scheme, "")


def is_local(host: str) -> bool:
    """Whether the host (with or without a port) is this machine by its very name."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what credentials are bound to."""
    parts = urllib.parse.urlsplit(url)
    return (
        parts.scheme,
        (parts.hostname or "").lower(),
        parts.port or (443 if parts.scheme == "https" else 80),
    )


def follow(url: str, location: str, what: str) -> str:
    """Where a Location leads. Raises ProtocolError for one that is no URL, or leaves TLS behind."""
    try:
        target = urllib.parse.urljoin(url, location)
        parts = urllib.parse.urlsplit(target)
        good = (
            parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) and not parts.username
        )
    except ValueError:
        good = ""
    if not location or not good or len(target) > MAX_URL:
        raise ProtocolError(f"{what}: the server leads to {location[:200]!r}, which is no place to go")
    if parts.scheme == "http" and url.startswith("https:"):
        raise ProtocolError(f"{what}: the server leads from https to {target[:200]!r}: not followed")
    return target


@contextlib.contextmanager
def translated(what: str, url: str = "") -> Iterator[None]:
    """Errors of the library as typed ones that name what was being done."""
    host = printable(urllib.parse.urlsplit(url).netloc.rpartition("@")[2]) or "the server"
    try:
        yield
    except urllib3.exceptions.SSLError as e:
        if e.args and isinstance(e.args[0], ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise Unavailable(f"{what}: the connection to {host} broke: {_said(e)}") from e
        raise ProtocolError(f"{what}: TLS with {host}: {_said(e)}: name its certificate authority") from e
    except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ProxyError) as e:
        raise Unavailable(f"{what}: no connection to {host}: {_said(e)}") from e
    except (urllib3.exceptions.TimeoutError, TimeoutError) as e:
        raise Unavailable(f"{what}: {host} does not answer: {_said(e)}") from e
    except urllib3.exceptions.ProtocolError as e:
        cause = e.args[1] if len(e.args) > 1 else e
        if isinstance(cause, http.client.HTTPException) and not isinstance(cause, _BROKEN_OFF):
            raise ProtocolError(f"{what}: {host} answers what is no HTTP: {_said(cause)}") from e
        raise Unavailable(f"{what}: the connection to {host} broke: {_said(cause)}") from e
    except (urllib3.exceptions.HTTPError, http.client.HTTPException, UnicodeError, ValueError) as e:
        raise ProtocolError(f"{what}: {host}: {_said(e)}") from e
    except OSError as e:
        if e.errno is not None and not isinstance(e, ConnectionError):
            raise
        raise Unavailable(f"{what}: the connection to {host} broke: {_said(e)}") from e


_BROKEN_OFF: Final = (http.client.RemoteDisconnected, http.client.IncompleteRead)


def _said(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}", 300)
