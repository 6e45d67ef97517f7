"""Layers made for tests, and file systems told as plain values, so that two of them can be compared."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsec.layers.erofs.data import BlobWriter
from dsec.layers.erofs.format import BLOCK
from dsec.layers.erofs.tree import (
    HOLE,
    OPAQUE,
    Directory,
    File,
    Inode,
    Special,
    Symlink,
    Tree,
)
from dsec.layers.erofs.writer import Stats, write
from dsec.linux import syscalls

UUID = bytes(range(16))
REG, DIR, LNK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777
MS_RDONLY = 1


class Entry(NamedTuple):
    """All that can be seen of an inode, but for its number."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    nlink: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    size: int
    content: str
    """A hash, a link's target, or a device."""


Snapshot = dict[bytes, tuple[Entry, bytes]]
"""By path; with the first path of the same inode."""


class Maker:
    """A tree with a blob and a spool in memory."""

    def __init__(self, seed: str = "") -> None:
        self.blob = io.BytesIO()
        self.spool = io.BytesIO()
        self.writer = BlobWriter(self.blob, self.spool)
        self.tree = Tree(spools=[self.spool])
        self.tree.root.mtime_ns = 1
        self.seed = seed

    def file(
        self,
        path: bytes,
        content: bytes = b"",
        *,
        runs: Sequence[tuple[int, int]] | None = None,
        **fields: Any,
    ) -> File:
        source = content if runs is None else b"".join(content[a : a + n] for a, n in runs)
        extents, tail = self.writer.add(io.BytesIO(source), len(content), runs)
        made = File(fields.pop("mode", REG), size=len(content), extents=extents, tail=tail, **fields)
        self.tree.put(path, made)
        return made

    def symlink(self, path: bytes, target: bytes, **fields: Any) -> None:
        self.tree.put(path, Symlink(LNK, target=target, **fields))

    def special(self, path: bytes, mode: int, rdev: int = 0, **fields: Any) -> None:
        self.tree.put(path, Special(mode, rdev=rdev, **fields))

    def whiteout(self, path: bytes) -> None:
        self.special(path, stat.S_IFCHR, 0)

    def directory(self, path: bytes, *, opaque: bool = False, **fields: Any) -> Directory:
        made = self.tree.make_directories(path)
        for key, value in fields.items():
            setattr(made, key, value)
        if opaque:
            made.xattrs = {**(made.xattrs or {}), OPAQUE: b"y"}
        return made

    def done(self) -> Tree:
        blob = self.writer.finish()
        self.tree.blobs = [blob] if blob.blocks else []
        assert blob.digest == hashlib.sha256(self.blob.getvalue()).hexdigest()
        assert blob.blocks * BLOCK == len(self.blob.getvalue())
        return self.tree

    def save(self, where: Path) -> Saved:
        tree = self.done()
        where.mkdir(parents=True, exist_ok=True)
        for blob in tree.blobs:
            (where / blob.digest).write_bytes(self.blob.getvalue())
        return save(tree, where, where / "meta")


class Saved(NamedTuple):
    meta: Path
    blobs: list[Path]
    stats: Stats

    @contextlib.contextmanager
    def mounted(self, where: Path) -> Iterator[Path]:
        where.mkdir(exist_ok=True)
        devices = ",".join(f"device={blob}" for blob in self.blobs)
        syscalls.mount(str(self.meta), where, "erofs", MS_RDONLY, devices)
        try:
            yield where
        finally:
            syscalls.umount2(where)


@contextlib.contextmanager
def overlay(where: Path, makers: Sequence[Maker]) -> Iterator[Path]:
    """An overlay of these, bottom to top."""
    with contextlib.ExitStack() as stack:
        lowers = []
        for index, maker in enumerate(makers):
            saved = maker.save(where / f"layer{index}")
            lowers.append(str(stack.enter_context(saved.mounted(where / f"mnt{index}"))))
        empty = where / "empty"  # an overlay wants two at least
        empty.mkdir(exist_ok=True)
        root = where / "overlay"
        root.mkdir(exist_ok=True)
        syscalls.mount(
            "overlay", root, "overlay", MS_RDONLY, "lowerdir=" + ":".join([*reversed(lowers), str(empty)])
        )
        try:
            yield root
        finally:
            syscalls.umount2(root)


