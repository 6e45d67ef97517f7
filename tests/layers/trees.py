"""Trees in memory, told as plain values, so that what went through an archive can be compared."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dsec.layers.archive_in import Summary, read_tar
from dsec.layers.archive_out import write_tar
from dsec.layers.directory_in import read_directory
from dsec.layers.erofs.content import read_file
from dsec.layers.erofs.data import BlobWriter
from dsec.layers.erofs.tree import Directory, File, Inode, Special, Symlink, Tree


class Made:
    """A tree with its blob and spool in memory."""

    def __init__(self) -> None:
        self.blob, self.spool = io.BytesIO(), io.BytesIO()
        self.writer = BlobWriter(self.blob, self.spool)
        self.tree = Tree(spools=[self.spool])

    def open(self, number: int) -> BinaryIO:
        assert number == 0
        return self.blob

    def read_tar(self, source: Any, **how: Any) -> Summary:
        how.setdefault("whiteouts", True)
        return read_tar(source, self.tree, self.writer, **how)

    def read_directory(self, root: Path, exclude: Callable[[bytes], bool] | None = None) -> Summary:
        return read_directory(root, self.tree, self.writer, exclude=exclude)

    def tar(self) -> bytes:
        out = io.BytesIO()
        write_tar(self.tree, out, self.open)
        return out.getvalue()

    def content(self, path: bytes) -> bytes:
        found = self.tree.lookup(path)
        assert isinstance(found, File), path
        return b"".join(read_file(self.tree, found, self.open))


def of_tar(data: bytes, **how: Any) -> Made:
    made = Made()
    made.read_tar(io.BytesIO(data), **how)
    return made


class Fact(NamedTuple):
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    first: bytes
    """The first name of the same inode."""
    body: object


def facts(made: Made) -> dict[bytes, Fact]:
    """By path, the root's being empty."""
    found: dict[bytes, Fact] = {}
    first: dict[int, bytes] = {}

    def visit(path: bytes, inode: Inode) -> None:
        name = first.setdefault(id(inode), path)
        xattrs = tuple(sorted((inode.xattrs or {}).items()))
        body = _body(made, inode)
        found[path] = Fact(inode.mode, inode.uid, inode.gid, inode.mtime_ns, xattrs, name, body)
        if isinstance(inode, Directory):
            for child in sorted(inode.children):
                visit(path + b"/" + child, inode.children[child])

    visit(b"", made.tree.root)
    return found


def _body(made: Made, inode: Inode) -> object:
    if isinstance(inode, File):
        digest = hashlib.sha256()
        for piece in read_file(made.tree, inode, made.open):
            digest.update(piece)
        return inode.size, digest.hexdigest()
    if isinstance(inode, Symlink):
        return inode.target
    return inode.rdev if isinstance(inode, Special) else None
