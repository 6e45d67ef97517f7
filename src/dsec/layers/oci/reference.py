"""How an image in a registry is named: `[docker://]HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]`."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument

HUB: Final = "docker.io"
MAX_NAME: Final = 255
MAX_REFERENCE: Final = 512
_PART: Final = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
REPOSITORY: Final = re.compile(rf"{_PART}(?:/{_PART})*\Z")
TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]{{2,45}}\])(?::([0-9]{{1,5}}))?\Z")


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Where an image is. `str()` gives its canonical form, with host and, without a digest, a tag."""

    host: str
    """With its port, if it has one. Docker Hub is `docker.io`."""
    repository: str
    tag: str = ""
    digest: str = ""
    """`sha256:` and 64 figures, or empty."""

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.host}/{self.repository}{tag}{digest}"

    @property
    def wanted(self) -> str:
        """What a registry is asked for: the digest, or else the tag."""
        return self.digest or self.tag

    @classmethod
    def parse(cls, text: str) -> Reference:
        """A name without a host is one of Docker Hub, there in `library/` when it has one part.

        Raises InvalidArgument.
        """
        if len(text) > MAX_REFERENCE:
            raise InvalidArgument(f"image reference {text[:80]!r}...: more than {MAX_REFERENCE} characters")
        rest, _, digest = text.removeprefix("docker://").partition("@")
        if digest or text.endswith("@"):
            check_digest(digest, f"image reference {text!r}")
        host, repository, tag = _split(rest)
        if not tag and not digest:
            tag = "latest"
        _check(text, host, repository, tag)
        return cls(host=host, repository=repository, tag=tag, digest=digest)


def _split(name: str) -> tuple[str, str, str]:
    """Host, repository, tag."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        host, path = first, rest
    else:
        host, path = HUB, name
    head, slash, last = path.rpartition("/")
    last, colon, tag = last.partition(":")
    repository = head + slash + last
    if host.lower() in (HUB, "index.docker.io", "registry-1.docker.io"):
        host = HUB
        repository = repository if "/" in repository else f"library/{repository}"
    return host, repository, tag if tag or not colon else ":"


def _check(text: str, host: str, repository: str, tag: str) -> None:
    what = f"image reference {text!r}"
    match = HOST.match(host)
    if not match or len(host) > 253 or (match[1] and not 0 < int(match[1]) < 65536):
        raise InvalidArgument(f"{what}: {host!r} is no host, or no host and port")
    if not REPOSITORY.match(repository) or len(host) + 1 + len(repository) > MAX_NAME:
        raise InvalidArgument(
            f"{what}: {repository!r} is no repository: lower-case letters, digits and single separators "
            f"(. _ __ -) between slashes, {MAX_NAME} characters with the host"
        )
    if tag and not TAG.match(tag):
        raise InvalidArgument(f"{what}: {tag!r} is no tag: up to 128 letters, digits and . _ -")


def check_digest(digest: object, what: str) -> str:
    """The digest itself. Raises InvalidArgument when it is not SHA-256."""
    if isinstance(digest, str) and DIGEST.match(digest):
        return digest
    raise InvalidArgument(
        f"{what}: digest {str(digest)[:80]!r}: only sha256:, followed by 64 lower-case hexadecimal figures"
    )
