"""Archives: what they hold is kept, and what is hostile or damaged is refused by name, with nothing left."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import subprocess
import tarfile

import pytest
from tests.layers.conftest import empty, member, mounted, workspace
from tests.layers.test_build import CAPABILITY, facts, rich_tree

from dsec.core.errors import InvalidArgument, Unsupported
from dsec.layers import decompress, tarball
from dsec.layers.build import Wanted

pytestmark = pytest.mark.kernel
DIR, SYM, LNK, CHR, FIFO = (
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
)


@pytest.fixture
def unpacked(tmp_path):
    def unpack(path, whiteouts=True):
        root = tmp_path / "unpacked"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        tarball.unpack(path, root, whiteouts=whiteouts)
        return root

    return unpack


@pytest.mark.parametrize("form", ["pax", "gnu"])
def test_fidelity_with_gnu_tar(store, builder, source, tmp_path, form):
    """An archive of a tree gives the same layer as the tree."""
    rich_tree(source)
    (source / "socket").unlink()  # tar has none
    options = ["--xattrs", "--xattrs-include=*", "--xattrs-exclude=trusted.*"] if form == "pax" else []
    os.removexattr(source / "opaque", "trusted.overlay.opaque")
    if form == "gnu":
        for path, name in (("dir/file", "user.note"), ("capable", "security.capability")):
            os.removexattr(source / path, name)
        for path in source.rglob("*"):
            os.utime(path, ns=(0, 1_600_000_000_000_000_000), follow_symlinks=False)
    archive = tmp_path / "a.tar"
    subprocess.run(
        [
            "tar",
            f"--format={form}",
            "--sparse",
            "--numeric-owner",
            *options,
            "-cf",
            archive,
            "-C",
            source,
            ".",
        ],
        check=True,
        capture_output=True,
    )
    tree, tar = builder.from_directory(source, workspace("tree")), builder.from_tar(archive, workspace("tar"))
    with mounted(store, tree, tmp_path / "one") as one, mounted(store, tar, tmp_path / "two") as two:
        expected, found = facts(one), facts(two)
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name] == expected[name], name


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed(store, builder, archive, mode):
    plain = builder.from_tar(archive(member("a", b"x" * 100_000)), workspace("plain"))
    packed = builder.from_tar(
        archive(member("a", b"x" * 100_000), mode=mode, name="a.packed"), workspace("packed")
    )
    assert packed.digest == plain.digest


@pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd here")
def test_zstd(store, builder, archive, tmp_path):
    path = archive(member("a", os.urandom(1 << 20)))
    plain = builder.from_tar(path, workspace("plain"))
    packed = tmp_path / "a.zst"
    subprocess.run(["zstd", "-q", path, "-o", packed], check=True)
    assert builder.from_tar(packed, workspace("packed")).digest == plain.digest
    packed.write_bytes(packed.read_bytes()[:-100])
    with pytest.raises(InvalidArgument):
        builder.from_tar(packed, workspace("cut"))


def test_zstd_is_missing(archive, tmp_path, unpacked, monkeypatch):
    path = tmp_path / "a.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 100)
    monkeypatch.setattr(decompress.shutil, "which", lambda name: None)
    with pytest.raises(Unsupported, match="apt-get install zstd"):
        unpacked(path)


def test_whiteouts(archive, unpacked):
    root = unpacked(
        archive(
            member("a/.wh.gone"),
            member("b", type=DIR, mode=0o755),
            member("b/.wh..wh..opq"),
            member("b/.wh.moot"),
            member("b/kept", b"1"),
            member(".wh..wh.plnk", type=DIR),
            member(".wh.replaced"),
            member("replaced", type=DIR, mode=0o755),
            member("replaced/new", b"2"),
            member(".wh.file"),
            member("file", b"3"),
        )
    )
    gone = os.lstat(root / "a/gone")
    assert stat.S_ISCHR(gone.st_mode) and gone.st_rdev == 0
    assert os.getxattr(root / "b", "trusted.overlay.opaque") == b"y"
    assert os.getxattr(root / "replaced", "trusted.overlay.opaque") == b"y"
    assert sorted(os.listdir(root)) == ["a", "b", "file", "replaced"]
    assert sorted(os.listdir(root / "b")) == ["kept"]
    assert (root / "file").read_text() == "3"


def test_a_base_has_no_whiteouts(archive, unpacked):
    root = unpacked(
        archive(member("a/.wh.gone"), member("a/b", b""), member("a/.wh..wh..opq")), whiteouts=False
    )
    assert os.listdir(root / "a") == ["b"]
    assert "trusted.overlay.opaque" not in os.listxattr(root / "a")


def test_later_entries_replace_earlier_ones(archive, unpacked):
    root = unpacked(
        archive(
            member("a", b"file"),
            member("a", type=DIR, mode=0o700),
            member("a/b/c", b"deep"),
            member("d/e", b"1"),
            member("d", b"now a file"),
            member("s", type=SYM, linkname="/etc"),
            member("s", b"no link"),
            member("keep", type=DIR, mode=0o755),
            member("keep/x", b"1"),
            member("keep", type=DIR, mode=0o711),
        )
    )
    assert (root / "a/b/c").read_text() == "deep"
    assert (root / "d").read_text() == "now a file"
    assert (root / "s").read_text() == "no link"
    assert (root / "keep/x").exists() and (root / "keep").stat().st_mode & 0o777 == 0o711


def test_details(archive, unpacked):
    fine = member(
        "f", b"1", pax_headers={"mtime": "1700000000.123456789", "SCHILY.xattr.user.k": "\udcff\0v"}
    )
    root = unpacked(
        archive(
            member("./", type=DIR, mode=0o751, uid=7),
            fine,
            member(
                "setuid",
                b"",
                mode=0o4755,
                uid=5,
                pax_headers={"SCHILY.xattr.security.capability": _text(CAPABILITY)},
            ),
            member("hard", type=LNK, linkname="./f"),
            member("link", type=SYM, linkname="../../etc/passwd"),
            member("hardlink to link", type=LNK, linkname="link"),
            member("null", type=CHR, devmajor=1, devminor=3, mode=0o666),
            member("fifo", type=FIFO),
            member("implied/parent", b""),
            member("old", b"", mtime=-5),
            member("late", b"", mtime=1 << 40),
        )
    )
    assert root.stat().st_mode & 0o777 == 0o751 and root.stat().st_uid == 7
    assert (root / "f").stat().st_mtime_ns == 1_700_000_000_123_456_789
    assert os.getxattr(root / "f", "user.k") == b"\xff\0v"
    assert (root / "setuid").stat().st_mode & 0o7777 == 0o4755
    assert os.getxattr(root / "setuid", "security.capability") == CAPABILITY
    assert (root / "f").stat().st_nlink == 2
    assert os.readlink(root / "hardlink to link") == "../../etc/passwd"
    assert (root / "null").stat().st_rdev == os.makedev(1, 3)
    assert (root / "implied").stat().st_mode & 0o777 == 0o755 and (root / "implied").stat().st_mtime == 0
    assert (root / "old").stat().st_mtime == 0


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


HOSTILE = {
    "up": [member("../evil", b"x")],
    "up inside": [member("a/../../evil", b"x")],
    "absolute": [member("/etc/evil", b"x")],
    "through a link": [member("evil", type=SYM, linkname="/tmp"), member("evil/x", b"x")],
    "through a relative link": [member("evil", type=SYM, linkname=".."), member("evil/x", b"x")],
    "through a file": [member("evil", b"1"), member("evil/x", b"x")],
    "whiteout through a link": [member("evil", type=SYM, linkname="/tmp"), member("evil/.wh.x")],
    "opaque through a link": [member("evil", type=SYM, linkname="/tmp"), member("evil/.wh..wh..opq")],
    "hard link out": [member("evil", type=LNK, linkname="../../etc/passwd")],
    "hard link to absolute": [member("evil", type=LNK, linkname="/etc/passwd")],
    "hard link through a link": [
        member("s", type=SYM, linkname="/etc"),
        member("evil", type=LNK, linkname="s/passwd"),
    ],
    "hard link to nothing": [member("evil", type=LNK, linkname="later")],
    "hard link to itself": [member("evil", type=LNK, linkname="evil")],
    "hard link to its parent": [member("evil/x", b"1"), member("evil", type=LNK, linkname="evil/x")],
    "hard link to a directory": [member("d", type=DIR), member("evil", type=LNK, linkname="d")],
    "the root a file": [member("./", b"evil", type=tarfile.REGTYPE)],
    "root a link": [member(".", type=SYM, linkname="/evil")],
    "long name": [member("evil" * 64, b"")],
    "long path": [member("evil/" * 700 + "x", b"")],
    "whiteout of nothing": [member("evil/.wh.", b"")],
    "whiteout of dot": [member("evil/.wh..", b"")],
    "whiteout of dotdot": [member("evil/.wh...", b"")],
    "owner": [member("evil", b"", uid=(1 << 32) - 1)],
    "huge owner": [member("evil", b"", gid=1 << 40)],
    "device": [member("evil", type=CHR, devmajor=1 << 13, devminor=0)],
    "overlay attribute": [member("evil", b"", pax_headers={"SCHILY.xattr.trusted.overlay.redirect": "/etc"})],
    "odd attribute": [member("evil", b"", pax_headers={"SCHILY.xattr.nonsense": "x"})],
    "attribute of a link": [member("evil", type=SYM, linkname="x", pax_headers={"SCHILY.xattr.user.k": "x"})],
    "type": [member("evil", b"", type=b"V")],
    "time": [member("evil", b"", pax_headers={"mtime": "nan"})],
    "infinite time": [member("evil", b"", pax_headers={"mtime": "1e999"})],
    "empty link": [member("evil", type=SYM, linkname="")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile(store, builder, archive, members, tmp_path):
    before = sorted(os.listdir(tmp_path))
    path = archive(member("first", b"1"), *members, member("last", b"2"))
    with pytest.raises(InvalidArgument, match=r"entry '"):
        builder.from_tar(path, workspace("w"))
    assert empty(store)
    assert sorted({*os.listdir(tmp_path)} - {"archive.tar"}) == before
    assert not os.path.lexists("/tmp/x") or os.lstat("/tmp/x").st_mtime < path.stat().st_mtime - 1


def test_the_entry_is_named(builder, archive):
    with pytest.raises(InvalidArgument, match=r"entry 'some/\.\./where': a name with"):
        builder.from_tar(archive(member("ok", b""), member("some/../where", b"")), workspace("w"))


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_cut_short(store, builder, archive, mode, keep):
    path = archive(*(member(f"f{n}", os.urandom(3000)) for n in range(20)), mode=mode)
    os.truncate(path, int(path.stat().st_size * keep))
    with pytest.raises(InvalidArgument, match=r"damaged|cut short|ends inside"):
        builder.from_tar(path, workspace("w"))
    assert empty(store)


def test_cut_between_entries(store, builder, archive):
    path = archive(member("a", b"x" * 512), member("b", b"y" * 512))
    os.truncate(path, 1024)
    with pytest.raises(InvalidArgument, match=r"entry 'a'.*cut short"):
        builder.from_tar(path, workspace("w"))


@pytest.mark.parametrize("at", [0, 148, 512, 1024 + 148])
def test_damaged(store, builder, archive, at):
    path = archive(member("a", b"x" * 512), member("b", b"y" * 512))
    with path.open("r+b") as f:
        f.seek(at)
        f.write(b"\xff\xfe\xfd")
    if at == 512:  # content has no checksum of its own
        builder.from_tar(path, workspace("w"))
        return
    with pytest.raises(InvalidArgument, match="damaged"):
        builder.from_tar(path, workspace("w"))
    assert empty(store)


def test_a_bad_checksum_at_the_very_end(store, builder, archive):
    path = archive(member("a", b"x" * 512), mode="w:gz")
    data = bytearray(path.read_bytes())
    data[-5] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InvalidArgument, match="damaged"):
        builder.from_tar(path, workspace("w"))
    assert empty(store)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"hello", b"\0" * 10240, b"PK\x03\x04" + b"z" * 2000])
def test_no_archive_at_all(store, builder, tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    if content == b"\0" * 10240:  # an empty archive is one
        builder.from_tar(path, workspace("w"))
        return
    with pytest.raises(InvalidArgument):
        builder.from_tar(path, workspace("w"))
    assert empty(store)


def _header(name: bytes, size: bytes, kind: bytes) -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124 : 124 + len(size)] = size
    block[136:148], block[156:157], block[257:263], block[263:265] = b"00000000000\0", kind, b"ustar\0", b"00"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


HEADERS = {
    "a header of 8 GiB": _header(b"h", b"77777777777\0", b"x"),
    "a name of 8 GiB": _header(b"n", b"77777777777\0", b"L"),
    "a negative size": _header(b"n", b"\xff" * 12, b"0"),
    "an endless size": _header(b"n", b"\x80" + b"\x7f" * 11, b"0"),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_would_eat_memory(store, builder, tmp_path, header):
    path = tmp_path / "x.tar"
    path.write_bytes(header + b"\0" * 4096)
    with pytest.raises(InvalidArgument):
        builder.from_tar(path, workspace("w"))
    assert empty(store)


def test_a_map_of_holes_that_lies(store, builder, tmp_path):
    pax = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "evil"}
    pax |= {"GNU.sparse.size": "10", "GNU.sparse.map": "0,5,999999,5"}
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("evil")
        info.size, info.pax_headers = 10, pax
        tar.addfile(info, io.BytesIO(b"x" * 10))
    with pytest.raises(InvalidArgument, match="map of holes"):
        builder.from_tar(path, workspace("w"))
    assert empty(store)


def test_more_after_the_end_is_not_read_for_ever(monkeypatch, tmp_path, unpacked):
    monkeypatch.setattr(tarball, "MAX_TRAILER", 1 << 20)
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb") as f:
        f.write(b"\0" * (8 << 20))
    with pytest.raises(InvalidArgument, match="goes on after its end"):
        unpacked(path)


def test_not_as_root_is_refused(builder, archive, monkeypatch):
    from dsec.core.errors import PermissionDenied

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    packed = archive(member("a", b""))
    with pytest.raises(PermissionDenied, match="needs root"):
        builder.from_tar(packed, Wanted(name="w", kind="workspace", compress="lz4hc"))
    builder.from_tar(packed, workspace("w"))


def test_a_fifo_is_no_archive(builder, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidArgument, match="no regular file"):
        builder.from_tar(tmp_path / "fifo", workspace("w"))


def test_kind_decides_about_whiteouts(store, builder, archive, tmp_path):
    path = archive(member("a/.wh.gone"), member("a/b", b""))
    base = builder.from_tar(path, Wanted(name="base", kind="base"))
    work = builder.from_tar(path, workspace("work"))
    with mounted(store, base, tmp_path / "one") as one, mounted(store, work, tmp_path / "two") as two:
        assert sorted(os.listdir(one / "a")) == ["b"]
        assert sorted(os.listdir(two / "a")) == ["b", "gone"]
