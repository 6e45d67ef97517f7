"""Trees as tar streams: read back they are the same, and other tars read them."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.layers.test_build import rich_tree
from tests.layers.trees import Made, facts, of_tar

from dsec.core.errors import InvalidArgument, LayerCorrupt
from dsec.layers.erofs.tree import OPAQUE, Directory, File, Inode, Special, Symlink

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices need root")
NAMES = st.one_of(
    st.sampled_from(
        [b"a", b"b", b"c", b"n" * 255, b"long" * 30, b"\xff\xfe", "é".encode(), b" ", b"=", b"\n"]
    ),
    st.binary(min_size=1, max_size=6).filter(
        lambda n: not {0, ord("/")} & set(n) and n not in (b".", b"..") and not n.startswith(b".wh.")
    ),
)
COMMON = st.fixed_dictionaries(
    {
        "uid": st.sampled_from([0, 1, 65_536, 0o7777777, 0o10000000, (1 << 32) - 2]),
        "gid": st.sampled_from([0, 100, 4_000_000_000]),
        "mtime_ns": st.integers(0, (1 << 33) * 10**9),
    }
)
XATTRS = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from([b"user.a", b"user.\xff", b"security.capability"]), st.binary(max_size=40), min_size=1
    ),
)
MODE = st.integers(0, 0o7777)
CONTENT = st.tuples(
    st.sampled_from([0, 1, 100, 511, 512, 513, 3072, 3073, 4096, 5000, 65_536, 200_000, 400_000]),
    st.sampled_from(["data", "zeros", "start", "end", "middle"]),
)


def _bytes(size: int, kind: str) -> bytes:
    third = size // 3
    parts = {
        "data": (1, 1, 1),
        "zeros": (0, 0, 0),
        "start": (1, 0, 0),
        "end": (0, 0, 1),
        "middle": (0, 1, 0),
    }[kind]
    lengths = (third, third, size - 2 * third)
    return b"".join(b"x" * n if full else bytes(n) for full, n in zip(parts, lengths, strict=True))


@st.composite
def inodes(draw: Any, made: Made, depth: int) -> Inode:
    kind = draw(st.sampled_from(["file", "file", "link", "node", "whiteout", *["directory"] * (depth > 0)]))
    common = draw(COMMON)
    if kind == "whiteout":
        return Special(stat.S_IFCHR)
    if kind == "link":
        target = draw(st.sampled_from([b"x", b"/" + b"y" * 200, b"\xff" * 150]))
        return Symlink(stat.S_IFLNK | 0o777, target=target, **common)
    if kind == "node":
        kind, rdev = draw(
            st.sampled_from([(stat.S_IFBLK, os.makedev(4095, (1 << 20) - 1)), (stat.S_IFIFO, 0)])
        )
        return Special(kind | draw(MODE), rdev=rdev, **common)
    if kind == "file":
        content = _bytes(*draw(CONTENT))
        extents, tail = made.writer.add(io.BytesIO(content), len(content))
        mode = stat.S_IFREG | draw(MODE)
        return File(mode, size=len(content), extents=extents, tail=tail, xattrs=draw(XATTRS), **common)
    below: Directory = draw(directories(made, depth - 1, common))
    return below


@st.composite
def directories(draw: Any, made: Made, depth: int, common: dict[str, int]) -> Directory:
    here = Directory(stat.S_IFDIR | draw(MODE), xattrs=draw(XATTRS), **common)
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        here.children[name] = draw(inodes(made, depth))
    files = [c for c in here.children.values() if not isinstance(c, Directory) and c.mode != stat.S_IFCHR]
    if files and draw(st.booleans()):
        here.children[b"hard link"] = files[0]
    if draw(st.booleans()):  # below an opaque directory there are no whiteouts
        here.xattrs = {**(here.xattrs or {}), OPAQUE: b"y"}
        _without_whiteouts(here)
    return here


def _without_whiteouts(here: Directory) -> None:
    here.children = {n: c for n, c in here.children.items() if c.mode != stat.S_IFCHR}
    for child in here.children.values():
        if isinstance(child, Directory):
            _without_whiteouts(child)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip(data: st.DataObject) -> None:
    made = Made()
    made.tree.root = data.draw(directories(made, 3, data.draw(COMMON)))
    packed = made.tar()
    again = of_tar(packed)
    assert facts(again) == facts(made)
    assert again.tar() == packed


@ROOT
@pytest.mark.parametrize("tool", ["tar", "tarfile"])
def test_other_tars_read_it(tmp_path: Path, tool: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    rich_tree(source)
    (source / "socket").unlink()
    (source / "whiteout").unlink()
    os.removexattr(source / "opaque", "trusted.overlay.opaque")
    made = Made()
    made.read_directory(source)
    archive = tmp_path / "x.tar"
    archive.write_bytes(made.tar())
    if tool == "tarfile":
        _same_with_tarfile(archive, made)
        return
    command = [
        "tar",
        "--numeric-owner",
        "--xattrs",
        "--xattrs-include=*",
        "-xpf",
        str(archive),
        "-C",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    again = Made()
    again.read_directory(target)
    assert facts(again) == facts(made)
    assert (target / "sparse").stat().st_blocks * 512 < 1 << 20


def _same_with_tarfile(archive: Path, made: Made) -> None:
    with tarfile.open(archive, errorlevel=2) as tar:
        for info in tar:
            if info.isreg():
                content = tar.extractfile(info)
                assert content is not None and content.read() == made.content(os.fsencode(info.name))
        assert len(tar.getnames()) == len(facts(made))


def test_whiteouts_as_oci_has_them() -> None:
    made = Made()
    made.tree.put(b"d/gone", Special(stat.S_IFCHR))
    made.tree.make_directories(b"o").xattrs = {OPAQUE: b"y"}
    with tarfile.open(fileobj=io.BytesIO(made.tar())) as tar:
        assert tar.getnames() == [".", "d", "d/.wh.gone", "o", "o/.wh..wh..opq"]
        assert not any("trusted" in key for info in tar for key in info.pax_headers)


def test_sizes_beyond_octal_and_no_zeros_in_the_stream() -> None:
    made = Made()
    size = 9 << 30
    extents, tail = made.writer.add(io.BytesIO(b"abc"), size, [(size - 3, 3)])
    made.tree.put(b"big", File(stat.S_IFREG, size=size, extents=extents, tail=tail))
    packed = made.tar()
    assert len(packed) < 1 << 20
    again = of_tar(packed).tree.lookup(b"big")
    assert isinstance(again, File) and (again.size, again.extents) == (size, extents)


@pytest.mark.parametrize("path", [b".wh.x", b"d/.wh..wh..opq", b".wh.d/x"])
def test_names_that_would_be_whiteouts(path: bytes) -> None:
    made = Made()
    made.tree.put(path, File(stat.S_IFREG))
    with pytest.raises(InvalidArgument, match="would be read as a whiteout"):
        made.tar()


def test_a_blob_cut_short() -> None:
    made = Made()
    extents, tail = made.writer.add(io.BytesIO(b"x" * 10_000), 10_000)
    made.tree.put(b"f", File(stat.S_IFREG, size=10_000, extents=extents, tail=tail))
    made.blob.truncate(5000)
    with pytest.raises(LayerCorrupt, match="too short"):
        made.tar()
