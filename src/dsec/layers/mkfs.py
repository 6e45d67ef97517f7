"""mkfs.erofs of the distribution: what it can do, and how the same tree gives the same bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import DiskFull, DSecError, Internal, InvalidArgument, Unsupported
from dsec.layers.tree import Survey

# A hole costs as much as data in an uncompressed image; past this the image is compressed.
HOLES_WORTH_COMPRESSING: Final = 16 << 20
_MISSING: Final = "mkfs.erofs is not installed: apt-get install erofs-utils"


class Mkfs(msgspec.Struct, frozen=True, kw_only=True):
    """One mkfs.erofs."""

    program: str
    version: str
    options: frozenset[str]
    compressors: frozenset[str]

    def arguments(self, survey: Survey, compress: str) -> list[str]:
        """For an image that depends on the tree alone. Raises Unsupported for a compressor that it lacks."""
        arguments = ["-U", survey.uuid, "--quiet"]
        if not compress and survey.holes >= HOLES_WORTH_COMPRESSING and "lz4" in self.compressors:
            compress = "lz4"
        if compress:
            if compress.partition(",")[0] not in self.compressors:
                have = ", ".join(sorted(self.compressors)) or "none"
                raise Unsupported(f"compression {compress!r}: {self.program} {self.version} has {have}")
            arguments.append(f"-z{compress}")
        return [a for a in arguments if a != "--quiet" or "--quiet" in self.options]


def find(path: str | None = None) -> Mkfs:
    """The mkfs.erofs of this host. Raises Unsupported when there is none."""
    program = shutil.which(
        "mkfs.erofs", path=path or os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin"
    )
    if program is None:
        raise Unsupported(_MISSING)
    # Older ones know no -V, and say who they are as they refuse it.
    text = _said(program, "--help") + _said(program, "-V")
    version = re.search(r"mkfs\.erofs(?: \(erofs-utils\))? (\d[\w.-]*)", text)
    listed = re.search(r"Available compressors are:(.*)", text)
    indented = re.findall(r"^\s+(lz4hc|lz4|lzma|deflate|zstd|libdeflate)\b", text, re.MULTILINE)
    return Mkfs(
        program=program,
        version=version[1] if version else "",
        options=frozenset(re.findall(r"--[a-z][a-z-]+", text)),
        compressors=frozenset(re.split(r"[,\s]+", listed[1].strip()) if listed else indented) - {""},
    )


def _said(program: str, option: str) -> str:
    try:
        done = subprocess.run(
            [program, option], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as e:
        raise Unsupported(f"{program}: {e.strerror}: apt-get install --reinstall erofs-utils") from e
    return done.stdout + done.stderr


def pack(mkfs: Mkfs, tree: Path, image: Path, survey: Survey, *, compress: str, lock_fd: int) -> None:
    """Writes the image. Raises DiskFull, InvalidArgument or Internal with what mkfs.erofs said."""
    if survey.longest and not _packs_long_names(mkfs, image.parent, lock_fd):
        raise Unsupported(
            f"{survey.longest!r}: {mkfs.program} {mkfs.version} cuts names of 255 bytes: shorten it, or "
            "install a newer erofs-utils"
        )
    argv = [mkfs.program, *mkfs.arguments(survey, compress), os.fspath(image), os.fspath(tree)]
    # The time of the build, which -T would give to every file too. Later times would become this one.
    epoch = {"SOURCE_DATE_EPOCH": str(survey.newest)}
    done = run_child(argv, lock_fd=lock_fd, env={**os.environ, **epoch})
    if done.returncode:
        raise failure(f"packing {tree} with {mkfs.program}", done)


def _packs_long_names(mkfs: Mkfs, scratch: Path, lock_fd: int) -> bool:
    """1.5 does not, and would make one file of two that differ in the last byte alone."""
    trial = scratch / "trial"
    trial.mkdir()
    (trial / ("n" * 255)).touch()
    done = run_child([mkfs.program, os.fspath(scratch / "trial.image"), os.fspath(trial)], lock_fd=lock_fd)
    return done.returncode == 0


def run_child(
    argv: Sequence[str], *, lock_fd: int, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program that dies with us and, until it has, keeps the staging directory in use."""
    try:
        return subprocess.run(
            with_us(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            pass_fds=(lock_fd,),
            env=env,
            check=False,
        )
    except OSError as e:
        raise Internal(f"running {argv[0]}: {e.strerror}") from e


def with_us(argv: Sequence[str]) -> list[str]:
    """`argv`, to be killed when the thread that starts it ends."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *argv]


def failure(doing: str, done: subprocess.CompletedProcess[str]) -> DSecError:
    """What a program's end says."""
    said = (done.stderr + done.stdout).strip()
    tail = "\n".join(said.splitlines()[-8:])
    how = f"status {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
    if "No space left" in said or "Disk quota exceeded" in said:
        return DiskFull(f"{doing}: the disk is full")
    if "File name too long" in said or "too long" in said.lower():
        return InvalidArgument(f"{doing}: {tail}")
    return Internal(f"{doing} ended with {how}: {tail}")
