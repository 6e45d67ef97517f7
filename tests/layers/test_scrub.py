"""What is left out of a layer made of a sandbox, and what has to stay."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import InvalidArgument
from dsec.layers.scrub import MAX_DEPTH, MAX_GLOBS, Rules, Scrub

OUT = [
    "var/cache/apt/archives/x.deb",
    "var/lib/apt/lists/deb.debian.org_dists",
    "var/cache/apk/a",
    "var/cache/yum/x/y",
    "var/cache/dnf/x",
    "root/.cache/pip/http/a",
    "home/me/.cache/x",
    "home/me/.npm/_cacache/x",
    "tmp/x",
    "var/tmp/a/b",
    "run/x.pid",
    "var/log/dpkg.log",
    "var/log/apt/history.log",
    "root/.bash_history",
    "home/me/.python_history",
    "/root/.ash_history",
]
IN = [
    "usr/lib/python3/x.pyc",
    "usr/lib/__pycache__/x.pyc",
    "var/lib/dpkg/status",
    "etc/apt/sources.list",
    "tmp",
    "run",
    "var/log",
    "home/me",
    "home/me/.cache",
    "home/me/work/.cache/x",
    "home/me/work/tmp/x",
    "srv/tmp/x",
    "root/.bashrc",
    "TMP/x",
    "",
]


@pytest.mark.parametrize("path", OUT)
def test_left_out_by_default(path: str) -> None:
    assert Rules().matches(path.encode())


@pytest.mark.parametrize("path", IN)
def test_stays_by_default(path: str) -> None:
    assert not Rules().matches(path.encode())


def test_own_globs_and_keep() -> None:
    rules = Rules(more=("/srv/**/*.o", "data/", "café/?"), keep=("srv/keep/**", "tmp/wanted"))
    assert rules.matches(b"srv/a.o") and rules.matches(b"srv/a/b/c.o") and rules.matches(b"data/a/b")
    assert rules.matches("café/é".encode())
    assert not rules.matches(b"srv/keep/a.o") and not rules.matches(b"tmp/wanted")
    assert not rules.matches(b"data") and not rules.matches(b"srv/a.c") and rules.matches(b"tmp/other")
    assert Rules(more=("x/[ab]*",)).matches(b"x/b\xff\xfe")


@pytest.mark.parametrize("glob", ["", "/", "a/../b", "./a", "a\0b", "x" * 1025])
def test_bad_globs(glob: str) -> None:
    with pytest.raises(InvalidArgument, match="scrub rules"):
        Rules(more=(glob,)).check()


def test_too_many_globs() -> None:
    with pytest.raises(InvalidArgument, match="more than"):
        Rules(more=("a",) * MAX_GLOBS).check()


def _oracle(glob: str, path: str) -> bool:
    """A regular expression, which may take for ever."""
    tail = r"(?:[^/]+/)*[^/]+\Z"
    body, last = (glob[:-2], tail) if glob.endswith("**") else (glob, r"\Z")
    pattern = re.escape(body).replace(r"\*\*/", "(?:[^/]+/)*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return bool(re.match(pattern + last, path))


NAME = st.text("ab", min_size=1, max_size=3)
GLOBS = st.lists(st.sampled_from(["**", "*", "a", "b", "a*", "*b", "?", "ab"]), min_size=1, max_size=6)


@given(GLOBS, st.lists(NAME, min_size=1, max_size=6))
def test_globs_as_the_oracle_says(glob: list[str], names: list[str]) -> None:
    path = "/".join(names)
    expected = _oracle("/".join(glob), path)
    rules = Rules(caches=(), histories=(), logs=(), temporary=(), more=("/".join(glob),))
    assert rules.matches(path.encode()) == expected


def test_no_glob_takes_for_ever() -> None:
    rules = Rules(more=("**/" * 270 + "*a" * 100 + "b", "*a" * 500 + "b", "**/a*/" * 160 + "b"))
    began = time.process_time()
    rules.matches(b"/".join([b"a" * 255] * 15))
    assert time.process_time() - began < 5


def _left(upper: Path, scrub: Scrub) -> set[str]:
    """What a walk that asks it sees."""
    found: set[str] = set()
    waiting = [b""]
    while waiting:
        here = waiting.pop()
        for name in os.listdir(os.fsencode(upper) + b"/" + here):
            path = here + b"/" + name if here else name
            if not scrub(path):
                found.add(os.fsdecode(path))
                if (upper / os.fsdecode(path)).is_dir() and not (upper / os.fsdecode(path)).is_symlink():
                    waiting.append(path)
    return found


def _make(upper: Path, *paths: str) -> None:
    for path in paths:
        target = upper / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir() if path.endswith("/") else target.write_text(path)


def test_a_walk(tmp_path: Path) -> None:
    _make(
        tmp_path,
        "tmp/a/b",
        "tmp/c",
        "var/log/nginx/access.log",
        "var/log/empty/",
        "root/.cache/pip/x",
        "opt/x",
    )
    (tmp_path / "tmp/link").symlink_to("/opt")
    scrub = Scrub(tmp_path, Rules())
    assert _left(tmp_path, scrub) == {
        *("tmp", "var", "var/log", "var/log/nginx", "var/log/empty", "root", "root/.cache", "opt", "opt/x")
    }
    assert scrub.entries == 5  # tmp/a with all in it is one


def test_what_is_kept_keeps_its_directories(tmp_path: Path) -> None:
    _make(tmp_path, "tmp/a/b/wanted", "tmp/a/b/other", "tmp/a/c/other", "tmp/d/e/f")
    left = _left(tmp_path, Scrub(tmp_path, Rules(keep=("tmp/a/b/wanted", "tmp/d/e"))))
    assert left == {"tmp", "tmp/a", "tmp/a/b", "tmp/a/b/wanted", "tmp/d", "tmp/d/e"}


def test_the_platforms_own_files(tmp_path: Path) -> None:
    _make(tmp_path, "etc/hostname", "etc/hosts", "etc/passwd")
    (tmp_path / "etc/resolv.conf").symlink_to("hostname")
    platform = {"hostname": "etc/hostname", "hosts": "as written", "resolv.conf": "etc/hostname", "none": ""}
    left = _left(tmp_path, Scrub(tmp_path, Rules(), platform))
    assert left == {"etc", "etc/hosts", "etc/passwd", "etc/resolv.conf"}


def _deep(top: Path, name: str, depth: int) -> int:
    """A descriptor of the last."""
    top.mkdir(parents=True)
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    return here


@pytest.fixture
def deep_path(tmp_path: Path) -> Iterator[Path]:
    """pytest's own removal does not get to the bottom."""
    yield tmp_path
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def test_deeper_than_a_path_may_be(deep_path: Path) -> None:
    """What is left out may be as deep as it likes; what is kept is found there."""
    os.close(_deep(deep_path / "tmp/junk", "x" * 200, 1500))
    last = _deep(deep_path / "tmp/wanted", "y" * 200, 40)
    os.close(os.open("kept", os.O_WRONLY | os.O_CREAT, dir_fd=last))
    os.close(last)
    scrub = Scrub(deep_path, Rules(keep=("tmp/**/kept",)))
    assert scrub(b"tmp/junk") and not scrub(b"tmp/wanted")
    path = b"tmp/wanted/" + b"/".join([b"y" * 200] * 40)
    assert not scrub(path) and not scrub(path + b"/kept")


