"""Host ids of sandboxes. A slot has 65,536 ids of its own, and one more that owns its user namespace.

Ids on disk are always the image's own: every mount of a sandbox is idmapped.
"""

from __future__ import annotations

from typing import Final

IDS: Final = 65_536
FIRST_ID: Final = 0x4000_0000
"""Above what distributions hand out to users (/etc/subuid begins at 100,000)."""
FIRST_OWNER: Final = 0x3000_0000
"""aether's uids, mapped in no sandbox; one per slot: the kernel counts keys, inotify and more by owner."""
MAX_SLOTS: Final = (0xFFFF_0000 - FIRST_ID) // IDS


def root_of(slot: int) -> int:
    """The host uid and gid of root in a slot's sandbox."""
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot {slot} is not in 0..{MAX_SLOTS - 1}")
    return FIRST_ID + slot * IDS


def owner_of(slot: int) -> int:
    return FIRST_OWNER + slot


def id_map(slot: int) -> str:
    """What is written to uid_map and gid_map."""
    return f"0 {root_of(slot)} {IDS}\n"
