"""The catalogue: names to layers, and what layers need, in one SQLite database that processes share."""

from __future__ import annotations

import builtins
import difflib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import apsw
import msgspec

from dsec.core.errors import DiskFull, DSecError, Internal, Unavailable
from dsec.layers.model import Layer

BUSY_MS: Final = 30_000
MAX_PAGE: Final = 1000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS layers
    (digest TEXT PRIMARY KEY, size INTEGER NOT NULL, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names
    (name TEXT PRIMARY KEY, digest TEXT NOT NULL REFERENCES layers(digest), record BLOB NOT NULL)
    WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS names_by_digest ON names(digest);
CREATE TABLE IF NOT EXISTS kinds (kind TEXT, name TEXT, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS kinds_by_name ON kinds(name);
CREATE TABLE IF NOT EXISTS needs
    (layer TEXT, kind TEXT, what TEXT, PRIMARY KEY (layer, kind, what)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS needs_by_what ON needs(kind, what);
CREATE TABLE IF NOT EXISTS sources (key TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sources_by_digest ON sources(digest);
CREATE TABLE IF NOT EXISTS used (digest TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
"""
_PUT_LAYER: Final = """
INSERT INTO layers VALUES (?1, ?2, ?3) ON CONFLICT (digest) DO UPDATE SET size = ?2, record = ?3
"""
_PUT_NAME: Final = """
INSERT INTO names VALUES (?1, ?2, ?3) ON CONFLICT (name) DO UPDATE SET digest = ?2, record = ?3
"""
_PUT_USED: Final = "INSERT INTO used VALUES (?1, ?2) ON CONFLICT (digest) DO UPDATE SET at = max(at, ?2)"
_PUT_SOURCE: Final = "INSERT INTO sources VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET digest = ?2"
# So many that a small catalogue is looked through whole, so few that a large one costs no more.
_NEIGHBOURS: Final = """
SELECT record FROM (SELECT name, record FROM names WHERE name < ?1 ORDER BY name DESC LIMIT 300)
UNION ALL SELECT record FROM (SELECT name, record FROM names WHERE name >= ?1 ORDER BY name LIMIT 300)
"""
_PAGE: Final = """
SELECT record FROM names WHERE name > ?1 AND name >= ?2 AND name < ?3 ORDER BY name LIMIT ?4
"""
_PAGE_OF_KIND: Final = """
SELECT record FROM kinds JOIN names USING (name)
WHERE kind = ?5 AND kinds.name > ?1 AND kinds.name >= ?2 AND kinds.name < ?3 ORDER BY kinds.name LIMIT ?4
"""
# What a name means, what a build remembers and what was used lately; then all that these stand on.
_KEPT: Final = """
WITH RECURSIVE kept(digest) AS (
    SELECT digest FROM names UNION SELECT digest FROM used WHERE at >= ?1
    UNION SELECT what FROM needs JOIN kept ON needs.layer = kept.digest AND needs.kind = 'layer'
)
SELECT digest FROM kept
"""
Value = str | int | float | bytes
Statement = tuple[str, tuple[Value, ...]]
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

    # Reading

    def _column(self, sql: str, *values: Value) -> builtins.list[Value]:
        try:
            with self._lock:
                return [row[0] for row in self._reader.execute(sql, values) if row[0] is not None]
        except apsw.Error as e:
            raise typed(e, f"reading {self._path}") from e

    def _read(self, sql: str, *values: Value) -> builtins.list[Layer]:
        return [_decode(row) for row in self._column(sql, *values) if isinstance(row, bytes)]

    def _texts(self, sql: str, *values: Value) -> builtins.list[str]:
        return [str(row) for row in self._column(sql, *values)]

    def by_name(self, name: str) -> Layer | None:
        return next(iter(self._read("SELECT record FROM names WHERE name = ?", name)), None)

    def by_digest(self, digest: str) -> Layer | None:
        return next(iter(self._read("SELECT record FROM layers WHERE digest = ?", digest)), None)

    def by_prefix(self, prefix: str) -> Layer | None:
        """The only layer whose digest begins so."""
        found = self._read("SELECT record FROM layers WHERE digest GLOB ? LIMIT 2", f"{prefix}*")
        return found[0] if len(found) == 1 else None

    def by_source(self, key: str) -> Layer | None:
        """The layer that was made of what `key` stands for."""
        sql = "SELECT record FROM layers JOIN sources USING (digest) WHERE key = ?"
        return next(iter(self._read(sql, key)), None)

    def names_of(self, digest: str) -> builtins.list[Layer]:
        return self._read("SELECT record FROM names WHERE digest = ? ORDER BY name", digest)

    def list(self) -> builtins.list[Layer]:
        """Every name, then the layers that have none."""
        named = self._read("SELECT record FROM names ORDER BY name")
        return [
            *named,
            *self._read(
                "SELECT record FROM layers WHERE digest NOT IN (SELECT digest FROM names) ORDER BY digest"
            ),
        ]

    def page(self, *, after: str, prefix: str, kind: str, limit: int) -> builtins.list[Layer]:
        """Names in their order that follow `after` and begin with `prefix`; at most `limit`."""
        bounds = (after, prefix, prefix + "\U0010ffff", min(limit, MAX_PAGE))
        return self._read(_PAGE_OF_KIND, *bounds, kind) if kind else self._read(_PAGE, *bounds)

    def digests(self) -> set[str]:
        return set(self._texts("SELECT digest FROM layers"))

    def blobs(self) -> set[str]:
        """All that some layer refers to."""
        return set(self._texts("SELECT DISTINCT what FROM needs WHERE kind = 'blob'"))

    def unreachable(self, since: float) -> builtins.list[str]:
        """Layers that no name needs, and that nobody has used since then (unix seconds)."""
        kept = set(self._texts(_KEPT, since))
        return [d for d in self._texts("SELECT digest FROM layers") if d not in kept]

    def needed_by(self, digest: str) -> builtins.list[str]:
        """Layers that stand on it."""
        return self._texts("SELECT layer FROM needs WHERE kind = 'layer' AND what = ?", digest)

    def near(self, name: str, count: int = 3) -> builtins.list[str]:
        """Names that a misspelt one may have meant, out of its neighbours in the alphabet."""
        known = [layer.name for layer in self._read(_NEIGHBOURS, name)]
        stem = name.rpartition("/")[2].partition(":")[0]
        alike = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
        return (alike + [k for k in known if stem in k and k not in alike])[:count]

    # Writing

    def add(self, *layers: Layer, sources: dict[str, str] | None = None) -> None:
        """Layers, and their names (which may have meant others until now), in one transaction.

        sources: what a layer was made of, as a key to find it by, and its digest.
        """
        statements: builtins.list[Statement] = []
        for layer in layers:
            statements += _adding(layer)
        statements += [(_PUT_SOURCE, (key, digest)) for key, digest in (sources or {}).items()]
        what = layers[0].name or layers[0].digest if layers else "sources"
        self._write(f"adding {what} to {self._path}", statements)

    def use(self, digests: Sequence[str]) -> None:
        """Notes that they are in use now."""
        now = time.time()
        self._write("noting the use of layers", [(_PUT_USED, (digest, now)) for digest in digests])

    def remove_name(self, name: str) -> None:
        self._write(
            f"removing {name}",
            [
                ("DELETE FROM kinds WHERE name = ?", (name,)),
                ("DELETE FROM names WHERE name = ?", (name,)),
            ],
        )

    def remove_digests(self, digests: Sequence[str]) -> None:
        """The layers and every name that they have."""
        statements: builtins.list[Statement] = []
        for digest in digests:
            statements += [
                ("DELETE FROM kinds WHERE name IN (SELECT name FROM names WHERE digest = ?)", (digest,)),
                *(
                    (f"DELETE FROM {table} WHERE digest = ?", (digest,))
                    for table in ("names", "sources", "used", "layers")
                ),
                ("DELETE FROM needs WHERE layer = ?", (digest,)),
            ]
        self._write(f"removing {len(digests)} layers", statements)

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


def _adding(layer: Layer) -> builtins.list[Statement]:
    nameless = _encode(msgspec.structs.replace(layer, name=""))
    statements: builtins.list[Statement] = [
        (_PUT_LAYER, (layer.digest, layer.size, nameless)),
        (_PUT_USED, (layer.digest, time.time())),
    ]
    needs = [("blob", blob.digest) for blob in layer.blobs] + [
        ("layer", digest) for digest in (*layer.below, *layer.parts)
    ]
    statements += [("INSERT OR IGNORE INTO needs VALUES (?, ?, ?)", (layer.digest, *need)) for need in needs]
    if layer.name:
        statements += [
            (_PUT_NAME, (layer.name, layer.digest, _encode(layer))),
            ("DELETE FROM kinds WHERE name = ?", (layer.name,)),
            ("INSERT INTO kinds VALUES (?, ?)", (layer.kind, layer.name)),
        ]
    return statements
