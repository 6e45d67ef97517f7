"""Tar streams as trees: what they hold is kept, and what is hostile or damaged is refused by name."""

from __future__ import annotations

import io
import os
import random
import resource
import shutil
import stat
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from tests.layers.conftest import Member, member
from tests.layers.test_tarball import HEADERS, HOSTILE
from tests.layers.trees import Made, facts, of_tar

from dsec.core.errors import InvalidArgument
from dsec.layers import tar_acls, tar_headers
from dsec.layers.archive_in import Limits, LinkBelow
from dsec.layers.erofs.tree import OPAQUE, Directory, File, Inode, Special, is_opaque, is_whiteout

DIR, SYM, LNK = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="owners and attributes need root")


def packed(*members: Member, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content) if content else None)
    return out.getvalue()


def names(made: Made) -> list[bytes]:
    return sorted(facts(made))[1:]


def test_whiteouts_hide_what_is_below_and_nothing_of_this_archive() -> None:
    made = of_tar(
        packed(
            member("a/.wh.gone"),
            member("b", type=DIR, mode=0o755),
            member("b/.wh..wh..opq"),
            member("b/.wh.moot"),
            member("b/kept", b"1"),
            member(".wh..wh.plnk", type=DIR),
            member("replaced", type=DIR, mode=0o755),
            member("replaced/new", b"2"),
            member(".wh.replaced"),
            member(".wh.file"),
            member("file", b"3"),
        )
    )
    gone, b, replaced = (made.tree.lookup(path) for path in (b"a/gone", b"b", b"replaced"))
    assert gone is not None and is_whiteout(gone)
    assert b is not None and is_opaque(b) and replaced is not None and is_opaque(replaced)
    assert names(made) == [b"/a", b"/a/gone", b"/b", b"/b/kept", b"/file", b"/replaced", b"/replaced/new"]
    assert made.content(b"file") == b"3"


def test_a_base_has_no_whiteouts() -> None:
    data = packed(member("a/.wh.gone"), member("a/b"), member("a/.wh..wh..opq"))
    made = of_tar(data, whiteouts=False)
    assert names(made) == [b"/a", b"/a/b"]
    assert made.tree.root.children[b"a"].xattrs is None


def test_later_entries_replace_earlier_ones() -> None:
    made = of_tar(
        packed(
            member("a", b"file"),
            member("a", type=DIR, mode=0o700),
            member("a/b/c", b"deep"),
            member("d/e", b"1"),
            member("d", b"now a file"),
            member("s", type=SYM, linkname="/etc"),
            member("s", b"no link"),
            member("keep/x", b"1"),
            member("keep", type=DIR, mode=0o711),
            member("again/x", b"1"),
            member("again", b"file"),
            member("again/", type=DIR),
            member("again/y", b"2"),
        )
    )
    assert made.content(b"a/b/c") == b"deep" and made.content(b"d") == b"now a file"
    assert made.content(b"s") == b"no link" and made.content(b"keep/x") == b"1"
    keep, again = made.tree.root.children[b"keep"], made.tree.root.children[b"again"]
    assert keep.mode == stat.S_IFDIR | 0o711
    assert isinstance(again, Directory) and [*again.children] == [b"y"]


