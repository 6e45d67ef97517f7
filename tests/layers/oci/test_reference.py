"""Names of images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import InvalidArgument, NotFound
from dsec.layers.oci.model import Descriptor, PlatformSpec
from dsec.layers.oci.platforms import Platform, choose
from dsec.layers.oci.reference import Reference

D = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", "docker.io/library/debian:12"),
        ("user/tool", "docker.io/user/tool:latest"),
        ("docker.io/debian", "docker.io/library/debian:latest"),
        ("index.docker.io/a/b:c", "docker.io/a/b:c"),
        ("docker://quay.io/a/b/c:v1.2_3-x", "quay.io/a/b/c:v1.2_3-x"),
        ("localhost/a", "localhost/a:latest"),
        ("registry:5000/a", "registry:5000/a:latest"),
        ("127.0.0.1:5000/a:b", "127.0.0.1:5000/a:b"),
        ("[::1]:5000/a", "[::1]:5000/a:latest"),
        (f"ghcr.io/a@{D}", f"ghcr.io/a@{D}"),
        (f"ghcr.io/a:t@{D}", f"ghcr.io/a:t@{D}"),
        ("a--b/c__d/e.f_g", "docker.io/a--b/c__d/e.f_g:latest"),
    ],
)
def test_canonical(text: str, canonical: str) -> None:
    reference = Reference.parse(text)
    assert str(reference) == canonical
    assert Reference.parse(canonical) == reference


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":",
            "a:",
            "a@",
            "A",
            "a/B",
            "a//b",
            "/a",
            "a/",
            "a..b",
            "a___b",
            "-a",
            "a-",
            "a b",
            "a\n",
            "é",
        ),
        *("a:-t", "a:" + "t" * 129, "a:t:u", "h.io:0/a", "h.io:65536/a", "h.io:x/a", "-h.io/a", "h_x.io/a"),
        *("user:pw@h.io/a", "https://h.io/a", "h.io/../a", "h.io/" + "a" * 300, "a" * 5000, "[::1/a"),
        *("a@sha256:" + "A" * 64, "a@sha256:aa", "a@sha512:" + "a" * 128, "a@md5:" + "a" * 32),
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"reference|digest"):
        Reference.parse(text)


@given(st.text(alphabet="aA0./:@-_[]sh256 ", max_size=60))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except InvalidArgument:
        return
    assert Reference.parse(str(reference)) == reference


def entry(os: str, architecture: str, variant: str | None = None) -> Descriptor:
    return Descriptor(
        "x", f"{os}/{architecture}/{variant}", 1, platform=PlatformSpec(os, architecture, variant)
    )


ENTRIES = [
    entry("windows", "amd64"),
    entry("unknown", "unknown"),
    entry("linux", "amd64", "v3"),
    entry("linux", "amd64"),
    entry("linux", "arm", "v5"),
    entry("linux", "arm", "v7"),
    entry("linux", "arm64", "v8"),
    entry("linux", "riscv64"),
]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("linux/amd64", "linux/amd64/None"),
        ("linux/amd64/v2", "linux/amd64/None"),
        ("linux/amd64/v4", "linux/amd64/v3"),
        ("linux/arm", "linux/arm/v7"),
        ("linux/arm/v6", "linux/arm/v5"),
        ("linux/arm64", "linux/arm64/v8"),
        ("linux/riscv64", "linux/riscv64/None"),
        ("windows/amd64", "windows/amd64/None"),
    ],
)
def test_platforms(wanted: str, found: str) -> None:
    assert choose(ENTRIES, Platform.parse(wanted), "image x").digest == found


@pytest.mark.parametrize("wanted", ["linux/s390x", "linux/arm64/v9", "darwin/arm64"])
def test_no_such_platform(wanted: str) -> None:
    with pytest.raises(NotFound, match=rf"image x: nothing for {wanted}; there is .*linux/arm/v7"):
        choose(ENTRIES, Platform.parse(wanted), "image x")


@pytest.mark.parametrize("text", ["linux", "linux/", "Linux/amd64", "a/b/c/d", "", "linux/amd64\n"])
def test_no_platform(text: str) -> None:
    with pytest.raises(InvalidArgument, match="such as linux/amd64 or"):
        Platform.parse(text)