def save(tree: Tree, blobs: Path, meta: Path) -> Saved:
    """blobs: the directory in which those of the tree lie."""
    with meta.open("wb") as out:
        stats = write(tree, out, uuid=UUID)
    assert meta.stat().st_size == stats.blocks * BLOCK
    return Saved(meta, [blobs / blob.digest for blob in stats.blobs], stats)


def written(tree: Tree) -> bytes:
    out = io.BytesIO()
    write(tree, out, uuid=UUID)
    return out.getvalue()


def content(tree: Tree, file: File, blobs: dict[str, bytes]) -> bytes:
    parts = []
    for blob, start, blocks in file.extents:
        if blob == HOLE:
            parts.append(bytes(blocks * BLOCK))
        else:
            parts.append(blobs[tree.blobs[blob].digest][start * BLOCK : (start + blocks) * BLOCK])
    data = b"".join(parts)
    assert not any(data[file.size :])
    return (data[: file.size] + tree.read_tail(file.tail)) if file.extents else tree.read_tail(file.tail)


def snapshot_tree(tree: Tree, blobs: dict[str, bytes]) -> Snapshot:
    tree.count_links()
    found: Snapshot = {}
    first: dict[int, bytes] = {}
    waiting: list[tuple[bytes, Inode]] = [(b"", tree.root)]
    while waiting:
        path, inode = waiting.pop()
        found[path] = (_entry(tree, inode, blobs), b"")
        if isinstance(inode, Directory):
            waiting += [(path + b"/" + name, child) for name, child in inode.children.items()]
        first[id(inode)] = min(path, first.get(id(inode), path))
        found[path] = (found[path][0], str(id(inode)).encode())
    return {path: (entry, first[int(key)]) for path, (entry, key) in found.items()}


def _entry(tree: Tree, inode: Inode, blobs: dict[str, bytes]) -> Entry:
    size, said = 0, ""
    if isinstance(inode, File):
        data = content(tree, inode, blobs)
        assert len(data) == inode.size
        size, said = len(data), hashlib.sha256(data).hexdigest()
    elif isinstance(inode, Symlink):
        size, said = len(inode.target), inode.target.hex()
    elif isinstance(inode, Special):
        said = str(inode.rdev)
    xattrs = tuple(sorted((inode.xattrs or {}).items()))
    return Entry(inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.nlink, xattrs, size, said)


def snapshot_directory(root: Path) -> Snapshot:
    """The same of a mounted file system."""
    found: dict[bytes, tuple[Entry, tuple[int, int]]] = {}
    waiting = [b""]
    top = os.fsencode(root)
    while waiting:
        path = waiting.pop()
        try:
            info = os.lstat(top + path)
        except FileNotFoundError:
            continue  # a whiteout in a directory of one layer alone is listed, and is not there
        found[path] = (_look(top + path, info), (info.st_dev, info.st_ino))
        if stat.S_ISDIR(info.st_mode):
            names = os.listdir(top + path)
            assert len(set(names)) == len(names)
            waiting += [path + b"/" + name for name in names]
    first: dict[tuple[int, int], bytes] = {}
    for path in sorted(found, reverse=True):
        first[found[path][1]] = path
    return {path: (entry, first[key]) for path, (entry, key) in found.items()}


def _look(path: bytes, info: os.stat_result) -> Entry:
    size, said = 0, ""
    if stat.S_ISREG(info.st_mode):
        with open(path, "rb") as file:
            size, said = info.st_size, hashlib.file_digest(file, "sha256").hexdigest()
    elif stat.S_ISLNK(info.st_mode):
        size, said = info.st_size, os.readlink(path).hex()
    elif not stat.S_ISDIR(info.st_mode):
        said = str(info.st_rdev)
    names = os.listxattr(path, follow_symlinks=False)
    xattrs = tuple(sorted((os.fsencode(n), os.getxattr(path, n, follow_symlinks=False)) for n in names))
    return Entry(info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_nlink, xattrs, size, said)


