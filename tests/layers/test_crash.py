"""A build that is killed at any stage leaves nothing that can be seen, and nothing after the next open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.layers.conftest import empty, workspace

from dsec.core.errors import UnknownLayer
from dsec.layers.build import Builder
from dsec.layers.store import LayerStore

STAGES = ["survey", "pack", "publish"]
BUILD_UNTIL = """
import os, sys
from pathlib import Path
from dsec.layers.build import Builder, Progress, Wanted
from dsec.layers.store import LayerStore

class Stop(Progress):
    def stage(self, name):
        if name == sys.argv[3]:
            print(name, flush=True)
            sys.stdin.read()

wanted = Wanted(name="w", kind="workspace")
Builder(LayerStore(Path(sys.argv[1])), Stop()).from_directory(Path(sys.argv[2]), wanted)
"""


def killed_at(stage: str, store: Path, source: Path, code: str = BUILD_UNTIL) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", code, store, source, stage],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        assert child.stdout.readline().strip() == stage
        child.kill()


@pytest.mark.parametrize("stage", STAGES)
def test_killed(tmp_path, source, stage):
    path = tmp_path / "store"
    killed_at(stage, path, source)
    with LayerStore(path) as store:
        assert empty(store)
        with pytest.raises(UnknownLayer):
            store.resolve("w", [])
        Builder(store).from_directory(source, workspace("w"))
        store.verify("w")


BETWEEN = BUILD_UNTIL.replace(
    "Builder(",
    """
from dsec.layers.catalogue import Catalogue
def add(self, *layers, sources=None):
    Stop().stage("add")
Catalogue.add = add
Builder(""",
    1,
)


def test_killed_between_the_rename_and_the_row(tmp_path, source):
    path = tmp_path / "store"
    killed_at("add", path, source, BETWEEN)
    assert any((path / "layers").iterdir())  # there, but no name means it
    with LayerStore(path) as store:
        assert empty(store)


COMPRESSED = BUILD_UNTIL.replace('kind="workspace"', 'kind="workspace", compress="lz4hc"')
PACKER = """#!/bin/sh
case $1 in -*help|-V) exec {real} "$@";; esac
echo $$ > {pid}
exec 3<{gate}
"""


def test_the_packer_dies_with_its_builder(tmp_path, source, monkeypatch):
    """Killed while mkfs.erofs runs: it goes too, and what it had written is swept."""
    bin_, pid, gate = tmp_path / "bin", tmp_path / "pid", tmp_path / "gate"
    bin_.mkdir()
    os.mkfifo(pid)
    os.mkfifo(gate)
    real = subprocess.run(["sh", "-c", "command -v mkfs.erofs"], capture_output=True, text=True, check=True)
    (bin_ / "mkfs.erofs").write_text(PACKER.format(real=real.stdout.strip(), pid=pid, gate=gate))
    (bin_ / "mkfs.erofs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    path = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, "-c", COMPRESSED, path, source, "never"], stdin=subprocess.PIPE
    ) as child:
        packer = os.pidfd_open(int(pid.read_text()))
        child.kill()
    import select

    assert select.select([packer], [], [], 30)[0], "the packer outlived its builder"
    os.close(packer)
    with LayerStore(path) as store:
        assert empty(store)
