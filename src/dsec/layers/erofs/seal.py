"""Gives an image that is written already its uuid, which may follow from its content."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dsec.layers.erofs.format import BLOCK, CHECKSUM, CHECKSUM_OFFSET, SUPER_OFFSET, checksum

UUID_OFFSET: Final = 48


def seal(image: Path, uuid: bytes) -> None:
    """Writes uuid (16 bytes) and the checksum of the first block. Raises OSError."""
    with image.open("r+b") as f:
        block = bytearray(f.read(BLOCK))
        at = SUPER_OFFSET + UUID_OFFSET
        block[at : at + len(uuid)] = uuid
        CHECKSUM.pack_into(block, SUPER_OFFSET + CHECKSUM_OFFSET, checksum(block))
        f.seek(0)
        f.write(block)
