"""What a sandbox has changed, as a layer: scrubbed, checked, named (the layers' side of `pack_diff`)."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from dsec.core.errors import InvalidArgument, Unsupported
from dsec.core.images import ImageConfig
from dsec.layers.assemble import Assembly
from dsec.layers.build import Builder, Wanted
from dsec.layers.build import check as check_wanted
from dsec.layers.check import Finding, check
from dsec.layers.erofs.content import read_file
from dsec.layers.erofs.tree import File, Inode, Special
from dsec.layers.model import Layer
from dsec.layers.scrub import Rules, Scrub
from dsec.layers.stack import Stack
from dsec.wire import layers as m

TOLD: Final = 10
"""Findings in an error's message."""


class Packer:
    """Into one store. Blocks; any thread may call."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._store = builder.store

    def pack(
        self,
        upper: Path,
        wanted: m.PackDiff,
        below: list[str],
        config: ImageConfig,
        platform: Mapping[str, str],
    ) -> m.Packed:
        """A nameless snapshot layer of `upper`, an overlay's, on the layers `below` (digests, bottom to top).

        platform: names and contents of files in /etc that are the sandbox's own. Raises InvalidArgument for
        rules that are none, and for findings that are refused; LayerCorrupt, DiskFull.
        """
        check_wanted(Wanted(name=wanted.name, kind="snapshot", labels=wanted.labels))  # before any work
        rules = rules_of(wanted)
        scrub = Scrub(upper, rules, platform)
        stack = [self._store.find(digest) for digest in below]
        found: list[Finding] = []

        def fill(into: Assembly) -> None:
            self._builder.read_directory(upper, into, scrub)
            into.end_blob()
            found.extend(self._check(into, stack, rules))
            refuse(found, wanted)

        layer = self._builder.fill(
            Wanted(
                name="",
                kind="snapshot",
                labels=wanted.labels,
                config=config,
                builder=wanted.principal,
                sandbox=wanted.sandbox_id,
                command=["pack_diff"],
            ),
            f"sandbox {wanted.sandbox_id}",
            fill,
            below=below,
        )
        findings = [msgspec.convert(f, m.Finding, from_attributes=True) for f in found]
        return m.Packed(layer=m.info_of(layer), findings=findings, left_out=scrub.entries)

    def _check(self, into: Assembly, stack: list[Layer], rules: Rules) -> list[Finding]:
        data: BinaryIO = into.data

        def content(file: File) -> Iterator[bytes]:
            return read_file(into.tree, file, lambda number: data)

        with Stack(self._store, stack) as lower:

            def below(path: bytes) -> Inode | None:
                try:
                    return lower.lookup(path)
                except Unsupported:  # in a compressed layer, which is not read here: taken to be there
                    return Special(stat.S_IFIFO)

            return check(into.tree, read=content, below=below, allow=rules.keeps)

    def name(self, packed: m.Packed, name: str) -> m.Packed:
        layer = self._store.tag(packed.layer.digest, name)
        return msgspec.structs.replace(packed, layer=m.info_of(layer))

    def drop(self, packed: m.Packed) -> None:
        """Unless it has a name or others stand on it: the same content may have been there before."""
        if not self._store.names_of(packed.layer.digest) and not self._store.needed_by(packed.layer.digest):
            self._store.remove(packed.layer.digest)


def rules_of(wanted: m.PackDiff) -> Rules:
    """Raises InvalidArgument."""
    more, keep = tuple(wanted.remove), tuple(wanted.keep)
    none = {} if wanted.defaults else dict.fromkeys(("caches", "histories", "logs", "temporary"), ())
    rules = Rules(more=more, keep=keep, **none)
    rules.check()
    return rules


def refuse(found: list[Finding], wanted: m.PackDiff) -> None:
    """Raises InvalidArgument when there is something among them that must not be in a layer."""
    bad = [f for f in found if f.severity == "refuse"]
    if bad and wanted.refuse:
        told = "; ".join(f"{f.path or 'the layer'}: {f.message}" for f in bad[:TOLD])
        more = f"; and {len(bad) - TOLD} more" if len(bad) > TOLD else ""
        raise InvalidArgument(f"packing {wanted.sandbox_id}: {told}{more}", findings=len(bad))
