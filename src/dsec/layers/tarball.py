"""Tar archives, unpacked as if every one were hostile.

Names are relative and without `..`; no entry is reached through a symbolic link; whatever is odd is refused
with the entry's name, and nothing outside the given directory is ever touched. OCI whiteouts (`.wh.NAME`,
`.wh..wh..opq`) become an overlay's own: a character device 0:0, trusted.overlay.opaque.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any, Final, cast

from dsec.core.errors import InvalidArgument
from dsec.layers.decompress import plain

MAX_ENTRIES: Final = 20_000_000
MAX_FILE: Final = 1 << 44
MAX_HEADER: Final = 1 << 20
MAX_TRAILER: Final = 64 << 20
MAX_PATH: Final = 3072
MAX_LINK: Final = 4095
_MAX_TIME: Final = 1 << 33
_XATTR: Final = "SCHILY.xattr."
_CHUNK: Final = 1 << 20
_HEADERS: Final = frozenset(
    {
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    }
)
_FILES: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE})
_NODES: Final = {tarfile.CHRTYPE: stat.S_IFCHR, tarfile.BLKTYPE: stat.S_IFBLK, tarfile.FIFOTYPE: stat.S_IFIFO}
OPAQUE: Final = ("trusted.overlay.opaque", b"y")


class BadEntry(Exception):
    """Why an entry is refused."""


class _Strict(tarfile.TarInfo):
    """tarfile takes a damaged header for the end, and reads a header of any size into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Strict:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0 or info.size > MAX_FILE:
            raise BadEntry(f"a size of {info.size} bytes")
        if info.type in _HEADERS and info.size > MAX_HEADER:
            raise BadEntry(f"an extended header of {info.size} bytes")
        return info

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Strict:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as e:
            raise BadEntry(f"the archive is damaged or cut short here: {e}") from e


