"""A store is read several pieces at a time; what arrives is the file, in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.layers.metadata_cache import AT_ONCE, _read_whole

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, MIB, AT_ONCE * MIB, AT_ONCE * MIB + 1, 2 * AT_ONCE * MIB - 1])
def test_pieces_are_the_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert b"".join(_read_whole(fd)) == path.read_bytes()
    finally:
        os.close(fd)
