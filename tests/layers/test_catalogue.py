"""The catalogue's cost does not grow with what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from dsec.layers.catalogue import Catalogue
from dsec.layers.model import BlobRef, Layer


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    made = Catalogue(tmp_path / "catalogue.db")
    yield made
    made.close()


def _layer(number: int, name: str = "") -> Layer:
    blobs = [BlobRef(f"{number + 1:064x}", 4096)]
    return Layer(digest=f"{number:064x}", size=4096, blobs=blobs, kind="toolkit", created=1.0, name=name)


@pytest.mark.parametrize("change", ["add", "remove_name", "remove_digests"])
def test_a_change_looks_through_no_table(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    catalogue.add(_layer(1, "tool:1"))
    plans: list[str] = []
    connect = Catalogue._connect

    def watched(self: Catalogue) -> apsw.Connection:
        connection = connect(self)

        def plan(cursor: apsw.Cursor, sql: str, values: object) -> bool:
            if sql.startswith(("INSERT", "DELETE")):
                with apsw.Connection(str(self._path)) as other:
                    plans.extend(str(row[3]) for row in other.execute(f"EXPLAIN QUERY PLAN {sql}", values))  # type: ignore[arg-type]
            return True

        connection.exec_trace = plan
        return connection

    monkeypatch.setattr(Catalogue, "_connect", watched)
    if change == "add":
        catalogue.add(_layer(2, "tool:1"))
    elif change == "remove_name":
        catalogue.remove_name("tool:1")
    else:
        catalogue.remove_digests([f"{1:064x}"])
    assert any("SEARCH" in plan for plan in plans)
    assert not [plan for plan in plans if plan.startswith("SCAN")]
