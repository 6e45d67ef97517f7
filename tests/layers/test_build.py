"""What goes in comes out, the same tree gives the same bytes, and a failure leaves nothing."""

import os
import shutil
import socket
import stat
import struct
import subprocess
from pathlib import Path

import pytest
from tests.layers.conftest import MS_RDONLY, empty, mounted, workspace

from dsec.core.errors import DiskFull, InvalidArgument, Unsupported
from dsec.core.images import ImageConfig
from dsec.layers import mkfs, suite
from dsec.layers.build import Builder, Wanted
from dsec.layers.store import LayerStore
from dsec.linux import syscalls

# cap_net_raw=ep, as the kernel's struct vfs_cap_data, revision 2.
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)


def rich_tree(root: Path) -> None:
    """One of each thing that layers get wrong."""
    (root / "dir").mkdir()
    (root / "dir/file").write_bytes(b"x" * 10_000)
    os.link(root / "dir/file", root / "hard")
    os.symlink("dir/file", root / "symlink")
    os.symlink("/nowhere/" + "x" * 4000, root / "long symlink")
    (root / ("n" * 254)).write_text("long name")
    (root / os.fsdecode(b"not utf-8 \xff\xfe")).write_text("bytes")
    (root / "Case").write_text("upper")
    (root / "case").write_text("lower")
    (root / "empty").touch()
    (root / "setuid").touch()
    os.chown(root / "setuid", 1000, 100)
    (root / "setuid").chmod(0o6755)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    os.chown(root / "empty", 65534, 4_000_000_000)
    os.setxattr(root / "dir/file", "user.note", b"\0binary\xff")
    (root / "capable").touch()
    os.setxattr(root / "capable", "security.capability", CAPABILITY)
    os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(root / "block", 0o660 | stat.S_IFBLK, os.makedev(259, 70_000))
    os.mkfifo(root / "fifo")
    os.mknod(root / "whiteout", stat.S_IFCHR, os.makedev(0, 0))
    (root / "opaque").mkdir()
    os.setxattr(root / "opaque", "trusted.overlay.opaque", b"y")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(root / "socket"))
    with (root / "sparse").open("wb") as f:
        f.seek(40 << 20)
        f.write(b"end")
    for n in range(300):
        (root / "dir" / f"many-{n}").write_text(str(n))
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number), follow_symlinks=False)


