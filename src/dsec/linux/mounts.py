"""What is mounted, as the kernel lists it."""

from __future__ import annotations

from pathlib import Path


def is_mount(path: Path) -> bool:
    """Also for a bind mount within one filesystem, which os.path.ismount does not see."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == _escaped(str(path)) for line in lines)


def _escaped(path: str) -> str:
    for character in ("\\", " ", "\t", "\n"):
        path = path.replace(character, f"\\{ord(character):03o}")
    return path
