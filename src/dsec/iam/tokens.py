"""Bearer tokens: 256 random bits, of which only the hash is stored.

A token needs no slow hash: it has no dictionary to guess from. Verification is one lookup in memory.
"""

from __future__ import annotations

import hmac
import secrets
import time
from hashlib import sha256
from pathlib import Path
from typing import Final

import apsw
import msgspec

from dsec.core.errors import NotFound, PermissionDenied, Unauthenticated

PREFIX: Final = "dsec_"
MAX_TOKEN: Final = 200
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,
    name TEXT NOT NULL,
    project TEXT,
    created_at REAL NOT NULL
) STRICT
"""


class Principal(msgspec.Struct, frozen=True):
    """Who asks."""

    id: str
    name: str
    project: str | None = None
    """The one project that it may touch; None: all."""

    def check(self, project: str) -> None:
        """Raises PermissionDenied for a project that is not the principal's."""
        if self.project is not None and project != self.project:
            raise PermissionDenied(f"token {self.name!r} is for project {self.project!r}, not {project!r}")


class TokenInfo(msgspec.Struct, frozen=True):
    id: str
    name: str
    project: str | None
    created_at: float


class TokenStore:
    """One per server. Every write is durable when its call returns."""

    def __init__(self, path: Path | str) -> None:
        self._db = apsw.Connection(str(path))
        self._db.set_busy_timeout(5000)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(_SCHEMA)
        self._known: dict[bytes, Principal] = {}
        """By hash. Whole: tokens are few."""
        for id_, hash_, name, project in self._db.execute("SELECT id, hash, name, project FROM tokens"):
            self._known[hash_] = Principal(id_, name, project)

    def create(self, name: str, project: str | None = None) -> str:
        """A new token. This is the only time that it can be seen."""
        token = PREFIX + secrets.token_urlsafe(32)
        principal = Principal(f"tok-{secrets.token_hex(6)}", name, project)
        self._db.execute(
            "INSERT INTO tokens (id, hash, name, project, created_at) VALUES (?, ?, ?, ?, ?)",
            (principal.id, _hash(token), name, project, time.time()),
        )
        self._known[_hash(token)] = principal
        return token

    def first_token(self) -> str | None:
        """Made when there is none yet."""
        return None if self._known else self.create("first")

    def verify(self, token: str) -> Principal:
        """Raises Unauthenticated."""
        digest = _hash(token)
        for_digest = self._known.get(digest)
        # The time of a lookup by a hash of 256 random bits tells nothing; compared whole all the same.
        if for_digest is None or not hmac.compare_digest(digest, _hash(token)) or len(token) > MAX_TOKEN:
            raise Unauthenticated("the bearer token is not known: set DSEC_TOKEN to the server's token")
        return for_digest

    def list(self) -> list[TokenInfo]:
        rows = self._db.execute("SELECT id, name, project, created_at FROM tokens ORDER BY created_at")
        return [TokenInfo(*row) for row in rows]

    def revoke(self, token_id: str) -> None:
        """Raises NotFound."""
        found = next((h for h, p in self._known.items() if p.id == token_id), None)
        if found is None:
            raise NotFound(f"no token {token_id[:80]!r}")
        self._db.execute("DELETE FROM tokens WHERE id = ?", (token_id,))
        del self._known[found]

    def close(self) -> None:
        self._db.close()


def _hash(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
