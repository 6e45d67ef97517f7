"""What looks like a key, a token or a password, by content and by name of a file.

Files are hostile: no pattern takes more than time in proportion to what it looks at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple


class Secret(NamedTuple):
    what: str
    """Which kind; never the secret itself."""
    sure: bool
    """Whether its shape is that of nothing else."""


class _Shape(NamedTuple):
    what: str
    markers: tuple[bytes, ...]
    """One of them is in the text, or it is not searched: that is a hundred times faster."""
    pattern: re.Pattern[bytes]


_LINE: Final = rb"(?:\r?\n|\\n)"
# A program that knows keys has the first line in it; a key goes on.
_PEM: Final = (
    rb"-----BEGIN (?:[A-Z0-9]{1,12} )?PRIVATE KEY(?: BLOCK)?-----[ \t]{0,8}" + _LINE + rb"(?:[A-Za-z-]{1,40}:"
    rb" [^\r\n]{0,200}\r?\n){0,4}(?:\r?\n)?[A-Za-z0-9+/=]{40}"
)
_SHAPES: Final = (
    _Shape("a private key (PEM)", (b"PRIVATE KEY",), re.compile(_PEM)),
    _Shape(
        "an access key of AWS",
        (b"AKIA", b"ASIA"),
        re.compile(rb"(?<![A-Za-z0-9/+])(?:AKIA|ASIA)(?![0-9A-Z]{9}EXAMPLE)[A-Z2-7]{16}(?![A-Za-z0-9/+=])"),
    ),
    _Shape(
        "a token of GitHub",
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
        re.compile(
            rb"(?<![A-Za-z0-9_])(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59})"
        ),
    ),
    _Shape("a token of GitLab", (b"glpat-",), re.compile(rb"(?<![A-Za-z0-9_-])glpat-[A-Za-z0-9_-]{20}")),
    _Shape(
        "a token of Slack",
        (b"xox", b"hooks.slack.com"),
        re.compile(
            rb"(?<![A-Za-z0-9])xox[abeoprs]-[0-9]{8,16}-[A-Za-z0-9-]{10}"
            rb"|hooks\.slack\.com/services/T[A-Z0-9]{6,12}/B[A-Z0-9]{6,12}/[A-Za-z0-9]{20}"
        ),
    ),
    _Shape(
        "a key of Google",
        (b"AIza", b"GOCSPX-"),
        re.compile(rb"(?<![A-Za-z0-9_-])(?:AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])|GOCSPX-[A-Za-z0-9_-]{28})"),
    ),
    _Shape(
        "a token for publishing packages",
        (b"npm_", b"pypi-AgE"),
        re.compile(rb"(?<![A-Za-z0-9_])(?:npm_[A-Za-z0-9]{36}(?![A-Za-z0-9_])|pypi-AgE[A-Za-z0-9_-]{50})"),
    ),
)

_NAMED: Final = (
    (re.compile(rb"(?:^|/)[._]netrc\Z"), re.compile(rb"\bpassword\s+\S"), "a password in .netrc"),
    (
        re.compile(rb"(?:^|/)(?:\.docker/config\.json|\.dockercfg|containers/auth\.json)\Z"),
        re.compile(rb'"(?:auth|identitytoken|registrytoken|password)"\s*:\s*"[^"\s]'),
        "credentials for registries of images",
    ),
    (
        re.compile(rb"(?:^|/)(?:\.git-credentials|\.config/git/credentials)\Z"),
        re.compile(rb"://[^/\s@:]*:[^/\s@]+@"),
        "a password for git",
    ),
    (
        re.compile(rb"(?:^|/)\.aws/credentials\Z"),
        re.compile(rb"aws_secret_access_key\s*=\s*\S"),
        "a secret key of AWS",
    ),
    (
        re.compile(rb"(?:^|/)\.npmrc\Z"),
        re.compile(rb"_(?:authToken|auth|password)\s*=\s*[^\s$]"),
        "a token in .npmrc",
    ),
    (
        re.compile(rb"(?:^|/)\.pypirc\Z"),
        re.compile(rb"(?m)^[ \t]*password[ \t]*[=:][ \t]*\S"),
        "a password in .pypirc",
    ),
    (re.compile(rb"(?:^|/)\.pgpass\Z"), re.compile(rb"(?m)^[^#\s][^\n]*:[^\n:]+$"), "a password in .pgpass"),
)
_KEY_NAME: Final = re.compile(rb"(?:^|/)id_(?:rsa|dsa|ecdsa|ecdsa_sk|ed25519|ed25519_sk)\Z")


def is_named(path: bytes) -> bool:
    """Whether the name alone makes a difference."""
    return bool(_KEY_NAME.search(path)) or any(name.search(path) for name, _, _ in _NAMED)


def search(path: bytes, data: bytes) -> Iterator[Secret]:
    """What is in the beginning of a file with that path; each kind once."""
    by_content = False
    for shape in _SHAPES:
        if any(marker in data for marker in shape.markers) and shape.pattern.search(data):
            by_content = True
            yield Secret(shape.what, True)
    for name, content, what in _NAMED:
        if name.search(path) and content.search(data):
            yield Secret(what, True)
    if not by_content and _KEY_NAME.search(path):
        yield Secret("a file with the name of a private key", False)
