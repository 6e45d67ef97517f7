"""Docker's configuration, and the helpers it names."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import InvalidArgument, Unauthenticated
from dsec.layers.oci import credentials
from dsec.layers.oci.credentials import Credentials, find

PAIR = base64.b64encode(b"u:p:w").decode()
HUB = "https://index.docker.io/v1/"


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(**content: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return path

    return write


def test_auths(config: Any) -> None:
    path = config(auths={"https://r.io/v2/": {"auth": PAIR}, HUB: {"auth": PAIR}, "empty.io": {}})
    wanted = Credentials(username="u", password="p:w")
    assert find("r.io", path) == wanted
    assert find("docker.io", path) == wanted
    assert find("empty.io", path) is None
    assert find("other.io", path) is None
    assert find("r.io:5000", path) is None
    assert find("r.io", config(auths={"r.io/private": {"auth": PAIR}})) is None


def test_tokens(config: Any) -> None:
    path = config(auths={"r.io": {"auth": base64.b64encode(b"u:").decode(), "identitytoken": "t"}})
    found = find("r.io", path)
    assert found and found.identity_token == "t"


def test_they_are_not_shown() -> None:
    assert "pw" not in repr(Credentials(username="u", password="pw"))


def test_no_file(tmp_path: Path) -> None:
    assert find("r.io", tmp_path / "none/config.json") is None


@pytest.mark.parametrize("auth", ["!", "aGk", "/w==", PAIR + "\n"])
def test_damaged(config: Any, auth: str) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.json: r\.io.*base64"):
        find("r.io", config(auths={"r.io": {"auth": auth}}))


def test_no_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(InvalidArgument, match="not as it should be"):
        find("r.io", path)
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(InvalidArgument, match="more than 1048576 bytes"):
        find("r.io", path)


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")

    def write(script: str) -> None:
        program = directory / "docker-credential-test"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write


ANSWER = """read -r server || :; [ "$1" = get ] || exit 9
echo "{\\"ServerURL\\":\\"$server\\",\\"Username\\":\\"of $server\\",\\"Secret\\":\\"s\\"}" """


def test_helpers(config: Any, helper: Any) -> None:
    helper(ANSWER)
    path = config(credHelpers={"r.io": "test"}, auths={"r.io": {"auth": PAIR}})
    assert find("r.io", path) == Credentials(username="of r.io", password="s")
    path = config(credsStore="test")
    assert find("docker.io", path) == Credentials(username=f"of {HUB}", password="s")
    helper('echo \'{"Username":"<token>","Secret":"t"}\'')
    assert find("r.io", path) == Credentials(identity_token="t")
    helper('echo "credentials not found in native keychain"; exit 1')
    assert find("r.io", path) is None


def test_helpers_that_fail(config: Any, helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config(credsStore="test")
    with pytest.raises(Unauthenticated, match=r"r\.io: running docker-credential-test: No such file"):
        find("r.io", path)
    helper("echo locked >&2; exit 1")
    with pytest.raises(Unauthenticated, match="docker-credential-test failed: locked"):
        find("r.io", path)
    helper("echo no json")
    with pytest.raises(InvalidArgument, match="docker-credential-test: not as it should be"):
        find("r.io", path)
    helper("exec sleep 60")
    monkeypatch.setattr(credentials, "HELPER_TIMEOUT", 0.2)
    with pytest.raises(Unauthenticated, match=r"did not answer in 0\.2 s"):
        find("r.io", path)
    with pytest.raises(InvalidArgument, match="no name of a credential helper"):
        find("r.io", config(credsStore="../../tmp/evil"))
