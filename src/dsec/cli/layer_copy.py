"""COPY and ADD as a layer, made without a sandbox: files of the context, or of other layers, in a tree."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import stat
import threading
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final, NamedTuple

from dsec.core.errors import InvalidArgument
from dsec.layers.archive_in import read_tar
from dsec.layers.assemble import Assembly
from dsec.layers.decompress import plain
from dsec.layers.directory_in import read_directory
from dsec.layers.dockerfile import ignore
from dsec.layers.dockerfile.copying import MAX_LINKS, Copy, Elsewhere, Local, Text, place
from dsec.layers.dockerfile.faults import At, shown
from dsec.layers.erofs.content import read_file
from dsec.layers.erofs.merge import drop_whiteouts, merge
from dsec.layers.erofs.tree import (
    HOLE,
    Blob,
    Directory,
    File,
    Inode,
    Span,
    Special,
    Symlink,
    Tree,
    is_whiteout,
)
from dsec.layers.stack import read_layer
from dsec.layers.store import LayerStore

MAX_PASSWD: Final = 4 << 20
_TAR: Final = slice(257, 262)
Parts = tuple[bytes, ...]


class View:
    """A stack of layers as one tree. To be closed."""

    def __init__(self, store: LayerStore, layers: Sequence[str]) -> None:
        self._store = store
        self._held = contextlib.ExitStack()
        self._open: dict[str, BinaryIO] = {}
        self.layers: tuple[str, ...] = ()
        self.tree = Tree()
        try:
            self.extend(layers)
        except BaseException:
            self.close()
            raise

    def extend(self, layers: Sequence[str]) -> None:
        """More layers on top."""
        for digest in layers:
            upper = read_layer(self._store, self._store.find(digest), self._held)
            self.tree = merge(self.tree, upper, keep_whiteouts=True)
        drop_whiteouts(self.tree)
        self.layers = (*self.layers, *layers)

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, parts: Parts) -> Inode | None:
        here: Inode | None = self.tree.root
        for name in parts:
            here = here.children.get(name) if isinstance(here, Directory) else None
        return here

    def resolved(self, parts: Parts) -> Parts:
        """With symbolic links followed, the last one's too; what is missing stays as it is named."""
        done: list[bytes] = []
        waiting = list(reversed(parts))
        links = 0
        while waiting:
            name = waiting.pop()
            if name == b"..":
                done = done[:-1]
                continue
            found = self.find((*done, name))
            if not isinstance(found, Symlink):
                done.append(name)
                continue
            links += 1
            if links > MAX_LINKS:
                raise InvalidArgument(f"{_path(parts)}: more than {MAX_LINKS} symbolic links on the way")
            done = [] if found.target.startswith(b"/") else done
            waiting += [p for p in reversed(found.target.split(b"/")) if p not in (b"", b".")]
        return tuple(done)

    def is_directory(self, path: str) -> bool:
        parts = tuple(p for p in path.encode("utf-8", "surrogateescape").split(b"/") if p)
        return isinstance(self.find(self.resolved(parts)), Directory)

    def matches(self, pattern: str) -> list[Parts]:
        """In the order of their names. Raises InvalidArgument when there are none."""
        at = At(f"/{pattern}", 1)
        found: list[Parts] = [()]
        for word in [word for word in pattern.split("/") if word]:
            (segment,) = ignore.compile_pattern(word, at)
            if segment is None:
                raise InvalidArgument(f"/{pattern}: '**' is not supported here: name the directory")
            if ignore.is_pattern(word):
                found = [(*p, name) for p in found for name in self._names(p) if segment.match(_text(name))]
            else:
                found = [(*parts, word.encode("utf-8", "surrogateescape")) for parts in found]
        found = [parts for parts in found if self.find(self.resolved(parts)) is not None]
        if not found:
            raise InvalidArgument(f"/{pattern}: there is no such file in the stage: look at what it makes")
        return found

    def _names(self, parts: Parts) -> list[bytes]:
        here = self.find(self.resolved(parts))
        return sorted(here.children) if isinstance(here, Directory) else []

    def read(self, file: File) -> Iterator[bytes]:
        return read_file(self.tree, file, lambda number: self.blob(self.tree.blobs[number]))

    def blob(self, blob: Blob) -> BinaryIO:
        if blob.digest not in self._open:
            path = self._store.blob(blob.digest)
            path = path if path.exists() else self._store.file(blob.digest)
            self._open[blob.digest] = self._held.enter_context(path.open("rb"))
        return self._open[blob.digest]

    def is_shared(self, file: File) -> bool:
        """Whether another layer can refer to its data: it lies in blobs, not in an image."""
        used = {e.blob for e in file.extents if e.blob != HOLE}
        return all(self._store.blob(self.tree.blobs[n].digest).exists() for n in used)


