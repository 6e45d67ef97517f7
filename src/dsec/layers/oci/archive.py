"""Files in a directory or in a tar archive, by name, without unpacking anything.

A name is a relative path without `..`. In a directory nothing is reached through a link; in an archive a
link may lead to another member of it.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Final, Protocol, cast

from dsec.core.errors import DiskFull, InvalidArgument, LayerCorrupt, NotFound, PayloadTooLarge
from dsec.layers.decompress import DAMAGED, Decompressed
from dsec.layers.oci.streams import BUFFER, Section, read_all

MAX_MEMBERS: Final = 100_000
MAX_ARCHIVE: Final = 64 << 30
"""Bytes of an archive that is compressed as a whole, when it is not."""
MAX_NAME: Final = 4096
_MAX_HEADER: Final = 1 << 20
_MAX_LINKS: Final = 8
_HEADERS: Final = frozenset(
    {
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    }
)


class Files(Protocol):
    def open(self, name: str, what: str) -> io.RawIOBase:
        """Raises NotFound."""

    def size(self, name: str, what: str) -> int:
        """Bytes. Raises NotFound."""

    def has(self, name: str) -> bool: ...
    def close(self) -> None: ...


def read_small(files: Files, name: str, limit: int, what: str) -> bytes:
    """A whole file. Raises NotFound, PayloadTooLarge."""
    return read_all(files.open(name, what), limit, f"{what}: {name}")


class Directory:
    """Files below a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str, what: str) -> io.RawIOBase:
        path = self._path / clean(name, what)
        try:
            self._refuse_links(path)
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{what}: {name} is not there") from None
        except OSError as e:
            raise InvalidArgument(f"{what}: reading {name}: {e.strerror}") from e
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidArgument(f"{what}: {name} is no regular file")
        return io.FileIO(fd, "rb")

    def _refuse_links(self, path: Path) -> None:
        above = path.parent
        while above != self._path:
            if above.is_symlink():
                raise InvalidArgument(f"{above} is a link, which an image does not have there")
            above = above.parent

    def size(self, name: str, what: str) -> int:
        with self.open(name, what) as file:
            return os.fstat(file.fileno()).st_size

    def has(self, name: str) -> bool:
        return os.path.lexists(self._path / name)

    def close(self) -> None:
        pass


class _Strict(tarfile.TarInfo):
    """tarfile takes a damaged header for the end, and reads a header of any size into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Strict:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0 or (info.type in _HEADERS and info.size > _MAX_HEADER):
            raise tarfile.ReadError(f"a header of {info.size} bytes")
        return info

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Strict:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as e:
            raise tarfile.ReadError(f"damaged or cut short: {e}") from e


class Archive:
    """Files of a tar archive, plain or compressed as a whole. Raises InvalidArgument for a damaged one."""

    def __init__(self, path: Path, what: str) -> None:
        self._file = _plain_file(path, what)
        self._members: dict[str, tuple[int, int]] = {}
        """Offset and size."""
        self._links: dict[str, str] = {}
        try:
            self._index(what)
        except BaseException:
            self._file.close()
            raise

    def _index(self, what: str) -> None:
        try:
            with tarfile.open(fileobj=self._file, mode="r:", tarinfo=_Strict, errorlevel=2) as tar:
                while (info := tar.next()) is not None:
                    # tarfile keeps every member; a hostile archive has no end of them.
                    tar.members.clear()  # type: ignore[attr-defined]
                    self._add(info, what)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as e:
            raise InvalidArgument(f"{what}: no tar archive, or a damaged one: {e!s:.300}") from e

    def _add(self, info: tarfile.TarInfo, what: str) -> None:
        if info.isdir():
            return
        name = clean(info.name, what)
        if len(self._members) + len(self._links) >= MAX_MEMBERS:
            raise PayloadTooLarge(f"{what}: more than {MAX_MEMBERS} members")
        if info.issym():
            self._links[name] = posixpath.join(posixpath.dirname(name), info.linkname)
        elif info.islnk():
            self._links[name] = info.linkname
        elif info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.sparse is None:
            self._members[name] = (info.offset_data, info.size)
            self._links.pop(name, None)

    def _find(self, name: str, what: str) -> tuple[int, int]:
        wanted = name
        for _ in range(_MAX_LINKS):
            wanted = clean(wanted, what)
            if wanted in self._links:
                wanted = self._links[wanted]
            elif wanted in self._members:
                return self._members[wanted]
            else:
                raise NotFound(f"{what}: {name[:200]} is not in the archive")
        raise InvalidArgument(f"{what}: {name[:200]} is a link to a link without end")

    def open(self, name: str, what: str) -> io.RawIOBase:
        offset, size = self._find(name, what)
        return Section(self._file, offset, size)

    def size(self, name: str, what: str) -> int:
        return self._find(name, what)[1]

    def has(self, name: str) -> bool:
        return name in self._members or name in self._links

    def close(self) -> None:
        self._file.close()


def clean(name: str, what: str) -> str:
    """The name without `.` and empty parts. Raises InvalidArgument for one that leads outside."""
    path = posixpath.normpath(name)
    if not name or len(name) > MAX_NAME or "\0" in name or path.startswith(("/", "../")) or path == "..":
        raise InvalidArgument(f"{what}: {name[:200]!r} leads outside of the image")
    return path


def _plain_file(path: Path, what: str) -> IO[bytes]:
    """The archive itself, or a temporary file of what it holds when it is compressed as a whole."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise NotFound(f"{what}: opening {path}: {e.strerror}") from e
    with open(fd, "rb") as raw:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidArgument(f"{what}: {path} is no regular file")
        header = raw.peek(512)[:512]
        if header[257:262] == b"ustar":
            file = open(os.dup(fd), "rb")  # noqa: SIM115
            file.seek(0)
            return file
        return _spooled(Decompressed(raw, limit=MAX_ARCHIVE), what)


def _spooled(stream: Decompressed, what: str) -> IO[bytes]:
    file = cast("IO[bytes]", tempfile.TemporaryFile())  # noqa: SIM115
    try:
        while piece := stream.read(BUFFER):
            file.write(piece)
        file.seek(0)
        return file
    except PayloadTooLarge as e:
        file.close()
        raise PayloadTooLarge(f"{what}: {e.message}") from e
    except DAMAGED as e:
        file.close()
        if isinstance(e, OSError) and e.errno in (28, 122):
            raise DiskFull(f"{what}: decompressing it to {tempfile.gettempdir()}: {e.strerror}") from e
        if isinstance(e, OSError) and e.errno is not None:
            raise
        raise LayerCorrupt(f"{what}: damaged or cut short: {e!s:.300}") from e
