import pytest

from dsec.core.errors import InvalidArgument
from dsec.layers.reference import canonical, digest_of

HEX = "a1" * 32


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("base", "base:latest"),
        ("base:bookworm", "base:bookworm"),
        ("agent@1.2", "agent@1.2"),
        ("registry.example/sphinx-9658:official", "registry.example/sphinx-9658:official"),
        ("registry.example:5000/tool", "registry.example:5000/tool:latest"),
        ("registry.example:5000/tool:v1", "registry.example:5000/tool:v1"),
    ],
)
def test_names(given, kept):
    assert canonical(given) == kept
    assert canonical(kept) == kept


@pytest.mark.parametrize(
    "given", ["", "-x", "a b", "a//b", "a/", "a:", ":a", "a/:b", "a@", "a:b@", "é", "a\nb", "../a", "x" * 300]
)
def test_what_is_no_name(given):
    with pytest.raises(InvalidArgument):
        canonical(given)


@pytest.mark.parametrize(
    "given", [HEX, f"sha256:{HEX}", f"name@sha256:{HEX}", f"r.example:5000/n@sha256:{HEX}"]
)
def test_digests(given):
    assert digest_of(given) == HEX


@pytest.mark.parametrize("given", ["base", HEX[:-1], HEX.upper(), f"name@{HEX}", f"{HEX}:latest"])
def test_what_is_no_digest(given):
    assert digest_of(given) is None
