"""What a step is made of, as a key: equal keys, equal layers, as far as a build can be repeated at all."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FORM: Final = 1
"""Of the keys: another form forgets all that was cached."""
_CHUNK: Final = 1 << 20


def of_base(digest: str, layers: Sequence[str]) -> str:
    return _key("from", digest, list(layers))


def of_run(parent: str, argv: Sequence[str], env: Mapping[str, str], user: str, workdir: str) -> str:
    """env: all that the command sees, but for what is not to count."""
    return _key("run", parent, list(argv), dict(env), user, workdir)


def of_copy(parent: str, name: str, contents: Sequence[str], destination: str, chown: str, chmod: str) -> str:
    """contents: a digest for each source, by `tree` or a runner's survey. name: COPY or ADD."""
    return _key("copy", parent, name, list(contents), destination, chown, chmod)


def of_text(name: str, body: str) -> str:
    return _key("text", name, body)


def _key(what: str, *parts: Any) -> str:
    # JSON tells ("a", "b") from ("a\0b",); surrogates are escaped.
    text = json.dumps([FORM, what, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tree(path: Path, leaves_out: Callable[[str], bool] = lambda _: False) -> str:
    """Names, modes, contents and links of what `path` is or holds; no times and no owners.

    leaves_out: takes paths relative to `path`. Raises OSError.
    """
    digest = hashlib.sha256()
    waiting = [""]
    while waiting:
        name = waiting.pop()
        here = path / name if name else path
        st = here.lstat()
        _add(digest, "name", os.fsencode(name))
        _add(digest, "mode", b"%o" % st.st_mode)
        if stat.S_ISDIR(st.st_mode):
            names = (f"{name}/{child}" if name else child for child in os.listdir(here))
            waiting += sorted((child for child in names if not leaves_out(child)), reverse=True)
        elif stat.S_ISREG(st.st_mode):
            _add(digest, "file", _content(here))
        elif stat.S_ISLNK(st.st_mode):
            _add(digest, "link", os.fsencode(os.readlink(here)))
        else:
            _add(digest, "node", b"%d" % st.st_rdev)
    return digest.hexdigest()


def _add(digest: Any, what: str, value: bytes) -> None:
    digest.update(b"%s %d\n" % (what.encode(), len(value)))
    digest.update(value)


def _content(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
    return digest.digest()