def test_details() -> None:
    pax = {"mtime": "1700000000.123456789", "SCHILY.xattr.user.k": "\udcff\0v\n="}
    made = of_tar(
        packed(
            member("./", type=DIR, mode=0o751, uid=7),
            member("f", b"1", pax_headers=pax, uid=70_000, gid=4_000_000_000),
            member("hard", type=LNK, linkname="./f"),
            member("link", type=SYM, linkname="../../etc/passwd"),
            member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
            member("implied/parent"),
            member("old", mtime=-5),
            member("late", mtime=1 << 40),
            member("labelled", pax_headers={"SCHILY.xattr.security.selinux": "x"}),
            member("other", pax_headers={"LIBARCHIVE.xattr.user.a%2Eb": "AAH/"}),
        )
    )
    root = made.tree.root
    f, null = root.children[b"f"], root.children[b"null"]
    assert (root.mode, root.uid) == (stat.S_IFDIR | 0o751, 7)
    assert f.mtime_ns == 1_700_000_000_123_456_789 and f.xattrs == {b"user.k": b"\xff\0v\n="}
    assert (f.uid, f.gid) == (70_000, 4_000_000_000) and root.children[b"hard"] is f
    assert isinstance(null, Special) and null.rdev == os.makedev(1, 3)
    implied = root.children[b"implied"]
    assert (implied.mode, implied.mtime_ns) == (stat.S_IFDIR | 0o755, 0)
    assert root.children[b"old"].mtime_ns == 0 and root.children[b"late"].mtime_ns == (1 << 33) * 10**9
    assert root.children[b"labelled"].xattrs is None
    assert root.children[b"other"].xattrs == {b"user.a.b": b"\0\1\xff"}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_numbers_beyond_octal_and_long_names(form: int) -> None:
    long = "/".join(["n" * 200] * 10)
    made = of_tar(
        packed(member(long, b"1", uid=3_000_000_000), member("l", type=SYM, linkname=long), form=form)
    )
    found = made.tree.lookup(long.encode())
    assert found is not None and found.uid == 3_000_000_000 and made.content(long.encode()) == b"1"
    assert facts(made)[b"/l"].body == long.encode()


def test_global_headers_apply_until_changed() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"gid": "77"}) as tar:
        tar.addfile(tarfile.TarInfo("a"))
    assert of_tar(out.getvalue()).tree.root.children[b"a"].gid == 77


def test_links_to_what_lies_below() -> None:
    data = packed(member("x", type=LNK, linkname="etc/file"), member("y", type=LNK, linkname="etc/file"))
    with pytest.raises(LinkBelow, match="entry 'x': a hard link to 'etc/file'"):
        of_tar(data)
    lower = File(stat.S_IFREG | 0o600, 5, size=3, tail=b"abc")
    asked: list[bytes] = []

    def below(path: bytes) -> Inode:
        asked.append(path)
        return lower

    made = of_tar(data, below=below)
    x, y = made.tree.root.children[b"x"], made.tree.root.children[b"y"]
    assert x is y and x is not lower and x.uid == 5 and made.content(b"x") == b"abc"
    assert asked == [b"etc/file"]
    with pytest.raises(InvalidArgument, match="nor in the layers below"):
        of_tar(data, below=lambda path: None)


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile(members: list[Member]) -> None:
    with pytest.raises(InvalidArgument, match=r"entry '"):
        of_tar(packed(member("first", b"1"), *members, member("last", b"2")))


def test_the_entry_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"entry 'some/\.\./where': a name with"):
        of_tar(packed(member("ok"), member("some/../where")))
    with pytest.raises(InvalidArgument, match="entry 'late': a time that is no number"):
        of_tar(packed(member("ok"), member("late", pax_headers={"mtime": "nan"})))


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_would_eat_memory(header: bytes) -> None:
    with pytest.raises(InvalidArgument):
        of_tar(header + bytes(4096))


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(entries=2), "more than 2 entries"),
        (Limits(path=10), "a path of more than 10 bytes"),
        (Limits(file=99), "a size of 100 bytes"),
        (Limits(total=150), "files of more than 150 bytes"),
        (Limits(xattr=9), "of 10 bytes"),
        (Limits(metadata=40), "names and attributes of more"),
    ],
)
def test_limits(limits: Limits, why: str) -> None:
    pax = {"SCHILY.xattr.user.k": "0123456789"}
    data = packed(member("long/path/a", b"x" * 100), member("b", b"x" * 100, pax_headers=pax))
    with pytest.raises(InvalidArgument, match=why):
        of_tar(data, limits=limits)
    assert of_tar(data, limits=Limits(entries=4, total=200)).content(b"b") == b"x" * 100