def unpack(
    archive: Path, root: Path, *, whiteouts: bool, progress: Callable[[int], None] | None = None
) -> None:
    """Unpacks `archive` into the empty directory `root`.

    whiteouts: false for a base, below which is nothing to hide, so that they are left out. Raises
    InvalidArgument with the name of the entry that is at fault.
    """
    name = ""
    try:
        with plain(archive) as stream, contextlib.closing(_Unpacker(root, whiteouts)) as unpacker:
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Strict, errorlevel=2) as tar:
                for count, info in enumerate(_members(tar)):
                    name = info.name
                    if count >= MAX_ENTRIES:
                        raise BadEntry(f"more than {MAX_ENTRIES} entries")
                    unpacker.add(tar, info)
                    if progress:
                        progress(tar.offset)
            _drain(stream)
            unpacker.finish()
    except BadEntry as e:
        raise _refused(archive, name, str(e)) from e
    except (
        tarfile.TarError,
        EOFError,
        zlib.error,
        LZMAError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as e:
        raise _refused(archive, name, f"the archive is damaged or cut short here: {e}") from e
    except OSError as e:
        if e.errno is None:  # gzip and bz2: a bad checksum, a bad stream
            raise _refused(archive, name, f"the archive is damaged: {e}") from e
        raise


def _refused(archive: Path, name: str, why: str) -> InvalidArgument:
    shown = name.encode(errors="replace").decode()[:300]
    return InvalidArgument(f"{archive}: entry {shown!r}: {why}", entry=shown)


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (info := tar.next()) is not None:
        # tarfile keeps every member of the archive; a hostile one has no end.
        tar.members.clear()  # type: ignore[attr-defined]
        yield info


def _drain(stream: IO[bytes]) -> None:
    """To the end, so that the checksum of a compressed archive is looked at."""
    rest = 0
    while data := stream.read(_CHUNK):
        rest += len(data)
        if rest > MAX_TRAILER:
            raise BadEntry("the archive goes on after its end")


class _Unpacker:
    def __init__(self, root: Path, whiteouts: bool) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._whiteouts = whiteouts
        self._times: dict[tuple[str, ...], int] = {(): 0}
        """Of directories, set at the end: adding to one changes it."""
        self._hidden: set[tuple[str, ...]] = set()
        self._opaque: set[tuple[str, ...]] = set()
        self._near: tuple[tuple[str, ...], int] = ((), os.dup(self._root))
        """The directory used last: entries of one lie together."""
        os.fchmod(self._root, 0o755)

    def close(self) -> None:
        os.close(self._root)
        os.close(self._near[1])

    def add(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        parts = _parts(info.name)
        if parts and parts[-1].startswith(".wh."):
            self._note_whiteout(parts)
            return
        if not parts:
            if info.type != tarfile.DIRTYPE:
                raise BadEntry("it stands where the root is, and is no directory")
            self._dress(self._root, ".", info, stat.S_IFDIR)
            self._times[()] = _mtime(info)
            return
        parent = self._directory(parts[:-1])
        self._make(tar, info, parts, parent)

    def _make(self, tar: tarfile.TarFile, info: tarfile.TarInfo, parts: tuple[str, ...], parent: int) -> None:
        name = parts[-1]
        if info.type == tarfile.DIRTYPE:
            self._clear(parts, parent, keep_directory=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
            self._times[parts] = _mtime(info)
            self._dress(parent, name, info, stat.S_IFDIR)
            return
        if info.type == tarfile.LNKTYPE:
            self._link(info, parts, parent)
            return
        self._clear(parts, parent)
        if info.type in _FILES or info.sparse is not None:
            self._write(tar, info, name, parent)
            kind = stat.S_IFREG
        elif info.type == tarfile.SYMTYPE:
            _check_text(info.linkname, MAX_LINK)
            os.symlink(info.linkname, name, dir_fd=parent)
            kind = stat.S_IFLNK
        elif info.type in _NODES:
            kind = _NODES[info.type]
            os.mknod(name, kind | 0o600, _device(info), dir_fd=parent)
        else:
            raise BadEntry(f"a type {info.type!r} that layers do not have")
        self._dress(parent, name, info, kind)
        os.utime(name, ns=(_mtime(info),) * 2, dir_fd=parent, follow_symlinks=False)

    def _directory(self, parts: tuple[str, ...]) -> int:
        """A descriptor of it, made where it is missing. Never through a link."""
        if self._near[0] == parts:
            return self._near[1]
        fd = os.dup(self._root)
        try:
            for depth, part in enumerate(parts, 1):
                below = self._step(fd, part, parts[:depth])
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        os.close(self._near[1])
        self._near = (parts, fd)
        return fd

    def _step(self, fd: int, part: str, path: tuple[str, ...]) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(part, flags, dir_fd=fd)
        except FileNotFoundError:
            os.mkdir(part, 0o755, dir_fd=fd)
            self._times[path] = 0
            return os.open(part, flags, dir_fd=fd)
        except NotADirectoryError as e:
            raise BadEntry(f"its path leads through {'/'.join(path)!r}, which is no directory") from e

    def _clear(self, parts: tuple[str, ...], parent: int, *, keep_directory: bool = False) -> None:
        """A later entry replaces an earlier one of its name."""
        try:
            mode = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            os.unlink(parts[-1], dir_fd=parent)
        elif not keep_directory:
            self._forget(parts)
            _remove_tree(parent, parts[-1])

    def _forget(self, parts: tuple[str, ...]) -> None:
        for known in [k for k in self._times if k[: len(parts)] == parts]:
            del self._times[known]

    def _link(self, info: tarfile.TarInfo, parts: tuple[str, ...], parent: int) -> None:
        target = _parts(info.linkname)
        if not target or target == parts:
            raise BadEntry(f"a hard link to {info.linkname!r}")
        keep = os.dup(parent)
        try:
            source = self._directory(target[:-1])
            try:
                mode = os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode
            except FileNotFoundError:
                raise BadEntry(
                    f"a hard link to {info.linkname!r}, which is not in the archive before it"
                ) from None
            if stat.S_ISDIR(mode):
                raise BadEntry(f"a hard link to {info.linkname!r}, a directory")
            self._clear(parts, keep)
            try:
                os.link(target[-1], parts[-1], src_dir_fd=source, dst_dir_fd=keep, follow_symlinks=False)
            except FileNotFoundError:
                raise BadEntry(f"a hard link to {info.linkname!r}, which it replaces") from None
        finally:
            os.close(keep)

    def _write(self, tar: tarfile.TarFile, info: tarfile.TarInfo, name: str, parent: int) -> None:
        runs = _runs(info)
        fd = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        with open(fd, "wb", buffering=0) as out:
            source: Any = tar.fileobj
            source.seek(info.offset_data)
            for offset, size in runs:
                out.seek(offset)
                _copy(source, out, size)
            out.truncate(info.size)

    def _dress(self, parent: int, name: str, info: tarfile.TarInfo, kind: int) -> None:
        """Owner, then mode (which a change of owner strips of setuid), then attributes (of capabilities)."""
        for number in (info.uid, info.gid):
            if not 0 <= number < (1 << 32) - 1:
                raise BadEntry(f"an owner {number}")
        os.chown(name, info.uid, info.gid, dir_fd=parent, follow_symlinks=False)
        if kind != stat.S_IFLNK:
            os.chmod(name, info.mode & 0o7777, dir_fd=parent)
        path = f"/proc/self/fd/{parent}/{name}"
        for key, value in info.pax_headers.items():
            if key.startswith(_XATTR):
                self._set_xattr(path, key.removeprefix(_XATTR), value)

    def _set_xattr(self, path: str, key: str, value: str) -> None:
        if key.startswith("trusted."):
            raise BadEntry(f"an attribute {key}: what an overlay obeys cannot come from an archive")
        if key == "security.selinux":
            return  # a label of the host where it was packed
        try:
            os.setxattr(path, key, value.encode("utf-8", "surrogateescape"), follow_symlinks=False)
        except OSError as e:
            if e.errno is not None and e.errno in _FULL:
                raise
            raise BadEntry(f"an attribute {key!r}, which cannot be kept here: {e.strerror}") from e

    def _note_whiteout(self, parts: tuple[str, ...]) -> None:
        hidden = parts[-1].removeprefix(".wh.")
        if hidden == ".wh..opq":
            self._directory(parts[:-1])
            self._opaque.add(parts[:-1])
        elif hidden.startswith(".wh."):
            pass  # bookkeeping of AUFS, which hides nothing
        elif hidden in ("", ".", ".."):
            raise BadEntry("a whiteout of nothing")
        else:
            self._hidden.add((*parts[:-1], hidden))

    def finish(self) -> None:
        """Whiteouts hide what lies below, never what this archive holds; then the times of directories."""
        if self._whiteouts:
            for parts in sorted(self._hidden):
                self._white_out(parts)
            for parts in sorted(self._opaque):
                self._set_opaque(parts)
        for parts, time in sorted(self._times.items(), reverse=True):
            fd = self._directory(parts)
            os.utime(fd, ns=(time, time))

    def _white_out(self, parts: tuple[str, ...]) -> None:
        if any(parts[:depth] in self._opaque for depth in range(len(parts))):
            return  # hidden already, and a device there would be seen
        parent = self._directory(parts[:-1])
        try:
            mode = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            os.mknod(parts[-1], stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
            os.utime(parts[-1], ns=(0, 0), dir_fd=parent, follow_symlinks=False)
            return
        if stat.S_ISDIR(mode):
            self._opaque.add(parts)

    def _set_opaque(self, parts: tuple[str, ...]) -> None:
        os.setxattr(self._directory(parts), *OPAQUE)


_FULL: Final = frozenset({28, 122})  # ENOSPC, EDQUOT


def _parts(name: str) -> tuple[str, ...]:
    _check_text(name)
    if name.startswith("/"):
        raise BadEntry("an absolute name")
    parts = tuple(p for p in name.split("/") if p not in ("", "."))
    if ".." in parts:
        raise BadEntry("a name with '..'")
    if any(len(os.fsencode(p)) > 255 for p in parts):
        raise BadEntry("a name of more than 255 bytes")
    return parts


def _check_text(text: str, limit: int = MAX_PATH) -> None:
    if not text or "\0" in text:
        raise BadEntry("an empty name, or one with a NUL")
    if len(os.fsencode(text)) > limit:
        raise BadEntry(f"a path of more than {limit} bytes")


def _mtime(info: tarfile.TarInfo) -> int:
    """Nanoseconds, within what filesystems hold. tarfile's own number is a float, which loses some."""
    try:
        seconds = Decimal(info.pax_headers.get("mtime", "") or repr(float(info.mtime)))
        value = float(seconds)
    except (InvalidOperation, OverflowError) as e:
        raise BadEntry("a time that is no number") from e
    if not math.isfinite(value):
        raise BadEntry("a time that is no number")
    return int(min(max(seconds, Decimal(0)), Decimal(_MAX_TIME)) * 10**9)


def _device(info: tarfile.TarInfo) -> int:
    if not (0 <= info.devmajor < 1 << 12 and 0 <= info.devminor < 1 << 20):
        raise BadEntry(f"a device {info.devmajor}:{info.devminor}")
    return os.makedev(info.devmajor, info.devminor)


def _runs(info: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Where data lies in the file: (offset, size) in order."""
    if not 0 <= info.size <= MAX_FILE:
        raise BadEntry(f"a size of {info.size} bytes")
    if info.sparse is None:
        return [(0, info.size)]
    runs = [run for run in cast("list[tuple[int, int]]", info.sparse) if run[1]]
    end = 0
    for offset, size in runs:
        if offset < end or size < 0 or offset + size > info.size:
            raise BadEntry("a map of holes that is out of order or beyond its end")
        end = offset + size
    return runs


def _copy(source: IO[bytes], out: IO[bytes], size: int) -> None:
    while size:
        data = source.read(min(size, _CHUNK))
        if not data:
            raise BadEntry("the archive ends inside it")
        out.write(data)
        size -= len(data)


def _remove_tree(parent: int, name: str) -> None:
    import shutil

    shutil.rmtree(name, dir_fd=parent)
