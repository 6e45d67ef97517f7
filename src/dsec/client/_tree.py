"""Local trees to and from tar streams. What comes from a sandbox is hostile.

Every name is walked component by component, below a directory descriptor and without following symlinks:
neither an archive nor a symlink that lies in the target already leads out of it.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dsec.core.errors import NotADirectory, PathInvalid, PayloadTooLarge, ProtocolError
from dsec.wire.api import TreeResult

BLOCK: Final = 1 << 20
DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
PERMISSIONS: Final = 0o777


# --- up ---


def pack(root: Path, out: Any) -> TreeResult:
    """Write the tree below `root` as a pax archive. Symlinks stay symlinks; sockets, devices and FIFOs are
    left out."""
    entries = size = 0
    with tarfile.open(
        fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BLOCK, errors="surrogateescape"
    ) as tar:
        for path, name in _walk(root, ""):
            info = tar.gettarinfo(path, name)
            if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            seconds, nanos = divmod(os.lstat(path).st_mtime_ns, 10**9)
            info.pax_headers = {"mtime": f"{seconds}.{nanos:09}"}
            if info.isreg():
                with open(path, "rb", opener=_no_follow) as f:
                    tar.addfile(info, f)
                size += info.size
            else:
                tar.addfile(info)
            entries += 1
    return TreeResult(entries=entries, bytes=size)


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _walk(directory: Path | str, name: str) -> Iterator[tuple[str, str]]:
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda e: e.name)
    for entry in entries:
        inner = f"{name}/{entry.name}" if name else entry.name
        yield entry.path, inner
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, inner)


# --- down ---


def unpack(source: Any, root: Path, limit_bytes: int | None = None) -> TreeResult:
    """Unpack a tar stream below `root`, which is made. Raises PathInvalid, NotADirectory, PayloadTooLarge,
    OSError."""
    root.mkdir(parents=True, exist_ok=True)
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    unpacker = _Unpacker(fd, limit_bytes)
    try:
        with tarfile.open(fileobj=source, mode="r|", bufsize=BLOCK, errors="surrogateescape") as tar:
            for member in tar:
                unpacker.add(tar, member)
        unpacker.finish()
    except tarfile.TarError as e:
        raise ProtocolError(f"what the sandbox sent is no whole archive: {e}") from e
    finally:
        unpacker.close()
    return TreeResult(entries=unpacker.entries, bytes=unpacker.bytes)


class _Unpacker:
    def __init__(self, root: int, limit_bytes: int | None) -> None:
        self._root = root
        self._limit = limit_bytes
        self._parent: tuple[tuple[str, ...], int] = ((), os.dup(root))
        """The directory that was used last."""
        self._directories: list[tuple[tuple[str, ...], int, int]] = []
        """Mode and time of each, set at the end: they may forbid, and are changed by, what is put into
        them."""
        self.entries = 0
        self.bytes = 0

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = split(member.name)
        if not parts:
            return
        make = self._maker(tar, member, parts)
        if make is not None:
            make(self._open(parts[:-1], create=True), parts[-1])
            self.entries += 1

    def _maker(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: tuple[str, ...]
    ) -> Callable[[int, str], None] | None:
        if member.isdir():
            mtime_ns = _mtime_ns(member)
            self._directories.append((parts, member.mode & PERMISSIONS, mtime_ns))
            return _make_directory
        if member.isreg():
            return lambda fd, name: self._file(tar, member, fd, name)
        if member.issym():
            return lambda fd, name: _symlink(member.linkname, fd, name)
        if member.islnk():
            return lambda fd, name: self._link(split(member.linkname), fd, name)
        return None  # devices, FIFOs

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        content = tar.extractfile(member)
        assert content is not None
        _unlink(parent, name)
        fd = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
        with os.fdopen(fd, "wb", buffering=0) as f:
            while block := content.read(BLOCK):
                self.bytes += len(block)
                if self._limit is not None and self.bytes > self._limit:
                    raise PayloadTooLarge(f"the tree holds more than {self._limit} bytes")
                write_all(f.fileno(), block)
            os.fchmod(f.fileno(), member.mode & PERMISSIONS)
            mtime_ns = _mtime_ns(member)
            os.utime(f.fileno(), ns=(mtime_ns, mtime_ns))

    def _link(self, source: tuple[str, ...], parent: int, name: str) -> None:
        if not source:
            raise PathInvalid("a hard link to the tree itself")
        directory = self._walk(source[:-1], create=False)
        try:
            _unlink(parent, name)
            os.link(source[-1], name, src_dir_fd=directory, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(directory)

    def _open(self, parts: tuple[str, ...], *, create: bool) -> int:
        """A descriptor that stays open until the next call."""
        known, fd = self._parent
        if known != parts:
            new = self._walk(parts, create=create)
            os.close(fd)
            self._parent = (parts, new)
        return self._parent[1]

    def _walk(self, parts: tuple[str, ...], *, create: bool) -> int:
        fd = os.dup(self._root)
        for part in parts:
            try:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                inner = os.open(part, DIRECTORY, dir_fd=fd)
            except NotADirectoryError:
                raise NotADirectory(f"{'/'.join(parts)}: leads through what is no directory") from None
            except OSError as e:
                if e.errno == 40:  # ELOOP: a symlink
                    raise PathInvalid(f"{'/'.join(parts)}: leads through a symlink") from None
                raise
            finally:
                os.close(fd)
            fd = inner
        return fd

    def finish(self) -> None:
        for parts, mode, mtime_ns in reversed(self._directories):
            fd = self._walk(parts, create=False)
            try:
                os.fchmod(fd, mode)
                os.utime(fd, ns=(mtime_ns, mtime_ns))
            finally:
                os.close(fd)

    def close(self) -> None:
        os.close(self._parent[1])
        os.close(self._root)


def split(name: str) -> tuple[str, ...]:
    """The components of a name in an archive. Raises PathInvalid for one that would lead out."""
    parts = tuple(p for p in name.split("/") if p not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise PathInvalid(f"the archive holds {name[:200]!r}, which would lead out of the target")
    return parts


def _make_directory(parent: int, name: str) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, 0o755, dir_fd=parent)


def _symlink(target: str, parent: int, name: str) -> None:
    _unlink(parent, name)
    os.symlink(target, name, dir_fd=parent)


def _unlink(parent: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """To the nanosecond, as the archive says it: tarfile keeps a float, which holds it to 0.1 µs."""
    seconds, _, fraction = member.pax_headers.get("mtime", "").partition(".")
    if seconds.removeprefix("-").isdigit() and fraction.isdigit() and not seconds.startswith("-"):
        return int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0"))
    return int(member.mtime * 1e9)
