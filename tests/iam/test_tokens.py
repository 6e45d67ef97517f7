from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import NotFound, PermissionDenied, Unauthenticated
from dsec.iam.tokens import TokenStore


def test_first_token_once(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "iam.db")
    token = store.first_token()
    assert token is not None and store.first_token() is None
    store.close()
    store = TokenStore(tmp_path / "iam.db")
    assert store.first_token() is None
    assert store.verify(token).project is None
    store.close()


def test_hashed_at_rest(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "iam.db")
    token = store.create("x")
    kept = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert token.encode() not in kept and token.removeprefix("dsec_").encode() not in kept
    store.close()


@pytest.mark.parametrize("token", ["", "x", "dsec_", "dsec_" + "a" * 43, "\udcff", "x" * 100_000])
def test_unknown(token: str) -> None:
    store = TokenStore(":memory:")
    store.create("x")
    with pytest.raises(Unauthenticated):
        store.verify(token)
    store.close()


def test_revoke_and_scope() -> None:
    store = TokenStore(":memory:")
    token = store.create("narrow", "p")
    principal = store.verify(token)
    principal.check("p")
    with pytest.raises(PermissionDenied):
        principal.check("q")
    [info] = store.list()
    assert (info.id, info.name, info.project) == (principal.id, "narrow", "p")
    store.revoke(info.id)
    with pytest.raises(Unauthenticated):
        store.verify(token)
    with pytest.raises(NotFound):
        store.revoke(info.id)
    store.close()
