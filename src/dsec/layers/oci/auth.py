"""How a registry is convinced: Basic, or a Bearer token from the service that its challenge names."""

from __future__ import annotations

import re
import threading
import time
import urllib.parse
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from dsec.core.errors import ProtocolError, Unauthenticated, Unavailable
from dsec.layers.oci.credentials import Credentials
from dsec.layers.oci.http import Http, is_local, origin
from dsec.layers.oci.model import decode, printable

MAX_ANSWER: Final = 1 << 20
MAX_TOKEN: Final = 64 << 10
MAX_CHALLENGE: Final = 8192
_LIFE: Final = 60.0
"""Seconds that a token lives when its service does not say."""
_CLIENT: Final = "dsec"
_SCHEME: Final = re.compile(r"\s*([A-Za-z]+)(?:\s+|$)")
_PAIR: Final = re.compile(r"""\s*,?\s*([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))""")
_PRINTABLE: Final = re.compile(r"[!-~]+\Z")


class _Token(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None
    expires_in: float | None = None


class Authorizer:
    """Authorization headers for one registry, by scope. Any thread may call."""

    def __init__(self, http: Http, base: str, credentials: Credentials | None) -> None:
        self._http, self._base, self._credentials = http, base, credentials
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[str, float]] = {}
        """Header and when it ends, by scope; `*` for what holds everywhere."""
        if credentials and credentials.registry_token:
            self._tokens["*"] = (f"Bearer {credentials.registry_token}", float("inf"))

    def header(self, scope: str) -> dict[str, str]:
        """What is known to be good for the scope: empty before the first challenge."""
        with self._lock:
            for key in ("*", scope):
                header, until = self._tokens.get(key, ("", 0.0))
                if time.monotonic() < until:
                    return {"Authorization": header}
        return {}

    def answer(self, challenges: Iterable[str], scope: str, what: str) -> None:
        """Earns what `header` then gives. Raises Unauthenticated when the registry's wish cannot be met."""
        offered = dict(parse_challenge(c) for c in challenges)
        if "bearer" in offered:
            header, life = self._fetch(offered["bearer"], scope, what)
            with self._lock:
                self._tokens[scope] = (header, time.monotonic() + life)
        elif "basic" in offered and self._credentials and self._credentials.password:
            with self._lock:
                self._tokens["*"] = (self._credentials.basic(), float("inf"))
        else:
            asked = ", ".join(sorted(offered)) or "nothing that is known"
            raise Unauthenticated(
                f"{what}: the registry wants credentials ({asked[:100]}): docker login, or auth="
            )

    def forget(self, scope: str) -> None:
        """What the registry does not take any more."""
        with self._lock:
            self._tokens.pop(scope, None)

    def _fetch(self, challenge: dict[str, str], scope: str, what: str) -> tuple[str, float]:
        realm = self._check_realm(challenge.get("realm", ""), what)
        what = f"{what}: a token of {printable(origin(realm)[1])}"
        service = challenge.get("service", "")
        known = self._credentials
        if known and known.identity_token:
            response = self._trade(realm, service, scope, known.identity_token, what)
        else:
            query = [("service", service)] if service else []
            query += [("scope", s) for s in scope.split()]
            headers = {"Authorization": known.basic()} if known and known.password else {}
            response = self._http.send("GET", _with_query(realm, query), headers, None, what)
        return self._token(response, what)

    def _trade(self, realm: str, service: str, scope: str, token: str, what: str) -> Any:
        form = {
            "grant_type": "refresh_token",
            "service": service,
            "client_id": _CLIENT,
            "scope": scope,
            "refresh_token": token,
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return self._http.send("POST", realm, headers, urllib.parse.urlencode(form).encode(), what)

    def _token(self, response: Any, what: str) -> tuple[str, float]:
        data = self._http.read(response, MAX_ANSWER, what)
        if response.status in (400, 401, 403, 404):
            raise Unauthenticated(f"{what}: refused ({response.status}): docker login, or auth=")
        if response.status != 200:
            raise Unavailable(f"{what}: the service answers {response.status}")
        answer = decode(data, _Token, what)
        token = answer.token or answer.access_token or ""
        if len(token) > MAX_TOKEN or not _PRINTABLE.match(token):
            raise ProtocolError(f"{what}: the service gives no token that could be used")
        life = max(_LIFE, min(answer.expires_in or _LIFE, 86400.0))
        return f"Bearer {token}", life * 0.9

    def _check_realm(self, realm: str, what: str) -> str:
        """Credentials go there: over TLS, or to the very host that is spoken to without it."""
        try:
            scheme, host, _ = origin(realm)
            user = urllib.parse.urlsplit(realm).username
        except ValueError:
            scheme, host, user = "", "", None
        plain = scheme == "http" and self._base.startswith("http:")
        near = plain and (host == origin(self._base)[1] or is_local(host))
        if not host or user or not (scheme == "https" or near):
            raise ProtocolError(f"{what}: the registry sends for a token to {realm[:200]!r}: not followed")
        return realm


def _with_query(url: str, pairs: list[tuple[str, str]]) -> str:
    if not pairs:
        return url
    return f"{url}{'&' if '?' in url else '?'}{urllib.parse.urlencode(pairs)}"


def parse_challenge(text: str) -> tuple[str, dict[str, str]]:
    """The scheme, lower-case, and the parameters of one WWW-Authenticate header."""
    text = text[:MAX_CHALLENGE]
    scheme = _SCHEME.match(text)
    if not scheme:
        return "", {}
    found: dict[str, str] = {}
    at = scheme.end()
    while pair := _PAIR.match(text, at):
        value = re.sub(r"\\(.)", r"\1", pair[2]) if pair[2] is not None else pair[3]
        found.setdefault(pair[1].lower(), value)
        at = pair.end()
    return scheme[1].lower(), found
