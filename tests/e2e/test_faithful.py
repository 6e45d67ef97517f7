"""What a sandbox sees of an image is what another tool unpacks of it: umoci against the mount of ours."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.layers import _base
from tests.layers.conftest import mounted
from tests.layers.oci.conftest import Served, registry

from dsec.layers import suite
from dsec.layers.build import Builder, Wanted
from dsec.layers.exporter import Exporter
from dsec.layers.importer import Importer
from dsec.layers.store import LayerStore

__all__ = ["registry"]
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not shutil.which("umoci") or not shutil.which("skopeo"), reason="no umoci and skopeo"),
]


def look(root: Path) -> dict[bytes, dict[str, Any]]:
    """All that a tree shows, by path."""
    seen: dict[bytes, dict[str, Any]] = {}
    links: dict[tuple[int, int], bytes] = {}
    for path in _walk(os.fsencode(root)):
        st = os.lstat(path)
        name = path[len(os.fsencode(root)) :] or b"/"
        shown: dict[str, Any] = {"mode": oct(st.st_mode), "owner": (st.st_uid, st.st_gid)}
        if not stat.S_ISDIR(st.st_mode):
            shown["first name"] = links.setdefault((st.st_dev, st.st_ino), name)
        if name != b"/":
            shown["mtime"] = st.st_mtime_ns
        if stat.S_ISREG(st.st_mode):
            shown["content"] = (st.st_size, hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).hexdigest())
        elif stat.S_ISLNK(st.st_mode):
            shown["target"] = os.readlink(path)
        elif stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
            shown["device"] = st.st_rdev
        names = os.listxattr(path, follow_symlinks=False)
        shown["xattrs"] = {n: os.getxattr(path, n, follow_symlinks=False) for n in sorted(names)}
        seen[name] = shown
    return seen


def _walk(root: bytes) -> Iterator[bytes]:
    yield root
    for here, directories, files in os.walk(root):
        for name in sorted((*directories, *files)):
            yield os.path.join(here, name)


def compare(store: LayerStore, reference: str, tmp_path: Path) -> int:
    """Of an image in a registry; how many entries were compared."""
    layout, bundle = tmp_path / "layout", tmp_path / "bundle"
    _run("skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{reference}", f"oci:{layout}:x")
    _run("umoci", "unpack", "--image", f"{layout}:x", str(bundle))
    layer = Importer(Builder(store)).load(reference, Wanted(name="imported:1", kind="base"))
    assert layer.below == []
    with mounted(store, layer, tmp_path / "mnt") as where:
        ours, theirs = look(where), look(bundle / "rootfs")
    assert ours.keys() == theirs.keys()
    different = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert not different, list(different.items())[:5]
    return len(ours)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_base_with_changes(registry: Served, tmp_path: Path) -> None:
    """Layers that replace, remove, link and hide what lies below, with all kinds of entries."""
    shutil.copytree(_base(), tmp_path / "store", copy_function=shutil.copy2)
    top = tmp_path / "top"
    _changes(top)
    with LayerStore(tmp_path / "store") as store:
        Builder(store).from_directory(top, Wanted(name="top", kind="workspace"))
        reference = f"{registry.host}/faithful/base:1"
        Exporter(store).to_registry(["base", "top"], reference, level=1)
        with LayerStore(tmp_path / "fresh") as fresh:
            assert compare(fresh, reference, tmp_path) > 3000


def _changes(top: Path) -> None:
    (top / "etc/new/deep").mkdir(parents=True)
    (top / "usr/share").mkdir(parents=True)
    os.mknod(top / "etc/issue", stat.S_IFCHR, 0)  # a whiteout
    (top / "usr/share/doc").mkdir()
    os.setxattr(top / "usr/share/doc", "trusted.overlay.opaque", b"y")
    (top / "usr/share/doc/only").write_text("only")
    (top / "etc/debian_version").mkdir()  # a directory in place of a file
    (top / "etc/debian_version/inside").write_text("x")
    (top / "usr/share/keyrings").write_text("a file in place of a directory")
    file = top / "etc/new/file"
    file.write_bytes(os.urandom(100_000))
    os.link(file, top / "etc/new/hard")
    os.chown(file, 1234, 60_000)
    file.chmod(0o6755)
    os.setxattr(file, "user.note", b"\x00\xff")
    os.setxattr(file, "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    (top / "etc/new/big owner").write_bytes(b"1")
    os.chown(top / "etc/new/big owner", 3_000_000_000, 70_000)
    os.symlink("../" * 30 + "x" * 2000, top / "etc/new/long link")
    os.mkfifo(top / "etc/new/fifo", 0o640)
    os.mknod(top / "etc/new/device", stat.S_IFBLK | 0o600, os.makedev(259, 1 << 18))
    (top / ("n" * 255)).write_text("long")
    with open(top / "etc/new/sparse", "wb") as f:
        f.truncate(50 << 20)
        f.seek(20 << 20)
        f.write(b"middle")
    for at, path in enumerate((file, top / "etc/new/sparse", top / "etc/new/deep")):
        os.utime(path, ns=(1, 1_600_000_000_123_456_789 + at))


IMAGES = {
    "python": ["python3", "python3-venv", "git"],
    "node": ["nodejs"],
    "jdk": ["default-jdk-headless"],
    "large": ["python3-scipy", "python3-pandas", "python3-matplotlib", "texlive-latex-base", "gcc", "llvm"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(IMAGES))
def test_real_images(registry: Served, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Debian with Python, with Node.js, with a JDK, and one of more than 1 GB."""
    said: Callable[[str], None] = lambda line: None  # noqa: E731
    with LayerStore(tmp_path / "store") as store:
        builder = Builder(store)
        with store.stage() as (staged, fd):
            root = staged / "root"
            root.mkdir(mode=0o755)
            suite.make(root, "bookworm", IMAGES[name], [], lock_fd=fd, said=said)
            layer = builder.from_directory(root, Wanted(name=name, kind="base"))
        reference = f"{registry.host}/faithful/{name}:1"
        Exporter(store).to_registry([name], reference, level=1)
    with LayerStore(tmp_path / "fresh") as fresh:
        entries = compare(fresh, reference, tmp_path)
    with capsys.disabled():
        print(f"\n{name}: {layer.total / 1e6:.0f} MB, {entries} entries, metadata {layer.size / 1e6:.1f} MB")
    assert name != "large" or layer.total > 1_000_000_000
