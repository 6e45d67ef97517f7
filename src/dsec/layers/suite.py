"""Base layers from a distribution's suite, by mmdebstrap."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dsec.core.errors import DiskFull, DSecError, InvalidArgument, Unavailable, Unsupported
from dsec.layers.mkfs import with_us

_SUITE: Final = re.compile(r"^[a-z][a-z0-9./-]{0,63}\Z")
_PACKAGE: Final = re.compile(r"^[a-z0-9][a-z0-9.+-]{0,127}\Z")
_MIRROR: Final = re.compile(r"^(https?|file|copy)://[^\s]+\Z|^deb [^\n]+\Z")
_NO_DOCS: Final = ("doc", "man", "info", "locale", "lintian")


def make(
    root: Path,
    suite: str,
    include: Sequence[str],
    mirrors: Sequence[str],
    *,
    lock_fd: int,
    said: Callable[[str], None],
) -> None:
    """Fills the empty directory `root`. Raises InvalidArgument, Unavailable, DiskFull with what apt said."""
    argv = command(root, suite, include, mirrors)
    if shutil.which("mmdebstrap") is None:
        raise Unsupported("mmdebstrap is not installed: apt-get install mmdebstrap")
    if os.geteuid() != 0:
        raise Unsupported("a suite needs root")
    started = int(os.stat(root).st_mtime)
    lines: list[str] = []
    # Own namespaces: what is mounted or runs in there goes with its first process, which dies with us.
    child = subprocess.Popen(
        with_us(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--", *argv]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=(lock_fd,),
        env={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LC_ALL": "C.UTF-8",
            "TMPDIR": os.fspath(root.parent),
            "DEBIAN_FRONTEND": "noninteractive",
            **{k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")},
        },
    )
    try:
        assert child.stderr
        with child.stderr:
            for line in child.stderr:
                lines = [*lines[-39:], line.rstrip()]
                if line.startswith("I: "):
                    said(line[3:].strip())
        if child.wait():
            raise _failure(suite, lines)
    finally:
        child.kill()
        child.wait()
    _tidy(root, started)


def command(root: Path | str, suite: str, include: Sequence[str], mirrors: Sequence[str]) -> list[str]:
    """The command. Raises InvalidArgument for names that are none."""
    if not _SUITE.match(suite):
        raise InvalidArgument(f"{suite[:80]!r} is no suite: such as bookworm, trixie, noble")
    if bad := next((p for p in include if not _PACKAGE.match(p)), None):
        raise InvalidArgument(f"{bad[:80]!r} is no package's name")
    if bad := next((m for m in mirrors if not _MIRROR.match(m)), None):
        raise InvalidArgument(f"{bad[:80]!r} is no mirror: a URL, or a line of sources.list")
    argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
    argv += [f"--dpkgopt=path-exclude=/usr/share/{d}/*" for d in _NO_DOCS]
    argv.append("--dpkgopt=path-include=/usr/share/locale/locale.alias")
    if include:
        argv.append(f"--include={','.join(include)}")
    return [*argv, suite, os.fspath(root), *mirrors]


def _failure(suite: str, lines: list[str]) -> DSecError:
    text = "\n".join(lines)
    tail = "\n".join(line for line in lines if line.startswith(("E:", "W:", "Err:")))[-1500:] or text[-1500:]
    if "No space left" in text or "enough free space" in text:
        return DiskFull(f"mmdebstrap {suite}: the disk is full")
    if (
        "Unable to locate package" in text
        or "does not have a Release file" in text
        or "unknown suite" in text
    ):
        return InvalidArgument(f"mmdebstrap {suite}: {tail}")
    return Unavailable(f"mmdebstrap {suite} failed: {tail}")


def _tidy(root: Path, started: int) -> None:
    """What is this host's or this minute's: same packages, same layer."""
    for name, content in (
        ("hostname", "localhost\n"),
        ("resolv.conf", ""),
        ("hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost\n"),
    ):
        path = root / "etc" / name
        path.unlink(missing_ok=True)
        path.write_text(content)
        path.chmod(0o644)
    (root / "etc/machine-id").write_text("")
    _clamp_times(root, started)


def _clamp_times(root: Path, started: int) -> None:
    """Gives everything written just now the time of the newest thing that was not."""
    now: list[str] = []
    newest = 0
    for directory, names, files in os.walk(root):
        for path in (directory, *(os.path.join(directory, n) for n in (*files, *names))):
            mtime = os.lstat(path).st_mtime_ns
            if mtime >= started * 10**9:
                now.append(path)
            else:
                newest = max(newest, mtime)
    for path in now:
        os.utime(path, ns=(newest, newest), follow_symlinks=False)
