"""A look over a tree before it is packed: what EROFS or an overlay could not carry is refused by name."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import uuid
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument

MAX_ENTRIES: Final = 20_000_000
NAME_MAX: Final = 255
# Layers are mounted with redirect_dir=nofollow and metacopy=off: these would be lost or misread.
_REFUSED_XATTRS: Final = frozenset({"trusted.overlay.redirect", "trusted.overlay.metacopy"})


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    entries: int
    apparent: int
    """Bytes of the files as they read."""
    holes: int
    """Of which lie in holes."""
    newest: int = 0
    """Modification time of the newest entry, rounded up to a second."""
    longest: str = ""
    """Path of an entry whose name has all the 255 bytes that a name may have."""
    uuid: str
    """Follows from names, modes, owners, sizes and times: stable, and distinct within a stack of layers."""


def survey(root: Path) -> Survey:
    """Walks the tree. Raises InvalidArgument with the path of what cannot be in a layer."""
    device = root.stat().st_dev
    digest = hashlib.sha256()
    entries = apparent = holes = 0
    newest, longest = _ceil_seconds(root.lstat()), ""
    pending = [os.fspath(root)]
    while pending:
        directory = pending.pop()
        for path in _children(directory, root):
            try:
                st = os.lstat(path)
            except OSError as e:
                raise _refused(path, root, e.strerror or str(e)) from e
            if st.st_dev != device:
                raise _refused(
                    path, root, "another filesystem is mounted there: unmount it, or build from a copy"
                )
            _check_xattrs(path, root)
            newest = max(newest, _ceil_seconds(st))
            entries += 1
            if len(os.fsencode(os.path.basename(path))) == NAME_MAX:
                longest = path
            if entries > MAX_ENTRIES:
                raise InvalidArgument(f"{root}: more than {MAX_ENTRIES} entries")
            if stat.S_ISDIR(st.st_mode):
                pending.append(path)
            elif stat.S_ISREG(st.st_mode):
                apparent += st.st_size
                holes += max(0, st.st_size - st.st_blocks * 512)
            relative = os.fsencode(path[len(os.fspath(root)) :])
            digest.update(
                b"%s\0%o %d %d %d %d\n"
                % (relative, st.st_mode, st.st_uid, st.st_gid, _size(st), st.st_mtime_ns)
            )
    return Survey(
        entries=entries,
        apparent=apparent,
        holes=holes,
        newest=newest,
        longest=longest,
        uuid=str(uuid.UUID(bytes=digest.digest()[:16], version=4)),
    )


def _ceil_seconds(st: os.stat_result) -> int:
    return max(0, -(-st.st_mtime_ns // 10**9))


def _size(st: os.stat_result) -> int:
    """Of a directory it depends on the filesystem that it lies on."""
    return 0 if stat.S_ISDIR(st.st_mode) else st.st_size


def _children(directory: str, root: Path) -> list[str]:
    try:
        with os.scandir(directory) as found:
            return sorted(entry.path for entry in found)
    except OSError as e:
        why = "its path is too long" if e.errno == errno.ENAMETOOLONG else e.strerror or str(e)
        raise _refused(directory, root, why) from e


def _check_xattrs(path: str, root: Path) -> None:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as e:
        if e.errno == errno.EOPNOTSUPP:
            return
        raise _refused(path, root, e.strerror or str(e)) from e
    if bad := _REFUSED_XATTRS.intersection(names):
        raise _refused(path, root, f"an overlay's {min(bad)} cannot be carried by a layer")


def _refused(path: str, root: Path, why: str) -> InvalidArgument:
    inside = path[len(os.fspath(root)) :] or "/"
    return InvalidArgument(
        f"building a layer from {root}: {inside!r}: {why}", entry=inside.encode(errors="replace").decode()
    )
