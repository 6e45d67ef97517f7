"""A directory as it stands, as a tree: by descriptors, and never through a symbolic link.

Hard links and holes are kept, and whiteouts as an overlay has them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dsec.core.errors import InvalidArgument
from dsec.layers.archive_in import Summary
from dsec.layers.erofs.data import BlobWriter, Run
from dsec.layers.erofs.encode import CannotWrite, xattrs_size
from dsec.layers.erofs.tree import OPAQUE, Directory, File, Inode, Special, Symlink, Tree, Xattrs

MAX_ENTRIES: Final = 20_000_000
MAX_PATH: Final = 4095
"""Bytes from the root: what is longer, no program reaches by its name."""
MAX_RUNS: Final = 1 << 20
_STEP: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# Layers are mounted with redirect_dir=nofollow and metacopy=off: these would be lost or misread.
_REFUSED: Final = frozenset({b"trusted.overlay.redirect", b"trusted.overlay.metacopy"})
_OVERLAY: Final = b"trusted.overlay."
_LABEL: Final = b"security.selinux"
"""Of this host: left out."""

Parts = tuple[bytes, ...]


def read_directory(
    root: Path,
    tree: Tree,
    blob: BlobWriter,
    *,
    exclude: Callable[[bytes], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Puts what `root` holds into the empty `tree`, and the bodies of files into `blob`.

    exclude: whether to leave out a path, relative to `root`, and all below it. progress: told the bytes of
    files read so far. Raises InvalidArgument with the path of what cannot be in a layer, or vanished or
    changed while it was read.
    """
    with contextlib.closing(_Walk(root, tree, blob, exclude, progress)) as walk:
        return walk.run()


class _Bad(Exception):
    """Why the path that is being read cannot be in a layer."""


