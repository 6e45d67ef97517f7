"""Access control lists as tar writes them, in words, in the form that the kernel keeps in an attribute."""

from __future__ import annotations

from struct import Struct
from typing import Final

from dsec.layers.tar_headers import BadEntry, Records

ATTRIBUTES: Final = {
    b"SCHILY.acl.access": b"system.posix_acl_access",
    b"SCHILY.acl.default": b"system.posix_acl_default",
}
_VERSION: Final = b"\2\0\0\0"
_ENTRY: Final = Struct("<HHI")
_MINIMAL: Final = len(_VERSION) + 3 * _ENTRY.size
"""It says what the mode says, and no kernel keeps it."""
_NOBODY: Final = 0xFFFFFFFF
_TAGS: Final = {
    b"user": (1, 2),
    b"group": (4, 8),
    b"mask": (16, 0),
    b"other": (32, 0),
}
"""Of an owner, and of one with a name."""
_NEEDED: Final = {1, 4, 32}

_Entry = tuple[int, int, int]


def add_acls(pax: Records, xattrs: Records) -> None:
    """Adds the lists of `pax` that `xattrs` lacks. Raises BadEntry."""
    for key, name in ATTRIBUTES.items():
        if not pax.get(key) or name in xattrs:
            continue
        value = encode(pax[key])
        if len(value) > _MINIMAL or name.endswith(b"default"):
            xattrs[name] = value


def encode(text: bytes) -> bytes:
    """Of `user::rw-,user:1000:r--,...`, by commas or lines; ids in digits, or behind the rights as star has
    them. Raises BadEntry, for a name without an id but root among others: only the image knows whose it is.
    """
    lines = text.replace(b"\n", b",").split(b",")
    words = [line.split(b"#")[0].strip() for line in lines]
    entries = sorted(_parse(word) for word in words if word)
    tags = [tag for tag, _, _ in entries]
    named = len({(tag, id_) for tag, id_, _ in entries}) == len(entries)
    if not named or not _NEEDED.issubset(tags) or (16 not in tags and not {2, 8}.isdisjoint(tags)):
        raise BadEntry("an access control list that is not whole")
    return _VERSION + b"".join(_ENTRY.pack(tag, rights, id_) for tag, id_, rights in entries)


def _parse(word: bytes) -> _Entry:
    parts = word.split(b":")
    if parts[0] not in _TAGS or not 3 <= len(parts) <= 4:
        raise BadEntry(f"an access control list with {word[:100]!r}")
    owner, other = _TAGS[parts[0]]
    rights = _rights(parts[2])
    if not parts[1]:
        return owner, _NOBODY, rights
    digits = parts[3] if len(parts) == 4 else parts[1]
    if digits == b"root":
        digits = b"0"
    if not other or not digits.isdigit() or len(digits) > 10 or int(digits) >= _NOBODY:
        why = "whose it is cannot be told; pack it with --xattrs instead"
        raise BadEntry(f"an access control list with {word[:100]!r}: {why}")
    return other, int(digits), rights


def _rights(text: bytes) -> int:
    if len(text) != 3 or any(c not in (wanted, ord("-")) for c, wanted in zip(text, b"rwx", strict=True)):
        raise BadEntry(f"an access control list with rights {text[:10]!r}")
    return sum(bit for c, bit in zip(text, (4, 2, 1), strict=True) if c != ord("-"))
