"""A registry, by the distribution specification: manifests and blobs, read and written."""

from __future__ import annotations

import email.utils
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final, Self
from urllib.parse import quote

import msgspec

from dsec.core.errors import (
    DSecError,
    NotFound,
    PermissionDenied,
    ProtocolError,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from dsec.layers.oci.auth import Authorizer
from dsec.layers.oci.credentials import Credentials
from dsec.layers.oci.http import Body, Http, Patience, follow, is_local, origin
from dsec.layers.oci.model import (
    INDEXES,
    MANIFESTS,
    MAX_MANIFEST,
    Descriptor,
    check_document,
    digest_of,
    printable,
)
from dsec.layers.oci.reference import DIGEST, HUB

MAX_REDIRECTS: Final = 5
MAX_CHUNK: Final = 64 << 20
_HUB_HOST: Final = "registry-1.docker.io"
_ACCEPT: Final = ", ".join(sorted(MANIFESTS | INDEXES))
_AGENT: Final = {"User-Agent": "dsec"}
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
_MOVED: Final = frozenset({301, 302, 303, 307, 308})
_MAX_ERROR: Final = 64 << 10
_RANGE: Final = re.compile(r"(?:bytes=)?0-(\d{1,15})\Z")


class _Error(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Errors(msgspec.Struct):
    errors: list[_Error] = []


class Registry:
    """One registry. Any thread may call; several may download side by side.

    plain_http: None means https, except for this machine by name, which is asked which it speaks.
    ca: certificates to trust beside the system's. verify: False trusts any.
    """

    def __init__(
        self,
        host: str,
        *,
        credentials: Credentials | None = None,
        verify: bool = True,
        ca: Path | None = None,
        plain_http: bool | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.host = host
        self.patience = patience or Patience()
        self._http = Http(verify=verify, ca=ca, patience=self.patience)
        address = _HUB_HOST if host == HUB else host
        if plain_http is None:
            plain_http = ca is None and is_local(host) and self._speaks_plain(address)
        self.base = f"{'http' if plain_http else 'https'}://{address}"
        self._auth = Authorizer(self._http, self.base, credentials)

    def _speaks_plain(self, address: str) -> bool:
        try:
            self._http.send("GET", f"https://{address}/v2/", _AGENT, None, f"registry {self.host}").close()
        except ProtocolError as e:
            return "CERTIFICATE" not in e.message
        except Unavailable:
            return True
        return False

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Manifests

    def manifest(self, repository: str, wanted: str, what: str) -> tuple[bytes, str, str]:
        """A manifest or index by tag or digest: its bytes, media type and digest.

        Raises NotFound, Unauthenticated, PermissionDenied, LayerCorrupt for another content than its digest
        says, PayloadTooLarge, TooManyRequests, Unavailable and ProtocolError.
        """
        url = self._url(repository, "manifests", wanted)
        response = self._ask("GET", url, pull(repository), what, {"Accept": _ACCEPT})
        self._expect(response, (200,), what)
        data = self._http.read(response, MAX_MANIFEST, what)
        promised = wanted if DIGEST.match(wanted) else response.headers.get("Docker-Content-Digest", "")
        if DIGEST.match(promised):
            check_document(data, promised, what)
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
        return data, kind if kind in MANIFESTS | INDEXES else "", digest_of(data)

    def put_manifest(self, repository: str, wanted: str, data: bytes, media_type: str) -> str:
        """Its digest. `wanted` is a tag, or that digest. Raises as `manifest` does."""
        what = f"pushing {self.host}/{repository}:{wanted}"
        url = self._url(repository, "manifests", wanted)
        response = self._ask("PUT", url, push(repository), what, {"Content-Type": media_type}, data)
        self._finish(response, (201,), what)
        told = response.headers.get("Docker-Content-Digest")
        if told and told != digest_of(data):
            raise ProtocolError(f"{what}: the registry keeps {told[:80]}, not {digest_of(data)}")
        return digest_of(data)

    # Blobs

    def get_blob(self, repository: str, digest: str, offset: int, what: str) -> Any:
        """The answer that holds the blob from `offset` on (206), or all of it (200)."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        response = self._ask("GET", self._url(repository, "blobs", digest), pull(repository), what, headers)
        self._expect(response, (200, 206), what)
        return response

    def has_blob(self, repository: str, digest: str) -> bool:
        what = f"looking for {self.host}/{repository}@{digest[:19]}"
        response = self._ask("HEAD", self._url(repository, "blobs", digest), push(repository), what)
        if response.status == 404:
            response.close()
            return False
        self._finish(response, (200,), what)
        return True

    def push_blob(
        self,
        repository: str,
        descriptor: Descriptor,
        opened: Callable[[], IO[bytes]],
        *,
        mount_from: str = "",
        chunk: int = 0,
    ) -> bool:
        """False when the registry has it already, or can take it from the repository `mount_from`.

        chunk: bytes of each piece; 0 for one piece. A broken upload is begun anew, `attempts` times in all.
        """
        if self.has_blob(repository, descriptor.digest):
            return False
        for attempt in range(self.patience.attempts):
            try:
                return self._upload(repository, descriptor, opened, mount_from, min(chunk, MAX_CHUNK))
            except Unavailable:
                if attempt + 1 == self.patience.attempts:
                    raise
                self.pause(attempt)
        raise AssertionError("no attempts")

    def _upload(
        self, repository: str, blob: Descriptor, opened: Callable[[], IO[bytes]], mount_from: str, chunk: int
    ) -> bool:
        what = f"pushing {self.host}/{repository}@{blob.digest[:19]}"
        scope = push(repository) + (f" {pull(mount_from)}" if mount_from else "")
        url = f"{self.base}/v2/{repository}/blobs/uploads/"
        if mount_from:
            url += f"?mount={quote(blob.digest, safe='')}&from={quote(mount_from, safe='')}"
        response = self._ask("POST", url, scope, what)
        self._finish(response, (201, 202), what)
        if response.status == 201:
            return False
        place = follow(url, response.headers.get("Location", ""), what)
        if chunk:
            place = self._send_chunks(place, scope, opened, chunk, what)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": "0" if chunk else str(blob.size),
        }
        end = f"{place}{'&' if '?' in place else '?'}digest={quote(blob.digest, safe='')}"
        response = self._ask("PUT", end, scope, what, headers, None if chunk else opened)
        self._finish(response, (201,), what)
        return True

    def _send_chunks(
        self, place: str, scope: str, opened: Callable[[], IO[bytes]], chunk: int, what: str
    ) -> str:
        done = 0
        with opened() as stream:
            while piece := stream.read(chunk):
                headers = {
                    "Content-Type": "application/octet-stream",
                    "Content-Range": f"{done}-{done + len(piece) - 1}",
                }
                response = self._ask("PATCH", place, scope, what, headers, piece)
                self._finish(response, (202,), what)
                done += len(piece)
                kept = _RANGE.match(response.headers.get("Range", f"0-{done - 1}"))
                if not kept or int(kept[1]) != done - 1:
                    raise ProtocolError(f"{what}: the registry did not keep all of {done} bytes")
                place = follow(place, response.headers.get("Location", ""), what)
        return place

    # Exchanges

    def _url(self, repository: str, kind: str, wanted: str) -> str:
        return f"{self.base}/v2/{repository}/{kind}/{quote(wanted, safe=':')}"

    def _ask(
        self,
        method: str,
        url: str,
        scope: str,
        what: str,
        headers: Mapping[str, str] | None = None,
        body: Body = None,
    ) -> Any:
        """With authorization and redirects; again, after a pause, when the server fails or is busy.

        What an upload has half done is not done again here.
        """
        attempts = 1 if method in ("PATCH", "POST") or callable(body) else self.patience.attempts
        for attempt in range(attempts):
            last = attempt + 1 == attempts
            try:
                response = self._authorized(method, url, scope, what, headers or {}, body)
            except Unavailable:
                if last:
                    raise
                self.pause(attempt)
                continue
            if response.status not in _AGAIN or last:
                return response
            response.close()
            self.pause(attempt, response.headers.get("Retry-After"), what)
        raise AssertionError("no attempts")

    def pause(self, attempt: int, asked: str | None = None, what: str = "") -> None:
        """Between tries. Raises TooManyRequests when the server asks for more than is waited."""
        usual = min(self.patience.backoff * 2**attempt, self.patience.longest) * random.uniform(0.75, 1.25)
        seconds = _seconds(asked)
        if seconds > self.patience.longest:
            raise TooManyRequests(f"{what}: the registry asks to come back in {seconds:.0f} s")
        time.sleep(max(usual, seconds))

    def _authorized(
        self, method: str, url: str, scope: str, what: str, headers: Mapping[str, str], body: Body
    ) -> Any:
        for again in (False, True):
            response, place = self._redirected(method, url, scope, what, headers, body)
            if response.status != 401 or again or origin(place) != origin(self.base):
                return response
            challenges = response.headers.getlist("WWW-Authenticate")
            response.close()
            self._auth.forget(scope)
            self._auth.answer(challenges, scope, what)
        raise AssertionError("unreachable")

    def _redirected(
        self, method: str, url: str, scope: str, what: str, headers: Mapping[str, str], body: Body
    ) -> tuple[Any, str]:
        """The answer, and where it came from.

        Only what reads is led elsewhere; credentials stay with the registry's own origin.
        """
        for _ in range(MAX_REDIRECTS + 1):
            own = self._auth.header(scope) if origin(url) == origin(self.base) else {}
            response = self._http.send(method, url, {**_AGENT, **headers, **own}, body, what)
            if response.status not in _MOVED or method not in ("GET", "HEAD"):
                return response, url
            location = response.headers.get("Location", "")
            response.close()
            url = follow(url, location, what)
        raise ProtocolError(f"{what}: more than {MAX_REDIRECTS} redirects, the last to {url[:200]!r}")

    def _expect(self, response: Any, good: tuple[int, ...], what: str) -> None:
        if response.status not in good:
            raise self._error(response, what)

    def _finish(self, response: Any, good: tuple[int, ...], what: str) -> None:
        """An answer whose body says nothing, so that its connection serves again."""
        self._expect(response, good, what)
        self._http.read(response, _MAX_ERROR, what)

    def _error(self, response: Any, what: str) -> DSecError:
        status = response.status
        said = self._said(response, what)
        for statuses, kind, hint in _KINDS:
            if status in statuses:
                return kind(f"{what}: {self.host} answers {status}{said}{hint}")
        if status >= 500:
            return Unavailable(f"{what}: {self.host} answers {status}{said}")
        return ProtocolError(f"{what}: {self.host} answers {status}{said}")

    def _said(self, response: Any, what: str) -> str:
        try:
            data = self._http.read(response, _MAX_ERROR, what)
            first = msgspec.json.decode(data, type=_Errors).errors[0]
        except (DSecError, msgspec.MsgspecError, ValueError, RecursionError, IndexError):
            return ""
        return f" ({printable(f'{first.code}: {first.message}', 200)})"


_KINDS: Final[tuple[tuple[tuple[int, ...], type[DSecError], str], ...]] = (
    ((401,), Unauthenticated, ": docker login, or auth="),
    ((403,), PermissionDenied, ": these credentials may not"),
    ((404,), NotFound, ""),
    ((429,), TooManyRequests, ": wait, or log in"),
)


def pull(repository: str) -> str:
    """The scope that reading needs."""
    return f"repository:{repository}:pull"


def push(repository: str) -> str:
    """The scope that writing needs."""
    return f"repository:{repository}:pull,push"


def _seconds(asked: str | None) -> float:
    """Of a Retry-After, in either of its forms; 0 for one that is neither."""
    if not asked:
        return 0.0
    if asked.strip().isdecimal():
        return float(asked.strip()[:12])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(asked[:100]).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