class _Walk:
    def __init__(
        self,
        root: Path,
        tree: Tree,
        blob: BlobWriter,
        exclude: Callable[[bytes], bool] | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._shown = root
        self._tree = tree
        self._blob = blob
        self._exclude = exclude
        self._progress = progress
        self._links: dict[int, Inode] = {}
        self._path: Parts = ()
        self._entries = self._size = 0
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.fstat(self._root).st_dev

    def close(self) -> None:
        os.close(self._root)

    def run(self) -> Summary:
        waiting: list[tuple[Parts, Directory]] = [((), self._tree.root)]
        try:
            while waiting:
                parts, directory = waiting.pop()
                self._path = parts
                waiting += self._directory(parts, directory)
        except _Bad as e:
            raise self._refused(str(e)) from e
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            gone = e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
            raise self._refused("it vanished while it was read" if gone else os.strerror(e.errno or 0)) from e
        return Summary(self._entries, self._size)

    def _refused(self, why: str) -> InvalidArgument:
        inside = "/" + b"/".join(self._path).decode("utf-8", "replace")
        return InvalidArgument(f"building a layer from {self._shown}: {inside!r}: {why}", entry=inside)

    def _directory(self, parts: Parts, directory: Directory) -> list[tuple[Parts, Directory]]:
        """Reads it. The directories in it are to be read next."""
        below: list[tuple[Parts, Directory]] = []
        length = sum(map(len, parts)) + len(parts)
        with self._opened(parts) as fd:
            st = os.fstat(fd)
            if st.st_dev != self._device:
                raise _Bad("another filesystem is mounted there: unmount it, or build from a copy")
            _dress(directory, st, _xattrs(fd))
            for name in sorted(map(os.fsencode, os.listdir(fd))):
                self._path = (*parts, name)
                if self._exclude and self._exclude(b"/".join(self._path)):
                    continue
                if length + len(name) > MAX_PATH:
                    raise _Bad(f"its path is too long: more than {MAX_PATH} bytes")
                made = directory.children[name] = self._entry(fd, name)
                if isinstance(made, Directory):
                    below.append((self._path, made))
        return below

    @contextlib.contextmanager
    def _opened(self, parts: Parts) -> Iterator[int]:
        """From the root each time: a path of any depth costs two descriptors."""
        fd = os.dup(self._root)
        try:
            for part in parts:
                below = os.open(part, _STEP, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _entry(self, fd: int, name: bytes) -> Inode:
        st = _seen(fd, name)
        if st.st_dev != self._device:
            raise _Bad("another filesystem is mounted there: unmount it, or build from a copy")
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise _Bad(f"more than {MAX_ENTRIES} entries")
        if stat.S_ISDIR(st.st_mode):
            return Directory(st.st_mode)
        if st.st_nlink > 1 and (known := self._links.get(st.st_ino)) is not None:
            return known
        made = self._inode(fd, name, st)
        if st.st_nlink > 1:
            self._links[st.st_ino] = made
        return made

    def _inode(self, fd: int, name: bytes, st: os.stat_result) -> Inode:
        made: Inode
        if stat.S_ISREG(st.st_mode):
            return self._file(fd, name, st)
        if stat.S_ISLNK(st.st_mode):
            made = Symlink(st.st_mode, target=os.readlink(name, dir_fd=fd))
        else:
            made = Special(st.st_mode, rdev=st.st_rdev)
        _dress(made, st, _xattrs(b"/proc/self/fd/%d/%s" % (fd, name)))
        return made

    def _file(self, parent: int, name: bytes, seen: os.stat_result) -> File:
        fd = os.open(name, _FILE, dir_fd=parent)
        with open(fd, "rb", buffering=0) as source:
            st = os.fstat(fd)
            if (st.st_ino, st.st_dev, stat.S_IFMT(st.st_mode)) != (seen.st_ino, seen.st_dev, stat.S_IFREG):
                raise _Bad("it was replaced while it was read")
            runs = _runs(fd, st)
            try:
                extents, tail = self._blob.add(_Runs(fd, runs), st.st_size, runs)
            except InvalidArgument as e:
                raise _Bad(e.message) from e
            made = File(st.st_mode, size=st.st_size, extents=extents, tail=tail)
            _dress(made, st, _xattrs(fd))
            if _stamp(os.fstat(source.fileno())) != _stamp(st):
                raise _Bad("it changed while it was read: stop what writes there, or build from a copy")
        self._size += st.st_size
        if self._progress and st.st_size:
            self._progress(self._size)
        return made


class _Runs:
    """The data of a file, run after run."""

    def __init__(self, fd: int, runs: list[Run]) -> None:
        self._fd = fd
        self._waiting = iter(runs)
        self._at = self._left = 0

    def read(self, size: int, /) -> bytes:
        while not self._left:
            run = next(self._waiting, None)
            if run is None:
                return b""
            self._at, self._left = run
        data = os.pread(self._fd, min(size, self._left), self._at)
        self._at += len(data)
        self._left -= len(data)
        return data


def _runs(fd: int, st: os.stat_result) -> list[Run]:
    if not st.st_size:
        return []
    if st.st_blocks * 512 >= st.st_size:
        return [(0, st.st_size)]
    runs: list[Run] = []
    end = 0
    try:
        while end < st.st_size and len(runs) < MAX_RUNS:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, start, os.SEEK_HOLE), st.st_size)
            if end > start:
                runs.append((start, end - start))
    except OSError as e:
        if e.errno == errno.ENXIO:  # nothing but a hole from here on
            return runs
        if e.errno == errno.EINVAL:  # this file system does not tell
            return [(0, st.st_size)]
        raise
    if end < st.st_size:
        runs.append((end, st.st_size - end))
    return runs


def _seen(fd: int, name: bytes) -> os.stat_result:
    return os.stat(name, dir_fd=fd, follow_symlinks=False)


def _stamp(st: os.stat_result) -> tuple[int, int]:
    return st.st_size, st.st_mtime_ns


def _dress(inode: Inode, st: os.stat_result, xattrs: Xattrs | None) -> None:
    inode.mode, inode.uid, inode.gid = st.st_mode, st.st_uid, st.st_gid
    inode.mtime_ns = max(st.st_mtime_ns, 0)
    inode.xattrs = xattrs


def _xattrs(where: int | bytes) -> Xattrs | None:
    follow = isinstance(where, int)
    try:
        names = os.listxattr(where, follow_symlinks=follow)
    except OSError as e:
        if e.errno == errno.EOPNOTSUPP:
            return None
        raise
    if not names:
        return None
    found = {}
    for name in map(os.fsencode, names):
        if name in _REFUSED:
            raise _Bad(f"an overlay's {name.decode()} cannot be carried by a layer")
        if name == _LABEL or (name.startswith(_OVERLAY) and name != OPAQUE):
            continue
        found[name] = os.getxattr(where, name, follow_symlinks=follow)
    try:
        xattrs_size(found)
    except CannotWrite as e:
        raise _Bad(str(e)) from e
    return found or None
