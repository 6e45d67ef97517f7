"""dsec layer, on a store of its own."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dsec.cli.layer import layer_group
from dsec.core.errors import DSecError


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("DSEC_DATA", str(tmp_path / "data"))

    def run(*argv: str | Path, status: int = 0) -> Result:
        result = CliRunner().invoke(layer_group, [str(a) for a in argv])
        if status == 0 and result.exception:
            raise result.exception
        assert result.exit_code == status, result.output
        return result

    return run


@pytest.fixture
def tree(tmp_path):
    made = tmp_path / "tree"
    made.mkdir()
    (made / "file").write_text("x")
    return made


def test_build_list_show_remove(run, tree):
    options = (
        "--kind",
        "toolkit",
        "-e",
        "A=1",
        "-e",
        "B=a=b",
        "-w",
        "/srv",
        "-u",
        "root",
        "--shell",
        "/bin/sh -e",
    )
    built = json.loads(run("build", "--json", *options, "--label", "team=a", "tool@1", tree).stdout)
    assert built["name"] == "tool@1" and built["kind"] == "toolkit" and built["labels"] == {"team": "a"}
    assert built["config"] == {
        "env": {"A": "1", "B": "a=b"},
        "user": "root",
        "workdir": "/srv",
        "shell": ["/bin/sh", "-e"],
    }
    listed = json.loads(run("ls", "--json").stdout)
    assert [layer["digest"] for layer in listed] == [built["digest"]]
    assert json.loads(run("ls", "--json", "--kind", "base").stdout) == []
    assert "tool@1" in run("ls").stdout
    shown = run("show", "tool@1").stdout
    assert built["digest"] in shown and "A=1 B=a=b" in shown and "/bin/sh -e" in shown
    run("tag", "tool@1", "tool@2")
    assert run("rm", "tool@1").stdout.split() == ["tool@1"]
    assert built["digest"] in run("rm", "tool@2").stdout
    assert json.loads(run("ls", "--json").stdout) == []


@pytest.mark.kernel
def test_build_from_an_archive(run, tree, tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(tree, ".")
    run("build", "from-tar", tmp_path / "a.tar.gz")
    assert json.loads(run("show", "--json", "from-tar").stdout)["kind"] == "workspace"


def test_verify(run, tree, tmp_path):
    built = json.loads(run("build", "--json", "w", tree).stdout)
    assert "whole" in run("verify").stdout
    path = tmp_path / "data/store/layers" / f"{built['digest']}.erofs"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run("verify", "--json", "w", status=1)
    assert "altered" in json.loads(result.stdout)[0]["fault"]


@pytest.mark.parametrize(
    "argv",
    [
        ("build", "w"),
        ("build", "w", "/tmp", "--mmdebstrap", "bookworm"),
        ("build", "w", "/tmp", "--include", "git"),
        ("build", "w", "/tmp", "-e", "novalue"),
        ("build", "w", "/tmp", "--kind", "other"),
        ("rm",),
    ],
)
def test_bad_usage(run, argv):
    run(*argv, status=2)


def test_errors_keep_their_type(run):
    for argv in (
        ("show", "none"),
        ("rm", "none"),
        ("build", "w", "/nowhere"),
        ("build", "a b", "/etc/hostname"),
    ):
        result = run(*argv, status=1)
        assert isinstance(result.exception, DSecError)