def test_every_cut_is_noticed() -> None:
    data = packed(member("a", b"x" * 600), member("b" * 200, b"y" * 512))
    end = len(data.rstrip(b"\0")) + 512
    for keep in range(0, end - 512, 100):
        with pytest.raises(InvalidArgument, match=r"damaged|cut short"):
            of_tar(data[:keep])
    with pytest.raises(InvalidArgument, match=r"entry 'a'.*cut short"):
        of_tar(data[:1536])


@pytest.mark.parametrize("content", [b"", bytes(100), b"hello", b"PK\x03\x04" + b"z" * 2000])
def test_no_archive_at_all(content: bytes) -> None:
    with pytest.raises(InvalidArgument, match="damaged"):
        of_tar(content)
    assert names(of_tar(bytes(10240))) == []


def test_a_map_of_holes_that_lies() -> None:
    pax = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "evil"}
    pax |= {"GNU.sparse.size": "10", "GNU.sparse.map": "0,5,999999,5"}
    with pytest.raises(InvalidArgument, match="entry 'evil': a map of holes"):
        of_tar(packed(member("evil", b"x" * 10, pax_headers=pax)))


def test_more_after_the_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_headers, "MAX_TRAILER", 1 << 20)
    with pytest.raises(InvalidArgument, match="goes on after its end"):
        of_tar(bytes(8 << 20))


def test_short_reads_and_progress() -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 700))

    data = packed(member("a", b"x" * 10_000), member("b" * 150, b"y"))
    told: list[int] = []
    made = Made()
    made.read_tar(Slow(data), progress=told.append)
    assert facts(made) == facts(of_tar(data)) and told[-1] == len(data) and told == sorted(told)


@ROOT
@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=ustar"],
        ["--format=v7"],
        ["--format=pax"],
        ["--format=gnu", "-S"],
        ["--format=pax", "-S", "--sparse-version=0.0"],
        ["--format=pax", "-S", "--sparse-version=0.1"],
        ["--format=pax", "-S", "--sparse-version=1.0"],
        ["--format=pax", "--xattrs", "--xattrs-include=*"],
    ],
    ids=" ".join,
)
def test_what_gnu_tar_packs_is_the_directory(tmp_path: Path, options: list[str]) -> None:
    root = tmp_path / "root"
    _fill(root, xattrs="--xattrs" in options)
    if "--format=pax" in options:
        os.utime(root / "dir/file", ns=(0, 1_600_000_000_123_456_789))
    if "--format=v7" not in options:
        os.mkfifo(root / "fifo")
        os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        for name in ("fifo", "null", "."):
            os.utime(root / name, ns=(0, 10**18))
    command = ["tar", "--numeric-owner", *options, "-cf", "-", "-C", str(root), "."]
    data = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    expected = Made()
    expected.read_directory(root)
    assert facts(of_tar(data)) == facts(expected)


def _fill(root: Path, *, xattrs: bool) -> None:
    (root / "dir").mkdir(parents=True)
    (root / "dir/file").write_bytes(b"x" * 10_000)
    os.link(root / "dir/file", root / "hard")
    os.symlink("dir/file", root / "link")
    (root / os.fsdecode(b"not utf-8 \xff")).write_text("bytes")
    (root / "owned").touch()
    os.chown(root / "owned", 1000, 65_535)
    with (root / "sparse").open("wb") as f:
        for number in range(60):
            f.seek(number << 17)
            f.write(b"piece")
        f.truncate(64 << 17)
    if xattrs:
        os.setxattr(root / "dir/file", "user.note", b"\0binary\n\xff")
    for path in [root, *root.rglob("*")]:
        os.utime(path, ns=(0, 10**18), follow_symlinks=False)