def test_too_deep_to_stay(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="deep"):
        Scrub(tmp_path, Rules())(b"usr" + b"/d" * (MAX_DEPTH + 1))


@pytest.mark.kernel
def test_whiteouts_and_opaque_directories_stay(tmp_path: Path) -> None:
    _make(tmp_path, "tmp/a/b/file", "tmp/opaque/x/y", "tmp/none/z", "root/.cache/pip/x", "var/log/x")
    for path in ("tmp/a/b/gone", "root/.cache/old", "var/log/gone"):
        os.mknod(tmp_path / path, 0o020000, 0)
    os.mknod(tmp_path / "tmp/device", 0o020600, os.makedev(1, 3))
    os.setxattr(tmp_path / "tmp/opaque", "trusted.overlay.opaque", b"y")
    assert _left(tmp_path, Scrub(tmp_path, Rules())) == {
        *("tmp", "tmp/a", "tmp/a/b", "tmp/a/b/gone", "tmp/opaque", "root", "root/.cache", "root/.cache/old"),
        *("var", "var/log", "var/log/gone"),
    }


def test_many_directories_are_looked_at_once(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"tmp/{number}/a/b").mkdir(parents=True)
    scrub = Scrub(tmp_path, Rules())
    began = time.process_time()
    assert _left(tmp_path, scrub) == {"tmp"}
    assert time.process_time() - began < 3
