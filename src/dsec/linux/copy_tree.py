"""A copy of a directory with all that an overlay's upper holds: owners, attributes, whiteouts, hard links.

Nothing in the source is trusted: no symbolic link is followed, nothing but regular files is opened to be
read, and an entry that goes away meanwhile is left out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

from dsec.core.errors import InvalidArgument

FICLONE: Final = 0x40049409
MAX_DEPTH: Final = 256
CHUNK: Final = 8 << 20
DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
GONE: Final = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
"""It was removed, or became something else, between the look at it and its opening."""


@contextlib.contextmanager
def _opened(name: bytes, flags: int, directory: int, mode: int = 0) -> Iterator[int]:
    fd = os.open(name, flags, mode, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


class Copy:
    """One copy. `reflinks`: whether every file shares its blocks with the source's."""

    def __init__(self, stop: Callable[[], bool] = lambda: False) -> None:
        self.reflinks = True
        self._stop = stop
        self._root = -1
        self._path: list[bytes] = []
        self._linked: dict[tuple[int, int], bytes] = {}

    def directory(self, source: int, name: bytes, target: int) -> None:
        """Copies directory `name` of `source` into `target`, both descriptors.

        Raises InvalidArgument past MAX_DEPTH, InterruptedError when told to stop, OSError.
        """
        if self._root < 0:
            self._root = target
        if len(self._path) >= MAX_DEPTH:
            raise InvalidArgument(
                f"copying a writable layer: directories lie over {MAX_DEPTH} deep; remove them and try again"
            )
        with _opened(name, DIRECTORY, source) as inside:
            os.mkdir(name, 0o700, dir_fd=target)
            with _opened(name, DIRECTORY, target) as copy:
                self._path.append(name)
                for entry in os.listdir(inside):
                    self._entry(inside, os.fsencode(entry), copy)
                self._path.pop()
                _dress(inside, copy)

    def _entry(self, source: int, name: bytes, target: int) -> None:
        if self._stop():
            raise InterruptedError(errno.EINTR, "told to stop")
        depth = len(self._path)
        try:
            st = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode):
                self.directory(source, name, target)
            elif not self._link(st, name, target):
                self._other(st, source, name, target)
        except OSError as e:
            del self._path[depth:]
            if e.errno not in GONE:
                raise

    def _link(self, st: os.stat_result, name: bytes, target: int) -> bool:
        """Whether it was one more name of what has been copied; the copy has it as well then."""
        path = b"/".join([*self._path, name])
        if st.st_nlink < 2 or (first := self._linked.setdefault((st.st_dev, st.st_ino), path)) == path:
            return False
        try:
            os.link(first, name, src_dir_fd=self._root, dst_dir_fd=target, follow_symlinks=False)
        except OSError as e:
            if e.errno not in (errno.ENAMETOOLONG, errno.EMLINK, errno.ENOENT):
                raise
            return False
        return True

    def _other(self, st: os.stat_result, source: int, name: bytes, target: int) -> None:
        if stat.S_ISREG(st.st_mode):
            self._file(source, name, target)
        elif stat.S_ISLNK(st.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            _dress_by_name(st, source, name, target)
        else:
            os.mknod(name, st.st_mode, st.st_rdev, dir_fd=target)
            _dress_by_name(st, source, name, target)

    def _file(self, source: int, name: bytes, target: int) -> None:
        with _opened(name, READ, source) as inside:
            if not stat.S_ISREG(os.fstat(inside).st_mode):
                return
            with _opened(name, WRITE, target, 0o600) as copy:
                self._content(inside, copy)
                _dress(inside, copy)

    def _content(self, source: int, target: int) -> None:
        try:
            fcntl.ioctl(target, FICLONE, source)
        except OSError:
            self.reflinks = False
            self._bytes(source, target)

    def _bytes(self, source: int, target: int) -> None:
        """Holes stay holes."""
        size = os.fstat(source).st_size
        os.ftruncate(target, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError as e:
                if e.errno == errno.ENXIO:  # nothing but a hole is left
                    return
                raise
            end = min(size, os.lseek(source, at, os.SEEK_HOLE))
            while at < end:
                if self._stop():
                    raise InterruptedError(errno.EINTR, "told to stop")
                done = os.copy_file_range(source, target, min(CHUNK, end - at), at, at)
                if not done:
                    return
                at += done


def _dress(source: int, target: int) -> None:
    """Owner, then mode (which a change of owner strips of setuid), attributes, and times last."""
    st = os.fstat(source)
    os.fchown(target, st.st_uid, st.st_gid)
    os.fchmod(target, stat.S_IMODE(st.st_mode))
    for key in os.listxattr(source):
        os.setxattr(target, key, os.getxattr(source, key))
    os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


def _dress_by_name(st: os.stat_result, source: int, name: bytes, target: int) -> None:
    os.chown(name, st.st_uid, st.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(st.st_mode):
        os.chmod(name, stat.S_IMODE(st.st_mode), dir_fd=target)
    theirs, ours = (b"/proc/self/fd/%d/%s" % (fd, name) for fd in (source, target))
    for key in os.listxattr(theirs, follow_symlinks=False):
        os.setxattr(ours, key, os.getxattr(theirs, key, follow_symlinks=False), follow_symlinks=False)
    os.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=target, follow_symlinks=False)