NAMES = [b"a", b"b", b"!", b".x", b"\xff\xfe", b"-", b"c d", b"n\n", b"z" * 255, "ü".encode(), b"..."]


class Random:
    """Layers at random, with all that overlays and images make a difference of."""

    def __init__(self, seed: int, *, overlay: bool) -> None:
        self._rng = random.Random(seed)
        self._overlay = overlay
        self.maker = Maker()

    def layer(self, entries: int = 30) -> Maker:
        self.maker.directory(b"", **self._fields(directory=True))
        for _ in range(self._rng.randrange(entries + 1)):
            path = b"/".join(self._rng.choices(NAMES, k=self._rng.choice([1, 1, 2, 2, 3, 4])))
            if not self._blocked(path):
                self._add(path)
        return self.maker

    def _blocked(self, path: bytes) -> bool:
        parts = path.split(b"/")
        above = [self.maker.tree.lookup(b"/".join(parts[:n])) for n in range(1, len(parts))]
        return any(a is not None and not isinstance(a, Directory) for a in above)

    def _add(self, path: bytes) -> None:
        rng, maker = self._rng, self.maker
        kind = rng.choice(
            ["file"] * 5 + ["dir"] * 3 + ["link", "hard", "hard", "node", "fifo", "hide", "opaque"]
        )
        if kind == "file":
            self._file(path)
        elif kind == "dir" or (kind == "opaque" and not self._overlay):
            self._directory(path)
        elif kind == "opaque":
            self._directory(path, opaque=True)
        elif kind == "link":
            maker.symlink(path, rng.randbytes(rng.choice([1, 60, 2000, 4095])).replace(b"\0", b"x"))
        elif kind == "hard":
            self._hard_link(path)
        elif kind == "node":
            maker.special(path, stat.S_IFBLK | 0o640, os.makedev(rng.randrange(4096), rng.randrange(1 << 20)))
        elif kind == "fifo":
            maker.special(path, stat.S_IFIFO | 0o600, uid=self._fields()["uid"])
        elif self._overlay:
            maker.whiteout(path)

    def _directory(self, path: bytes, *, opaque: bool = False) -> None:
        found = self.maker.tree.lookup(path)
        if found is None or isinstance(found, Directory):
            self.maker.directory(path, opaque=opaque, **self._fields(directory=True))

    def _file(self, path: bytes) -> None:
        size = self._rng.choice([0, 1, 64, 65, 3000, 3073, 4095, 4096, 4097, 7500, 8192, 70_000, 300_001])
        data = bytearray(self._rng.randbytes(min(size, 32)) * (size // 32 + 1))[:size]
        if size > 200_000 and self._rng.random() < 0.5:
            data[65536:131072] = bytes(65536)
        self.maker.file(path, bytes(data), **self._fields())

    def _hard_link(self, path: bytes) -> None:
        files = [i for i in self.maker.tree.inodes() if isinstance(i, File | Symlink)]
        if files:
            self.maker.tree.put(path, self._rng.choice(files))

    def _fields(self, *, directory: bool = False) -> dict[str, Any]:
        rng = self._rng
        xattrs = {b"user.x": rng.randbytes(rng.choice([0, 3, 900, 4000]))} if rng.random() < 0.2 else {}
        if rng.random() < 0.1:
            xattrs[b"trusted.t"] = b"v"
        mode = (DIR if directory else REG) & ~0o7777 | rng.choice([0o755, 0o644, 0o4711, 0o1777])
        return {
            "mode": mode,
            "uid": rng.choice([0, 1000, 70_000, 4_000_000_000]),
            "gid": rng.choice([0, 5, 65_536]),
            "mtime_ns": rng.choice([0, 1, 1_700_000_000_123_456_789, -5, 1 << 60]),
            "xattrs": xattrs or None,
        }