def facts(root: Path) -> dict[str, tuple[object, ...]]:
    """All that a layer should keep of each entry."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    for path in sorted(root.rglob("*")):
        st = path.lstat()
        name = str(path.relative_to(root))
        content: object = None
        if stat.S_ISREG(st.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(st.st_mode):
            content = os.readlink(path)
        elif stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
            content = st.st_rdev
        same = first.setdefault(st.st_ino, name)
        attributes = {
            a: os.getxattr(path, a, follow_symlinks=False) for a in os.listxattr(path, follow_symlinks=False)
        }
        links = 0 if path.is_dir() else st.st_nlink
        owner = (st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns)
        found[name] = (*owner, links, same, content, attributes)
    return found


@pytest.mark.kernel
@pytest.mark.parametrize("compress", ["", "lz4hc"])
def test_fidelity(store, builder, source, tmp_path, compress):
    rich_tree(source)
    layer = builder.from_directory(source, Wanted(name="w", kind="workspace", compress=compress))
    with mounted(store, layer, tmp_path / "mnt") as root:
        kept, given = facts(root), facts(source)
        assert kept.keys() == given.keys()
        for name in given:
            assert kept[name] == given[name], name
    # holes do not cost what they measure
    assert layer.size < 8 << 20


@pytest.mark.kernel
def test_the_longest_name(store, builder, source, tmp_path):
    """Kept by a packer that can; refused by name, never cut, by one that cannot."""
    name = "n" * 255
    (source / name).touch()
    try:
        layer = builder.from_directory(source, workspace("w"))
    except Unsupported as e:
        refused = e
    else:
        refused = None
    if refused:
        assert name in refused.message
        assert empty(store)
        return
    with mounted(store, layer, tmp_path / "mnt") as root:
        assert (root / name).exists()


@pytest.mark.kernel
def test_in_an_overlay(store, builder, source, tmp_path):
    """Whiteouts and opaque directories hide what lies below, also when kinds change between layers."""
    lower = source
    for name in ("gone", "dir-to-file", "kept"):
        (lower / name).mkdir()
        (lower / name / "below").touch()
    (lower / "file-to-dir").write_text("file")
    low = builder.from_directory(lower, Wanted(name="low", kind="base"))
    upper = tmp_path / "upper"
    for name in ("file-to-dir", "kept"):
        (upper / name).mkdir(parents=True)
        (upper / name / "above").touch()
    (upper / "dir-to-file").write_text("now a file")
    os.setxattr(upper / "kept", "trusted.overlay.opaque", b"y")
    for name in ("gone", "never-there"):
        os.mknod(upper / name, stat.S_IFCHR, os.makedev(0, 0))
    high = builder.from_directory(upper, workspace("high"))
    joined = tmp_path / "joined"
    joined.mkdir()
    with mounted(store, low, tmp_path / "low") as a, mounted(store, high, tmp_path / "high") as b:
        syscalls.mount("overlay", joined, "overlay", MS_RDONLY, f"lowerdir={b}:{a}")
        try:
            seen = {str(p.relative_to(joined)) for p in joined.rglob("*")}
            assert seen == {"dir-to-file", "file", "file-to-dir", "file-to-dir/above", "kept", "kept/above"}
            assert (joined / "dir-to-file").read_text() == "now a file"
        finally:
            syscalls.umount2(joined)


@pytest.mark.kernel
def test_same_tree_same_digest(store, builder, source, tmp_path):
    rich_tree(source)
    first = builder.from_directory(source, workspace("one"))
    copy = tmp_path / "a copy, elsewhere"
    subprocess.run(["cp", "-a", source, copy], check=True)
    # Another order of entries, other inodes.
    for path in sorted(copy.iterdir(), reverse=True):
        path.rename(copy / "moved")
        (copy / "moved").rename(path)
    shutil.copystat(source, copy)
    second = builder.from_directory(copy, workspace("two"))
    assert second.digest == first.digest


def test_another_tree_another_digest(builder, source):
    first = builder.from_directory(source, workspace("w"))
    os.utime(source / "file", ns=(0, 1))
    second = builder.from_directory(source, workspace("w"))
    (source / "file").write_text("cantent\n")
    os.utime(source / "file", ns=(0, 1))
    third = builder.from_directory(source, workspace("w"))
    assert len({first.digest, second.digest, third.digest}) == 3


def test_provenance(store, builder, source):
    wanted = Wanted(name="w", kind="toolkit", labels={"team": "a"}, command=["dsec", "layer", "build"])
    builder.from_directory(source, wanted)
    layer = store.find("w")
    assert (layer.kind, layer.labels, layer.name) == ("toolkit", {"team": "a"}, "w:latest")
    assert layer.provenance.source == f"directory {source}"
    assert layer.provenance.command == ["dsec", "layer", "build"]
    assert layer.provenance.tool == "dsec erofs 1"
    assert (store.files / f"{layer.digest}.json").exists()


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(name="../x", kind="base"),
        Wanted(name="x", kind="nothing"),  # type: ignore[arg-type]
        Wanted(name="x", kind="base", labels={"a b": "c"}),
        Wanted(name="x", kind="base", labels={"a": "c" * 256}),
        Wanted(name="x", kind="base", config=ImageConfig(env={"1": "x"})),
        Wanted(name="x", kind="base", config=ImageConfig(env={"A": "\0"})),
        Wanted(name="x", kind="base", config=ImageConfig(user="a b")),
        Wanted(name="x", kind="base", config=ImageConfig(workdir="relative")),
        Wanted(name="x", kind="base", config=ImageConfig(shell=["sh"])),
        Wanted(name="x", kind="base", compress="gzip"),
        Wanted(name="x", kind="base", compress="--help"),
    ],
)
def test_bad_wishes(store, builder, source, wanted):
    with pytest.raises(InvalidArgument):
        builder.from_directory(source, wanted)
    assert empty(store)


def test_bad_sources(store, builder, source, tmp_path):
    for path in (tmp_path / "none", source / "file", Path("/proc/self/mem"), Path("x" * 5000), Path("a\0b")):
        with pytest.raises(InvalidArgument):
            builder.from_directory(path, workspace("w"))
    with pytest.raises(InvalidArgument, match="holds the layer store"):
        builder.from_directory(tmp_path, workspace("w"))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(InvalidArgument):
        builder.from_directory(loop, workspace("w"))
    assert empty(store)


@pytest.mark.kernel
def test_a_mount_inside_is_refused(store, builder, source):
    (source / "mnt").mkdir()
    syscalls.mount("tmpfs", source / "mnt", "tmpfs", 0)
    try:
        with pytest.raises(InvalidArgument, match="'/mnt': another filesystem"):
            builder.from_directory(source, workspace("w"))
    finally:
        syscalls.umount2(source / "mnt")
    assert empty(store)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["trusted.overlay.redirect", "trusted.overlay.metacopy"])
def test_what_an_overlay_would_misread_is_refused(store, builder, source, name):
    os.setxattr(source / "file", name, b"/etc")
    with pytest.raises(InvalidArgument, match="'/file': an overlay's"):
        builder.from_directory(source, workspace("w"))
    assert empty(store)


def test_paths_beyond_all_limits(store, builder, source):
    fd = os.open(source, os.O_RDONLY)
    for _ in range(25):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    with pytest.raises(InvalidArgument, match="too long"):
        builder.from_directory(source, workspace("w"))
    assert empty(store)
    subprocess.run(["rm", "-rf", source], check=True)  # Python's own gives up on such depths


@pytest.mark.kernel
def test_full_disk(tmp_path, source):
    small = tmp_path / "small"
    small.mkdir()
    syscalls.mount("tmpfs", small, "tmpfs", 0, "size=1m")
    try:
        (source / "big").write_bytes(os.urandom(3 << 20))
        with LayerStore(small) as store:
            with pytest.raises(DiskFull, match=r"free some space|is full"):
                Builder(store).from_directory(source, workspace("w"))
            assert empty(store)
            os.unlink(source / "big")
            Builder(store).from_directory(source, workspace("w"))
    finally:
        syscalls.umount2(small)


COMPRESSED = Wanted(name="w", kind="workspace", compress="lz4hc")


def test_no_mkfs(store, builder, source, monkeypatch, tmp_path):
    monkeypatch.setattr(mkfs.shutil, "which", lambda *a, **k: None)
    with pytest.raises(Unsupported, match="apt-get install erofs-utils"):
        builder.from_directory(source, COMPRESSED)
    assert empty(store)
    builder.from_directory(source, workspace("w"))  # needs none


def test_a_packer_that_fails(store, builder, source, monkeypatch, tmp_path):
    broken = tmp_path / "bin"
    broken.mkdir()
    program = broken / "mkfs.erofs"
    program.write_text(
        "#!/bin/sh\ncase $1 in -*help|-V) echo 'Available compressors are: lz4hc'; exit 0;; esac\n"
        "echo 'the packer broke' >&2\nexit 3\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:{os.environ['PATH']}")
    with pytest.raises(Exception, match="status 3: the packer broke"):
        builder.from_directory(source, COMPRESSED)
    assert empty(store)


def test_other_versions_of_the_packer(monkeypatch):
    newer = """mkfs.erofs (erofs-utils) 1.8.2
 --mkfs-time           the timestamp is applied as build time only
 --preserve-mtime      keep per-file modification time strictly
 --quiet               quiet execution
 -zX[,level=Y]         X=compressor
     lz4
     lz4hc
       [,level=<0-12>]         (default=9)
     zstd
