"""Credentials for a registry, as Docker keeps them: in config.json, or with a helper that it names."""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgument, Unauthenticated
from dsec.layers.oci.model import decode
from dsec.layers.oci.reference import HUB

MAX_FILE: Final = 1 << 20
HELPER_TIMEOUT: Final = 30.0
_HUB_KEY: Final = "https://index.docker.io/v1/"
_HELPER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_URL: Final = re.compile(r"^(?:https?://)?([^/]*)(?:/v[12])?/?\Z")
_TOKEN_USER: Final = "<token>"
_UNKNOWN: Final = "credentials not found"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """A user and password, or a token that stands for both."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    """Traded for an access token at the registry's token service."""
    registry_token: str = ""
    """Sent to the registry as it is."""

    def __repr__(self) -> str:
        return f"Credentials({self.username!r}, ...)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("username", self.username)]

    def basic(self) -> str:
        """The value of an Authorization header."""
        pair = f"{self.username}:{self.password}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"


class _Auth(msgspec.Struct, rename="lower"):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""
    registrytoken: str = ""


class _File(msgspec.Struct, rename="camel"):
    auths: dict[str, _Auth] | None = None
    cred_helpers: dict[str, str] | None = None
    creds_store: str = ""


class _Answer(msgspec.Struct, rename="pascal"):
    username: str = ""
    secret: str = ""


def default_path() -> Path:
    """Docker's own: in DOCKER_CONFIG, or in ~/.docker."""
    directory = os.environ.get("DOCKER_CONFIG")
    return (Path(directory) if directory else Path.home() / ".docker") / "config.json"


def find(host: str, path: Path | None = None) -> Credentials | None:
    """The credentials for a registry; None when there are none, or no such file.

    Raises InvalidArgument for a file that Docker would not write, Unauthenticated for a helper that fails.
    """
    path = path or default_path()
    try:
        with path.open("rb") as f:
            data = f.read(MAX_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise InvalidArgument(f"credentials: reading {path}: {e.strerror}") from e
    if len(data) > MAX_FILE:
        raise InvalidArgument(f"credentials: {path} has more than {MAX_FILE} bytes")
    return _look_up(decode(data, _File, f"credentials: {path}"), host, path)


def _look_up(file: _File, host: str, path: Path) -> Credentials | None:
    for key, helper in (file.cred_helpers or {}).items():
        if _host(key) == host:
            return _ask(helper, key, path)
    for key, auth in (file.auths or {}).items():
        if _host(key) == host and (found := _decoded(auth, f"credentials: {path}: {key[:100]}")):
            return found
    return _ask(file.creds_store, _HUB_KEY if host == HUB else host, path) if file.creds_store else None


def _host(key: str) -> str:
    """Keys are hosts, or URLs of old."""
    name = _URL.sub(r"\1", key)
    return HUB if name in ("index.docker.io", "registry-1.docker.io") else name


def _decoded(auth: _Auth, what: str) -> Credentials | None:
    username, password = auth.username, auth.password
    if auth.auth:
        try:
            pair = base64.b64decode(auth.auth, validate=True).decode().rstrip("\0")
        except (binascii.Error, UnicodeDecodeError) as e:
            raise InvalidArgument(f"{what}: its `auth` is no base64 of a user and a password") from e
        username, _, password = pair.partition(":")
    if not (password or auth.identitytoken or auth.registrytoken):
        return None
    return Credentials(
        username=username,
        password=password,
        identity_token=auth.identitytoken,
        registry_token=auth.registrytoken,
    )


def _ask(helper: str, server: str, path: Path) -> Credentials | None:
    """Runs docker-credential-HELPER, which speaks JSON."""
    if not _HELPER.match(helper):
        raise InvalidArgument(f"credentials: {path}: {helper[:80]!r} is no name of a credential helper")
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=HELPER_TIMEOUT, check=False
        )
    except OSError as e:
        raise Unauthenticated(f"credentials for {server}: running {program}: {e.strerror}") from e
    except subprocess.TimeoutExpired as e:
        raise Unauthenticated(
            f"credentials for {server}: {program} did not answer in {HELPER_TIMEOUT:g} s"
        ) from e
    if done.returncode:
        said = (done.stdout + done.stderr)[:300].decode(errors="replace").strip()
        if _UNKNOWN in said:
            return None
        raise Unauthenticated(f"credentials for {server}: {program} failed: {said}")
    answer = decode(done.stdout[:MAX_FILE], _Answer, f"credentials for {server}: {program}")
    if answer.username == _TOKEN_USER:
        return Credentials(identity_token=answer.secret)
    return Credentials(username=answer.username, password=answer.secret)
