"""A small root for sandboxes, made of the host's own programs and what they are linked with."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from dsec.backends.base import LayerRef

SHELL = [
    "sh",
    "bash",
    "true",
    "false",
    "cat",
    "echo",
    "sleep",
    "env",
    "kill",
    "yes",
    "sort",
    "seq",
    "timeout",
    "tr",
]
FILES = [
    "dd",
    "ls",
    "head",
    "tail",
    "wc",
    "grep",
    "ln",
    "mkdir",
    "rm",
    "touch",
    "chmod",
    "chown",
    "mknod",
    "readlink",
]
SYSTEM = ["id", "mount", "umount", "ps", "df", "stat", "hostname", "setpriv", "prlimit", "taskset", "renice"]
PROGRAMS = (*SHELL, *FILES, *SYSTEM)
PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"
GROUP = "root:x:0:\nuser:x:1000:\n"


def _libraries(program: str) -> set[str]:
    out = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+\.so\S*)", out))


def build_root(where: Path, extra: dict[str, Path] | None = None) -> None:
    """`extra`: programs by the path that they get inside."""
    for name in ("bin", "etc", "root", "tmp", "home/user", "usr/bin", "var/tmp", "proc", "sys", "dev"):
        (where / name).mkdir(parents=True, exist_ok=True)
    (where / "tmp").chmod(0o1777)
    os.chown(where / "home/user", 1000, 1000)
    (where / "etc/passwd").write_text(PASSWD)
    (where / "etc/group").write_text(GROUP)
    libraries: set[str] = set()
    for name in PROGRAMS:
        if found := shutil.which(name):
            real = os.path.realpath(found)
            shutil.copy2(real, where / "bin" / name)
            libraries |= _libraries(real)
    for library in libraries:
        target = where / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(os.path.realpath(library), target)
    for inside, program in (extra or {}).items():
        shutil.copy2(program, where / inside.lstrip("/"))


def image_of(tree: Path, image: Path) -> LayerRef:
    """An EROFS image of a directory."""
    subprocess.run(["mkfs.erofs", "--quiet", str(image), str(tree)], check=True, capture_output=True)
    image.chmod(0o444)
    return LayerRef(digest=hashlib.sha256(image.read_bytes()).hexdigest(), path=str(image))
