"""The catalogue: names to layers, in one SQLite database that processes share."""

from __future__ import annotations

import builtins
import difflib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import apsw
import msgspec

from dsec.core.errors import DiskFull, DSecError, Internal, Unavailable
from dsec.layers.model import Layer

BUSY_MS: Final = 30_000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS layers
    (digest TEXT PRIMARY KEY, size INTEGER NOT NULL, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names
    (name TEXT PRIMARY KEY, digest TEXT NOT NULL REFERENCES layers(digest), record BLOB NOT NULL)
    WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS names_by_digest ON names(digest);
"""
_PUT_LAYER: Final = """
INSERT INTO layers VALUES (?1, ?2, ?3) ON CONFLICT (digest) DO UPDATE SET size = ?2, record = ?3
"""
_PUT_NAME: Final = """
INSERT INTO names VALUES (?1, ?2, ?3) ON CONFLICT (name) DO UPDATE SET digest = ?2, record = ?3
"""
# So many that a small catalogue is looked through whole, so few that a large one costs no more.
_NEIGHBOURS: Final = """
SELECT record FROM (SELECT name, record FROM names WHERE name < ?1 ORDER BY name DESC LIMIT 300)
UNION ALL SELECT record FROM (SELECT name, record FROM names WHERE name >= ?1 ORDER BY name LIMIT 300)
"""
Statement = tuple[str, tuple[str | int | bytes, ...]]
_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(Layer).decode


def typed(error: apsw.Error, doing: str) -> DSecError:
    """SQLite's error as one of ours."""
    if isinstance(error, apsw.FullError):
        return DiskFull(f"{doing}: the disk is full")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return Unavailable(f"{doing}: another process holds the catalogue; try again")
    return Internal(f"{doing}: {type(error).__name__}: {error}")


class Catalogue:
    """Reads are for any thread; each call is one transaction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._reader = self._connect()
            self._reader.execute(_SCHEMA)
        except apsw.Error as e:
            raise typed(e, f"opening {path}") from e

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self._path))
        connection.set_busy_timeout(BUSY_MS)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    def close(self) -> None:
        with self._lock:
            self._reader.close()

    def generation(self) -> int:
        """Changes whenever anybody has written; we too, since writes have connections of their own."""
        with self._lock:
            version = self._reader.execute("PRAGMA data_version").fetchall()[0][0]
        assert isinstance(version, int)
        return version

    def _read(self, sql: str, *values: str) -> builtins.list[bytes]:
        try:
            with self._lock:
                return [row[0] for row in self._reader.execute(sql, values)]
        except apsw.Error as e:
            raise typed(e, f"reading {self._path}") from e

    def by_name(self, name: str) -> Layer | None:
        rows = self._read("SELECT record FROM names WHERE name = ?", name)
        return _decode(rows[0]) if rows else None

    def by_digest(self, digest: str) -> Layer | None:
        rows = self._read("SELECT record FROM layers WHERE digest = ?", digest)
        return _decode(rows[0]) if rows else None

    def by_prefix(self, prefix: str) -> Layer | None:
        """The only layer whose digest begins so."""
        rows = self._read("SELECT record FROM layers WHERE digest GLOB ? LIMIT 2", f"{prefix}*")
        return _decode(rows[0]) if len(rows) == 1 else None

    def names_of(self, digest: str) -> builtins.list[Layer]:
        return [
            _decode(r) for r in self._read("SELECT record FROM names WHERE digest = ? ORDER BY name", digest)
        ]

    def list(self) -> builtins.list[Layer]:
        """Every name, then the layers that have none."""
        named = self._read("SELECT record FROM names ORDER BY name")
        nameless = self._read(
            "SELECT record FROM layers WHERE digest NOT IN (SELECT digest FROM names) ORDER BY digest"
        )
        return [_decode(r) for r in (*named, *nameless)]

    def digests(self) -> set[str]:
        try:
            with self._lock:
                return {str(row[0]) for row in self._reader.execute("SELECT digest FROM layers")}
        except apsw.Error as e:
            raise typed(e, f"reading {self._path}") from e

    def near(self, name: str, count: int = 3) -> builtins.list[str]:
        """Names that a misspelt one may have meant, out of its neighbours in the alphabet."""
        known = [_decode(row).name for row in self._read(_NEIGHBOURS, name)]
        stem = name.rpartition("/")[2].partition(":")[0]
        alike = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
        return (alike + [k for k in known if stem in k and k not in alike])[:count]

    def add(self, layer: Layer) -> None:
        """The layer, and its name (which may have meant another until now)."""
        nameless = _encode(msgspec.structs.replace(layer, name=""))
        statements: builtins.list[Statement] = [(_PUT_LAYER, (layer.digest, layer.size, nameless))]
        if layer.name:
            statements.append((_PUT_NAME, (layer.name, layer.digest, _encode(layer))))
        self._write(f"adding {layer.name or layer.digest} to {self._path}", statements)

    def remove_name(self, name: str) -> None:
        self._write(f"removing {name}", [("DELETE FROM names WHERE name = ?", (name,))])

    def remove_digest(self, digest: str) -> None:
        """The layer and every name that it has."""
        self._write(
            f"removing {digest}",
            [
                ("DELETE FROM names WHERE digest = ?", (digest,)),
                ("DELETE FROM layers WHERE digest = ?", (digest,)),
            ],
        )

    def _write(self, doing: str, statements: Sequence[Statement]) -> None:
        try:
            connection = self._connect()
            try:
                connection.execute("BEGIN IMMEDIATE")
                for sql, values in statements:
                    connection.execute(sql, values)
                connection.execute("COMMIT")
            finally:
                connection.close()
        except apsw.Error as e:
            raise typed(e, doing) from e