"""
    monkeypatch.setattr(mkfs, "_said", lambda program, option: newer)
    found = mkfs.find()
    assert found.version == "1.8.2"
    assert found.compressors == {"lz4", "lz4hc", "zstd"}
    survey = mkfs.Survey(entries=1, apparent=0, holes=0, uuid="u")
    assert "-zzstd" in found.arguments(survey, "zstd")


@pytest.mark.parametrize(
    ("name", "include", "mirrors"),
    [
        ("--version", [], []),
        ("", [], []),
        ("Bookworm", [], []),
        ("bookworm", ["--evil"], []),
        ("bookworm", ["a b"], []),
        ("bookworm", [], ["--setup-hook=reboot"]),
        ("bookworm", [], ["./a-script"]),
        ("bookworm", [], ["http://a b"]),
    ],
)
def test_bad_suites(store, builder, name, include, mirrors):
    with pytest.raises(InvalidArgument):
        builder.from_suite(name, include, workspace("w"), mirrors)
    assert empty(store)


@pytest.mark.kernel
def test_a_suite_that_cannot_be_had(store, builder, tmp_path):
    """No such mirror: typed, with apt's own words, and nothing left."""
    with pytest.raises(Exception, match="mmdebstrap bookworm") as caught:
        builder.from_suite("bookworm", [], workspace("w"), [f"file://{tmp_path}/no-such-mirror"])
    assert caught.value.code in ("unavailable", "invalid_argument")
    assert empty(store)


@pytest.mark.kernel
def test_times_of_a_suite(tmp_path):
    """What was written just now gets the time of the newest package."""
    old, new = tmp_path / "root/old", tmp_path / "root/new"
    old.parent.mkdir()
    old.touch()
    os.utime(old, (1_000_000, 1_000_000))
    new.touch()
    suite._clamp_times(tmp_path / "root", int(new.stat().st_mtime) - 1)
    assert new.stat().st_mtime == old.parent.stat().st_mtime == 1_000_000
