"""A tree as a pax tar stream: the same tree gives the same bytes, and memory does not grow with the data."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final, Literal, Protocol

from dsec.core.errors import InvalidArgument
from dsec.layers.erofs.content import OpenBlob, data_runs, read_runs
from dsec.layers.erofs.data import Run
from dsec.layers.erofs.tree import (
    HOLE,
    OPAQUE,
    Directory,
    File,
    Inode,
    Special,
    Symlink,
    Tree,
    is_opaque,
    is_whiteout,
)

_BLOCK: Final = 512
_END: Final = bytes(2 * _BLOCK)
_MAX_OCTAL: Final = 0o7777777
_MAX_SIZE: Final = 0o77777777777
_SECOND: Final = 10**9
_TYPES: Final = {
    stat.S_IFREG: b"0",
    stat.S_IFLNK: b"2",
    stat.S_IFCHR: b"3",
    stat.S_IFBLK: b"4",
    stat.S_IFDIR: b"5",
    stat.S_IFIFO: b"6",
}
Records = dict[bytes, bytes]


class Writer(Protocol):
    def write(self, data: bytes, /) -> object: ...


def write_tar(tree: Tree, out: Writer, open_blob: OpenBlob, *, whiteouts: Literal["oci"] = "oci") -> None:
    """Writes `tree` to `out`, which stays open. Sets `nlink` of every inode.

    Files with holes are GNU sparse files (1.0), attributes SCHILY.xattr; sockets are left out, as by other
    tars. Raises InvalidArgument, with the path, for a name that would be read back as a whiteout; as
    `read_file`; and what `out` raises.
    """
    tree.count_links()
    _Out(tree, out, open_blob).run()


class _Out:
    def __init__(self, tree: Tree, out: Writer, open_blob: OpenBlob) -> None:
        self._tree = tree
        self._out = out
        self._open = open_blob
        self._first: dict[int, bytes] = {}
        """The first name of an inode that has several."""

    def run(self) -> None:
        self._entry(b"./", self._tree.root)
        for path, inode in _walk(self._tree.root):
            self._entry(path, inode)
        self._out.write(_END)

    def _entry(self, path: bytes, inode: Inode) -> None:
        name = path.rstrip(b"/").rpartition(b"/")[2]
        if name.startswith(b".wh."):
            raise InvalidArgument(f"writing a layer as tar: {path[:300]!r} would be read as a whiteout")
        if is_whiteout(inode):
            self._empty(path[: len(path) - len(name)] + b".wh." + name)
        elif (first := self._first.get(id(inode))) is not None:
            self._header(path, inode, b"1", link=first)
        elif not stat.S_ISSOCK(inode.mode):
            if inode.nlink > 1 and not isinstance(inode, Directory):
                self._first[id(inode)] = path
            self._inode(path, inode)

    def _inode(self, path: bytes, inode: Inode) -> None:
        kind = _TYPES[stat.S_IFMT(inode.mode)]
        if isinstance(inode, File):
            self._file(path, inode)
        elif isinstance(inode, Symlink):
            self._header(path, inode, kind, link=inode.target, records=_xattrs(path, inode))
        else:
            self._header(path, inode, kind, records=_xattrs(path, inode))
            if is_opaque(inode):
                self._empty(path + b".wh..wh..opq")

    def _empty(self, path: bytes) -> None:
        self._header(path, File(stat.S_IFREG), b"0")

    def _file(self, path: bytes, inode: File) -> None:
        records = _xattrs(path, inode)
        if any(extent.blob == HOLE for extent in inode.extents):
            self._sparse(path, inode, records)
            return
        self._header(path, inode, b"0", size=inode.size, records=records)
        self._data(read_runs(self._tree, inode, self._open), inode.size)

    def _sparse(self, path: bytes, inode: File, records: Records) -> None:
        runs = data_runs(inode)
        table = _map(runs, inode.size)
        records |= {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0"}
        records |= {b"GNU.sparse.name": path, b"GNU.sparse.realsize": b"%d" % inode.size}
        stored = sum(length for _, length in runs)
        above, _, name = path.rpartition(b"/")
        shown = (above + b"/" if above else b"") + b"GNUSparseFile.0/" + name
        self._header(shown, inode, b"0", size=len(table) + stored, records=records)
        self._out.write(table)
        self._data(read_runs(self._tree, inode, self._open), stored)

    def _data(self, pieces: Iterator[bytes], size: int) -> None:
        for piece in pieces:
            self._out.write(piece)
        if size % _BLOCK:
            self._out.write(bytes(-size % _BLOCK))

    def _header(
        self,
        path: bytes,
        inode: Inode,
        kind: bytes,
        *,
        link: bytes = b"",
        size: int = 0,
        records: Records | None = None,
    ) -> None:
        records = dict(records or {})
        fields = _fields(path, inode, link, size, records)
        if records:
            data = b"".join(_record(key, records[key]) for key in sorted(records))
            head = _Fields(b"PaxHeaders/" + path[:80], 0o644, 0, 0, len(data), 0, b"")
            self._out.write(head.block(b"x", 0) + data + bytes(-len(data) % _BLOCK))
        self._out.write(fields.block(kind, inode.rdev if isinstance(inode, Special) else 0))


class _Fields:
    """What fits in a ustar header."""

    def __init__(
        self, name: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, link: bytes
    ) -> None:
        self._start = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0" % (
            name[:100].ljust(100, b"\0"),
            mode,
            uid,
            gid,
            size,
            mtime,
        )
        self._link = link[:100].ljust(100, b"\0")

    def block(self, kind: bytes, rdev: int) -> bytes:
        device = b"%07o\0%07o\0" % (os.major(rdev), os.minor(rdev))
        end = kind + self._link + b"ustar\00000" + bytes(64) + device
        block = (self._start + b" " * 8 + end).ljust(_BLOCK, b"\0")
        return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _fields(path: bytes, inode: Inode, link: bytes, size: int, records: Records) -> _Fields:
    """What does not fit goes to `records`."""
    if len(path) > 100:
        records[b"path"] = path
    if len(link) > 100:
        records[b"linkpath"] = link
    if any(not _is_utf8(records.get(key, b"")) for key in (b"path", b"linkpath", b"GNU.sparse.name")):
        records[b"hdrcharset"] = b"BINARY"
    seconds, ns = divmod(inode.mtime_ns, _SECOND)
    if ns or not 0 <= seconds <= _MAX_SIZE:
        records[b"mtime"] = (b"%d.%09d" % (seconds, ns)) if ns else b"%d" % seconds
    uid = _number(b"uid", inode.uid, _MAX_OCTAL, records)
    gid = _number(b"gid", inode.gid, _MAX_OCTAL, records)
    size = _number(b"size", size, _MAX_SIZE, records)
    return _Fields(path, inode.mode & 0o7777, uid, gid, size, min(max(seconds, 0), _MAX_SIZE), link)


def _number(key: bytes, value: int, limit: int, records: Records) -> int:
    if value <= limit:
        return value
    records[key] = b"%d" % value
    return 0


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _record(key: bytes, value: bytes) -> bytes:
    """Its length counts itself."""
    rest = b" %b=%b\n" % (key, value)
    size = len(rest)
    while len(b"%d" % size) + len(rest) != size:
        size = len(b"%d" % size) + len(rest)
    return b"%d" % size + rest


def _xattrs(path: bytes, inode: Inode) -> Records:
    found = {}
    for name, value in (inode.xattrs or {}).items():
        if b"=" in name:
            raise InvalidArgument(f"writing a layer as tar: {path[:300]!r}: an attribute {name!r} with '='")
        if name != OPAQUE:
            found[b"SCHILY.xattr." + name] = value
    return found


def _map(runs: list[Run], size: int) -> bytes:
    if not runs or sum(runs[-1]) < size:
        runs = [*runs, (size, 0)]
    lines = [b"%d\n" % len(runs), *(b"%d\n%d\n" % run for run in runs)]
    table = b"".join(lines)
    return table + bytes(-len(table) % _BLOCK)


def _walk(root: Directory) -> Iterator[tuple[bytes, Inode]]:
    """All below it by path, each directory, with a slash behind its name, before what it holds."""
    waiting = [(b"", iter(sorted(root.children.items())))]
    while waiting:
        above, rest = waiting[-1]
        found = next(rest, None)
        if found is None:
            waiting.pop()
            continue
        name, inode = found
        if isinstance(inode, Directory):
            yield above + name + b"/", inode
            waiting.append((above + name + b"/", iter(sorted(inode.children.items()))))
        else:
            yield above + name, inode
