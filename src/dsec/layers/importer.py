"""Images of others, as layers: each of their layers once, then merged below a threshold.

What an image has as `N` layers becomes as few as the threshold allows; the parts stay in the store without a
name, so that another image that has some of them fetches and reads only the others.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from dsec.core.errors import InvalidArgument
from dsec.core.images import ImageConfig
from dsec.layers.archive_in import LinkBelow, read_tar
from dsec.layers.assemble import Assembly
from dsec.layers.build import TOOL, Builder, Wanted
from dsec.layers.erofs.tree import HOLE, Blob, File, Inode, Tree
from dsec.layers.model import Layer
from dsec.layers.oci import ImageSource, OciConfig, Reference, open_image
from dsec.layers.stack import Stack

COLLAPSE_BELOW: Final = 3_000_000_000
"""Bytes of consecutive layers that become one (paper.md, "Environment layers")."""
SIDE_BY_SIDE: Final = 2


class Importer:
    """Imports into the store of a `Builder`. Any thread may call."""

    def __init__(self, builder: Builder, *, collapse_below: int = COLLAPSE_BELOW) -> None:
        self._builder = builder
        self._store = builder.store
        self._collapse_below = collapse_below
        self._busy: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def load(self, source: str, wanted: Wanted | None = None, **how: Any) -> Layer:
        """The image that `source` names, as `oci.open_image` takes it; `how` are that function's options.

        wanted: its name, kind and labels; without it the image is named as in its registry. An image that
        is here already, by its manifest's digest, is only named. Raises what `open_image` and the archive's
        reader raise, DiskFull, and leaves nothing half-done.
        """
        wanted = wanted or Wanted(name=name_of(source), kind="base")
        with open_image(source, **how) as image:
            config = config_of(image.config)
            wanted = msgspec.structs.replace(wanted, config=config, manifest=image.manifest_digest)
            key = self._key("image", image.manifest_digest, str(self._collapse_below))
            with self._alone(key):
                known = self._store.made_of(key)
                if known is None:
                    return self._load(image, wanted, key)
            if wanted.name:
                return self._store.tag(
                    known.digest, wanted.name, kind=wanted.kind, config=config, labels=wanted.labels
                )
            return known

    def _load(self, image: ImageSource, wanted: Wanted, key: str) -> Layer:
        if not image.diff_ids:
            return self._builder.fill(wanted, f"image {image.reference}", lambda into: None, sources=[key])
        parts = self._parts(image)
        groups = list(self._groups(parts))
        below: list[str] = []
        for number, group in enumerate(groups):
            top = number == len(groups) - 1
            layer = self._merged(group, below, image, wanted if top else None, key)
            below.append(layer.digest)
        return layer

    def _merged(
        self, group: Sequence[Layer], below: list[str], image: ImageSource, wanted: Wanted | None, key: str
    ) -> Layer:
        """The top one carries the name, the configuration, and what is below it."""
        source = f"image {image.reference}"
        keys = [key, f"manifest:{image.manifest_digest}"]
        merged = self._key("merge", *(layer.digest for layer in group), str(not below))
        if wanted is not None:
            return self._builder.collapse(
                group,
                wanted,
                source,
                base=not below,
                below=below,
                sources=[*keys, *([] if below else [merged])],
            )
        known = self._store.made_of(merged)
        nameless = Wanted(name="", kind="base", manifest=image.manifest_digest)
        return known or self._builder.collapse(group, nameless, source, base=not below, sources=[merged])

    def _groups(self, parts: list[Layer]) -> Iterator[list[Layer]]:
        group: list[Layer] = []
        for part in parts:
            if group and sum(p.total for p in group) + part.total > self._collapse_below:
                yield group
                group = []
            group.append(part)
        yield group

    # Parts

    def _parts(self, image: ImageSource) -> list[Layer]:
        progress = Summed(self._builder.progress.bytes)
        self._builder.progress.stage("fetch")
        with ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="import") as threads:
            numbers = range(len(image.diff_ids))
            waiting = [threads.submit(self._part, image, n, progress.of(n)) for n in numbers]
            try:
                found = [task.result() for task in waiting]
            except BaseException:
                for task in waiting:
                    task.cancel()
                raise
        parts: list[Layer] = []
        for number, part in enumerate(found):
            parts.append(part or self._dependent(image, number, parts))
        return parts

    def _part(self, image: ImageSource, number: int, progress: Callable[[int], None]) -> Layer | None:
        """None when it has hard links to files of the layers below, which have to be known then."""
        key = self._key("diff", image.diff_ids[number], "whiteouts" if number else "")
        with self._alone(key):
            try:
                return self._store.made_of(key) or self._read(image, number, key, progress, None)
            except LinkBelow:
                return None

    def _dependent(self, image: ImageSource, number: int, below: Sequence[Layer]) -> Layer:
        key = self._key("chain", *image.diff_ids[: number + 1])
        with self._alone(key), Stack(self._store, below) as stack:
            return self._store.made_of(key) or self._read(image, number, key, lambda n: None, stack)

    def _read(
        self,
        image: ImageSource,
        number: int,
        key: str,
        progress: Callable[[int], None],
        stack: Stack | None,
    ) -> Layer:
        def fill(into: Assembly) -> None:
            below = Borrowed(stack, into.tree).find if stack else None
            with image.open_tar(number) as stream:
                read_tar(stream, into.tree, into.blob, whiteouts=number > 0, below=below, progress=progress)
                while stream.read(1 << 16):  # what follows the archive's end is part of its digest
                    pass

        source = f"image {image.reference}, layer {image.layers[number].digest}"
        return self._builder.fill(Wanted(name="", kind="base"), source, fill, sources=[key])

    @staticmethod
    def _key(what: str, *of: str) -> str:
        digest = hashlib.sha256("\0".join((TOOL, *of)).encode()).hexdigest()
        return f"{what}:{digest}"

    def _alone(self, key: str) -> threading.Lock:
        """One thread at a time makes what a key stands for; the others find it made."""
        with self._lock:
            return self._busy.setdefault(key, threading.Lock())


class Borrowed:
    """Files of the layers below as files of a tree that refers to their blobs."""

    def __init__(self, stack: Stack, tree: Tree) -> None:
        self._stack = stack
        self._tree = tree

    def find(self, path: bytes) -> Inode | None:
        inode = self._stack.lookup(path)
        if not isinstance(inode, File):
            return inode
        theirs = self._stack.owner(inode)
        extents = tuple(
            e if e.blob == HOLE else e._replace(blob=self._place(theirs.blobs[e.blob])) for e in inode.extents
        )
        return File(
            inode.mode,
            inode.uid,
            inode.gid,
            inode.mtime_ns,
            inode.xattrs,
            size=inode.size,
            extents=extents,
            tail=theirs.read_tail(inode.tail),
        )

    def _place(self, blob: Blob) -> int:
        blobs = self._tree.blobs
        if blob not in blobs:
            blobs.append(blob)
        return blobs.index(blob)


class Summed:
    """Progress of several at once as one number."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told = told
        self._done: dict[int, int] = {}

    def of(self, number: int) -> Callable[[int], None]:
        def progress(done: int) -> None:
            self._done[number] = done
            self._told(sum(list(self._done.values())))

        return progress


def name_of(source: str) -> str:
    """What an image is called in the catalogue when nothing else is said: as in its registry.

    Raises InvalidArgument for one that comes from a file, which has no name.
    """
    if source.startswith(("oci:", "oci-archive:", "docker-archive:", "/", "./", "../")):
        raise InvalidArgument(f"{source}: give the layer a name")
    plain = source.removeprefix("docker://")
    reference = Reference.parse(plain)
    if reference.digest:
        return ""  # known by its manifest's digest
    return plain if ":" in plain.rpartition("/")[2] else f"{plain}:{reference.tag}"


def config_of(config: OciConfig) -> ImageConfig:
    """An image's configuration as ours."""
    env = dict(item.partition("=")[::2] for item in config.env if "=" in item)
    return ImageConfig(
        env=env,
        user=config.user,
        workdir=config.working_dir,
        shell=config.shell,
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        stop_signal=config.stop_signal,
        labels=config.labels,
    )
