"""One layer on another, as an overlay shows them, without touching a blob."""

from __future__ import annotations

from dsec.core.errors import InvalidArgument
from dsec.layers.erofs.tree import (
    HOLE,
    OPAQUE,
    Directory,
    Extent,
    File,
    Inode,
    Span,
    Tree,
    is_opaque,
    is_whiteout,
)

_FOREIGN = (b"trusted.overlay.redirect", b"trusted.overlay.metacopy")


def merge(lower: Tree, upper: Tree, *, keep_whiteouts: bool) -> Tree:
    """Lays `upper` on `lower`, which becomes the result; `upper` must not be used again.

    keep_whiteouts: the result hides in the layers below it all that the two hid; without, it is a base.
    Raises InvalidArgument where `upper` refers to other places of the layers below, as an overlay does that
    is mounted with redirect_dir or metacopy.
    """
    _rebase(upper, lower)
    waiting = [(lower.root, upper.root)]
    while waiting:
        waiting += _merge_directory(*waiting.pop())
    if not keep_whiteouts:
        drop_whiteouts(lower)
    return lower


def _merge_directory(lower: Directory, upper: Directory) -> list[tuple[Directory, Directory]]:
    """The directories in them that are to be merged next."""
    hides = is_opaque(lower) or is_opaque(upper)
    if is_opaque(upper):
        lower.children.clear()
    lower.mode, lower.uid, lower.gid, lower.mtime_ns = upper.mode, upper.uid, upper.gid, upper.mtime_ns
    lower.xattrs = upper.xattrs
    if hides:
        _set_opaque(lower)
    below = []
    for name, above in upper.children.items():
        under = lower.children.get(name)
        if isinstance(above, Directory) and isinstance(under, Directory):
            below.append((under, above))
            continue
        if isinstance(above, Directory) and under is not None:
            _set_opaque(above)  # an overlay looks no further down than to what is no directory
        lower.children[name] = above
    return below


def _set_opaque(directory: Directory) -> None:
    directory.xattrs = {**(directory.xattrs or {}), OPAQUE: b"y"}


def drop_whiteouts(tree: Tree) -> None:
    """Makes a base of `tree`: nothing lies below it that could be hidden."""
    for here in tree.directories():
        if here.xattrs and OPAQUE in here.xattrs:
            here.xattrs = {k: v for k, v in here.xattrs.items() if k != OPAQUE} or None
        hidden = [name for name, child in here.children.items() if is_whiteout(child)]
        for name in hidden:
            del here.children[name]


def _rebase(upper: Tree, lower: Tree) -> None:
    """Gives `lower` the blobs and spools of `upper`, and the inodes of `upper` their places there."""
    places = {blob: place for place, blob in reversed(list(enumerate(lower.blobs)))}
    for blob in upper.blobs:
        if blob not in places:
            places[blob] = len(lower.blobs)
            lower.blobs.append(blob)
    blobs = [places[blob] for blob in upper.blobs]
    spools = len(lower.spools)
    lower.spools += upper.spools
    for inode in upper.inodes():
        _check(inode)
        if isinstance(inode, File):
            _move(inode, blobs, spools)


def _move(file: File, blobs: list[int], spools: int) -> None:
    if file.extents:
        file.extents = tuple(
            extent if extent.blob == HOLE else Extent(blobs[extent.blob], extent.start, extent.blocks)
            for extent in file.extents
        )
    if isinstance(file.tail, Span):
        file.tail = file.tail._replace(spool=file.tail.spool + spools)


def _check(inode: Inode) -> None:
    for name in _FOREIGN:
        if inode.xattrs and name in inode.xattrs:
            raise InvalidArgument(
                f"merging layers: {name.decode()} is set, so that a file lies elsewhere in the layers below; "
                "mount overlays with redirect_dir=off,metacopy=off"
            )