class LastView:
    """Keeps the view that was used last: the next COPY mostly needs it with a layer more."""

    def __init__(self, store: LayerStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._view: View | None = None

    @contextlib.contextmanager
    def of(self, layers: Sequence[str]) -> Iterator[View]:
        """One thread at a time has it."""
        with self._lock:
            view, self._view = self._view, None
            if view is not None and view.layers != tuple(layers[: len(view.layers)]):
                view.close()
                view = None
            view = view or View(self._store, ())
            try:
                view.extend(layers[len(view.layers) :])
                yield view
            except BaseException:
                view.close()
                raise
            self._view = view

    def close(self) -> None:
        with self._lock:
            if self._view is not None:
                self._view.close()
                self._view = None


class Owner(NamedTuple):
    uid: int
    gid: int


def owner_of(view: View, chown: str) -> Owner:
    """Names by the stack's /etc/passwd and /etc/group. Raises InvalidArgument for one that is not there."""
    user, _, group = chown.partition(":")
    if user.isdigit():
        found = Owner(int(user), int(user))
    else:
        fields = _entry(view, "passwd", user)
        found = Owner(int(fields[2]), int(fields[3]))
    if group:
        gid = int(group) if group.isdigit() else int(_entry(view, "group", group)[2])
        found = found._replace(gid=gid)
    if max(found) > 0xFFFF_FFFE:
        raise InvalidArgument(f"--chown={chown}: the number is too large")
    return found


def _entry(view: View, table: str, name: str) -> list[str]:
    file = view.find(view.resolved((b"etc", table.encode())))
    if isinstance(file, File) and file.size <= MAX_PASSWD:
        for line in b"".join(view.read(file)).decode(errors="replace").splitlines():
            fields = line.split(":")
            if (
                fields[0] == name
                and len(fields) > 3
                and all(f.isdigit() for f in fields[2 : 4 - (table == "group")])
            ):
                return fields
    raise InvalidArgument(f"--chown: no {shown(name)} in /etc/{table} of the stage: use a number")


class Placer:
    """Puts one COPY's sources into a layer that lies on `below`."""

    def __init__(self, store: LayerStore, request: Copy, below: View, into: Assembly) -> None:
        self._store = store
        self._request = request
        self._below = below
        self._into = into
        self._owner = owner_of(below, request.chown) if request.chown else None
        self._mode = int(request.chmod, 8) if request.chmod else None

    def run(self) -> None:
        """Raises InvalidArgument, LayerCorrupt."""
        if not self._request.sources:
            self._directory(self._target(self._request.destination))
        for source in self._request.sources:
            if isinstance(source, Text):
                self._text(source)
            elif isinstance(source, Local):
                self._local(source)
            else:
                self._elsewhere(source)

    def _text(self, source: Text) -> None:
        data = source.body.encode("utf-8", "surrogateescape")
        extents, tail = self._into.blob.add(io.BytesIO(data), len(data))
        made = File(stat.S_IFREG | 0o644, size=len(data), extents=extents, tail=tail)
        self._put(source.name.encode(), made, Owner(0, 0))

    def _local(self, source: Local) -> None:
        if self._request.is_add and not source.is_directory and _is_tar(source):
            self._unpack(source)
        elif source.is_directory:
            tree = Tree(blobs=self._into.tree.blobs, spools=self._into.tree.spools)
            read_directory(source.path, tree, self._into.blob, exclude=lambda p: source.leaves_out(_text(p)))
            self._put(b"", tree.root, Owner(0, 0))
        else:
            tree = Tree(blobs=self._into.tree.blobs, spools=self._into.tree.spools)
            name = source.path.name.encode("utf-8", "surrogateescape")
            read_directory(source.path.parent, tree, self._into.blob, exclude=lambda path: path != name)
            if name not in tree.root.children:
                raise InvalidArgument(f"{source.path}: it vanished while it was read")
            self._put(source.name.encode("utf-8", "surrogateescape"), tree.root.children[name], Owner(0, 0))

    def _unpack(self, source: Local) -> None:
        tree = Tree(blobs=self._into.tree.blobs, spools=self._into.tree.spools)
        with plain(source.path) as stream:
            read_tar(stream, tree, self._into.blob, whiteouts=False)
        self._put(b"", tree.root, None)

    def _elsewhere(self, source: Elsewhere) -> None:
        with View(self._store, source.layers) as view:
            for pattern in source.patterns:
                for parts in view.matches(pattern):
                    found = view.find(view.resolved(parts))
                    assert found is not None
                    borrowed = Borrower(view, self._into).take(found)
                    self._put(parts[-1] if parts else b"", borrowed, None)

    # Where it goes

    def _target(self, path: str) -> Parts:
        """Symbolic links below are followed, as a program that writes there would."""
        parts = tuple(p for p in path.encode("utf-8", "surrogateescape").split(b"/") if p)
        return self._below.resolved(parts)

    def _put(self, name: bytes, inode: Inode, owner: Owner | None) -> None:
        """owner: who has it when no --chown says so; None: who had it."""
        self._dress(inode, self._owner or owner)
        to = self._request.destination
        is_there = isinstance(self._now(self._target(to)), Directory)
        is_directory = isinstance(inode, Directory)
        where = place(_text(name), is_directory=is_directory, destination=to, is_there=is_there)
        parts = self._target(where)
        if isinstance(inode, Directory):
            self._merge(self._directory(parts, inode), parts, inode)
        elif not parts:
            raise InvalidArgument(f"{where}: a file cannot take the place of the root")
        else:
            self._enter(self._directory(parts[:-1]), parts, inode)

    def _now(self, parts: Parts) -> Inode | None:
        """What has the path, with this layer."""
        return self._into.tree.lookup(b"/".join(parts)) or self._below.find(parts)

    def _directory(self, parts: Parts, like: Directory | None = None) -> Directory:
        """In this layer, made with its parents as they are below, or new ones. like: what the last one is."""
        here = self._into.tree.root
        _like(here, self._below.tree.root)
        for depth, name in enumerate(parts, 1):
            found = here.children.get(name)
            if found is None:
                last = like if depth == len(parts) else None
                found = here.children[name] = self._made(parts[:depth], last)
            if not isinstance(found, Directory):
                raise InvalidArgument(f"{_path(parts[:depth])} is no directory: choose another destination")
            here = found
        return here

    def _made(self, parts: Parts, like: Directory | None) -> Inode:
        below = self._below.find(parts)
        if below is not None and not isinstance(below, Directory):
            raise InvalidArgument(f"{_path(parts)} is no directory: choose another destination")
        made = Directory(stat.S_IFDIR | 0o755)
        if below or like:
            _like(made, below or like)
        else:
            made.uid, made.gid = self._owner or (0, 0)
        return made

    def _merge(self, into: Directory, parts: Parts, source: Directory) -> None:
        waiting = [(into, parts, source)]
        while waiting:
            into, parts, source = waiting.pop()
            for name, child in source.children.items():
                path = (*parts, name)
                if isinstance(child, Directory):
                    waiting.append((self._directory(path, child), path, child))
                else:
                    self._enter(into, path, child)

    def _enter(self, directory: Directory, parts: Parts, inode: Inode) -> None:
        if isinstance(self._now(parts), Directory):
            raise InvalidArgument(f"{_path(parts)} is a directory, and a file is to be put there")
        directory.children[parts[-1]] = inode

    def _dress(self, top: Inode, owner: Owner | None) -> None:
        waiting = [top]
        while waiting:
            inode = waiting.pop()
            if is_whiteout(inode):
                raise InvalidArgument("a device 0:0 would hide files: take it out of what is copied")
            if owner:
                inode.uid, inode.gid = owner
            if self._mode is not None and not isinstance(inode, Symlink):
                inode.mode = stat.S_IFMT(inode.mode) | self._mode
            if isinstance(inode, Directory):
                waiting += inode.children.values()


class Borrower:
    """Inodes of other layers as inodes of the one in the making: they refer to the same blobs."""

    def __init__(self, view: View, into: Assembly) -> None:
        self._view = view
        self._into = into
        self._known: dict[int, Inode] = {}

    def take(self, inode: Inode) -> Inode:
        if id(inode) not in self._known:
            self._known[id(inode)] = self._taken(inode)
        return self._known[id(inode)]

    def _taken(self, inode: Inode) -> Inode:
        if isinstance(inode, File):
            return self._file(inode)
        made = copy.copy(inode)
        waiting = [made]
        while waiting:
            here = waiting.pop()
            if isinstance(here, Directory):
                here.children = {n: self._leaf(c) for n, c in here.children.items()}
                waiting += [c for c in here.children.values() if isinstance(c, Directory)]
        return made

    def _leaf(self, inode: Inode) -> Inode:
        return copy.copy(inode) if isinstance(inode, Directory) else self.take(inode)

    def _file(self, file: File) -> File:
        made = copy.copy(file)
        if not self._view.is_shared(file):
            made.extents, made.tail = self._into.blob.add(_Pieces(self._view.read(file)), file.size)
            return made
        tree = self._view.tree
        made.extents = tuple(
            e if e.blob == HOLE else e._replace(blob=self._place(tree.blobs[e.blob])) for e in file.extents
        )
        made.tail = tree.read_tail(file.tail) if isinstance(file.tail, Span) else file.tail
        return made

    def _place(self, blob: Blob) -> int:
        blobs = self._into.tree.blobs
        if blob not in blobs:
            blobs.append(blob)
        return blobs.index(blob)


class _Pieces:
    """A file's pieces, to be read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def read(self, size: int, /) -> bytes:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._left = piece
        data, self._left = self._left[:size], self._left[size:]
        return data


def survey(store: LayerStore, layers: Sequence[str], patterns: Sequence[str]) -> str:
    """A digest of what patterns match: names, modes, owners, contents. Raises InvalidArgument."""
    digest = hashlib.sha256()
    with View(store, layers) as view:
        for pattern in patterns:
            for parts in view.matches(pattern):
                found = view.find(view.resolved(parts))
                assert found is not None
                digest.update(b"match %d\n%s" % (len(parts[-1:]), b"".join(parts[-1:])))
                _survey(view, found, digest)
    return digest.hexdigest()


def _survey(view: View, top: Inode, digest: hashlib._Hash) -> None:
    waiting: list[tuple[bytes, Inode]] = [(b"", top)]
    while waiting:
        path, inode = waiting.pop()
        digest.update(b"\n%d %o %d:%d " % (len(path), inode.mode, inode.uid, inode.gid) + path)
        for name, value in sorted((inode.xattrs or {}).items()):
            digest.update(b"\n%d %d %s%s" % (len(name), len(value), name, value))
        if isinstance(inode, Directory):
            waiting += [(path + b"/" + n, c) for n, c in sorted(inode.children.items(), reverse=True)]
        elif isinstance(inode, File):
            _survey_file(view, inode, digest)
        elif isinstance(inode, Symlink):
            digest.update(b"\nlink %d %s" % (len(inode.target), inode.target))
        elif isinstance(inode, Special):
            digest.update(b"\nnode %d" % inode.rdev)


def _survey_file(view: View, file: File, digest: hashlib._Hash) -> None:
    content = hashlib.sha256()
    for piece in view.read(file):
        content.update(piece)
    digest.update(b"\nfile %d %s" % (file.size, content.digest()))


def _like(inode: Inode, other: Inode | None) -> None:
    if other is not None:
        inode.mode, inode.uid, inode.gid = other.mode, other.uid, other.gid
        inode.mtime_ns, inode.xattrs = other.mtime_ns, other.xattrs


def _is_tar(source: Local) -> bool:
    try:
        with plain(source.path) as stream:
            return stream.read(512)[_TAR] == b"ustar"
    except (OSError, EOFError, ValueError, InvalidArgument):
        return False


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _path(parts: Parts) -> str:
    return "/" + b"/".join(parts).decode("utf-8", "replace")