def test_mutated_archives_give_a_tree_or_a_typed_error(tmp_path: Path) -> None:
    seeds = _seeds(tmp_path)
    rng = random.Random(7)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    until, good, bad = time.monotonic() + 4, 0, 0
    while time.monotonic() < until:
        started = time.monotonic()
        try:
            of_tar(_mutated(rng, rng.choice(seeds)), limits=Limits(total=1 << 26), below=lambda path: None)
            good += 1
        except InvalidArgument:
            bad += 1
        assert time.monotonic() - started < 3
    assert good > 10 and bad > 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def _seeds(tmp_path: Path) -> list[bytes]:
    pax = {"mtime": "17.5", "SCHILY.xattr.user.k": "v" * 50}
    members = [
        member("d", type=DIR),
        member("d/f", b"x" * 700, pax_headers=pax),
        member("d/h", type=LNK, linkname="d/f"),
        member("n" * 120, type=SYM, linkname="t" * 120),
        member("d/.wh.x"),
    ]
    seeds = [packed(*members), packed(*members, form=tarfile.GNU_FORMAT)]
    with (tmp_path / "sparse").open("wb") as f:
        for number in range(30):
            f.seek(number << 16)
            f.write(b"piece")
    if shutil.which("tar"):
        for options in (["--format=gnu"], ["--format=pax"], ["--format=pax", "--sparse-version=0.0"]):
            command = ["tar", *options, "-S", "-cf", "-", "-C", str(tmp_path), "sparse"]
            seeds.append(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    return seeds


def _mutated(rng: random.Random, seed: bytes) -> bytes:
    """Half of them with right checksums, so that they get past them."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data))
        data[at] = rng.choice((0, 0x30, 0x37, 0x80, 0xFF, 0x0A, 0x3D, rng.randrange(256)))
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    if rng.random() < 0.8:
        for at in range(0, len(data) - 511, 512):
            if seed[at + 257 : at + 262] == b"ustar":
                data[at + 148 : at + 156] = b" " * 8
                data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def test_the_opaque_mark_is_no_ones_to_give() -> None:
    evil = member("d", type=DIR, pax_headers={f"SCHILY.xattr.{OPAQUE.decode()}": "y"})
    with pytest.raises(InvalidArgument, match="what an overlay obeys"):
        of_tar(packed(evil))


ACL = b"user::rw-\nuser:0:rwx\nuser:54321:r--\ngroup::r--\nmask::rwx\nother::r--\n"


@ROOT
def test_access_control_lists_of_gnu_tar(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "f").touch()
    os.setxattr(root / "f", "system.posix_acl_access", tar_acls.encode(ACL))
    os.setxattr(root / "d", "system.posix_acl_default", tar_acls.encode(ACL))
    command = ["tar", "--format=pax", "--acls", "--numeric-owner", "-cf", "-", "-C", str(root), "."]
    data = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    assert b"SCHILY.acl.access" in data and b"SCHILY.acl.default" in data
    expected = Made()
    expected.read_directory(root)
    found, wanted = facts(of_tar(data)), facts(expected)
    for name in (b"/f", b"/d"):
        assert found[name].xattrs == wanted[name].xattrs != ()
        assert found[name].mode == wanted[name].mode


@pytest.mark.parametrize(
    "text",
    [
        "user:lisa:rw-",
        "user::rw-",
        "user::rw-,group::r--,other::r--,user:7:rwx",
        "user::rw-,user::rw-,group::r--,other::r--",
        "user::rwz,group::r--,other::r--",
        "user:4294967295:rw-",
        "nobody::rw-",
        "user",
        "mask:5:rwx",
    ],
)
def test_access_control_lists_that_make_no_sense(text: str) -> None:
    with pytest.raises(InvalidArgument, match="entry 'f': an access control list"):
        of_tar(packed(member("f", pax_headers={"SCHILY.acl.access": text})))


def test_access_control_lists_of_star() -> None:
    text = "user::rw-,user:lisa:r--:54321,user:root:rwx:0,group::r--,mask::rwx,other::r--"
    made = of_tar(packed(member("f", pax_headers={"SCHILY.acl.access": text})))
    assert made.tree.root.children[b"f"].xattrs == {b"system.posix_acl_access": tar_acls.encode(ACL)}
