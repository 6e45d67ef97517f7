"""SIGKILL at any instant of an import, a merge, a collection: nothing half-made, no byte unclaimed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.layers.test_importer import layout, tar_of

from dsec.layers.build import Builder, Wanted
from dsec.layers.importer import Importer
from dsec.layers.store import LayerStore

KILLS = 24
WORK = """
import sys
from pathlib import Path
from dsec.layers.build import Builder, Wanted
from dsec.layers.importer import Importer
from dsec.layers.store import LayerStore

with LayerStore(Path(sys.argv[1])) as store:
    print("begins", flush=True)
    number = 0
    while True:
        for source in sys.argv[2:]:
            number += 1
            limit = 3_000_000_000 if number % 2 else 1
            importer = Importer(Builder(store), collapse_below=limit)
            wanted = Wanted(name=f"image:{number % 5}", kind="base")
            importer.load(f"oci:{source}", wanted, platform="linux/amd64")
            if number % 3 == 0:
                store.remove(f"image:{number % 5}")
            store.collect(grace_s=-1 if number % 4 == 0 else 0)
"""


def test_killed_at_random(tmp_path: Path) -> None:
    rng = random.Random(7)
    sources = []
    for n in range(3):
        tars = [
            tar_of((f"f{n}{i}", os.urandom(150_000)), ("same", b"x" * 9000 * n), (f"s{i}", b"s"))
            for i in range(3)
        ]
        sources.append(str(layout(tmp_path / f"image{n}", *tars)))
    path = tmp_path / "store"
    begun = set()
    for _ in range(KILLS):
        with subprocess.Popen([sys.executable, "-c", WORK, path, *sources], stdout=subprocess.PIPE) as child:
            assert child.stdout
            assert child.stdout.readline() == b"begins\n"
            time.sleep(rng.random() * 0.25)  # anywhere in its work: the instant is what is tested
            child.kill()
        with LayerStore(path) as store:
            check(store)
            begun.add(len(store.list()))
    assert len(begun) > 1  # it was killed in the midst of different states
    with LayerStore(path) as store:
        layer = Importer(Builder(store)).load(
            f"oci:{sources[0]}", Wanted(name="last:1", kind="base"), platform="linux/amd64"
        )
        store.verify(layer.digest)
        for name in [found.name for found in store.list() if found.name]:
            store.remove(name)
        store.collect(grace_s=-1)
        assert not any(store.files.iterdir()) and not any(store.blobs.iterdir())


def check(store: LayerStore) -> None:
    """What has a row is whole; what is on the disk has a row."""
    assert not any(store.tmp.iterdir())
    known: set[str] = set()
    for layer in store.list():
        store.verify(layer.digest)
        for one in store.expand([layer]):
            known |= {one.digest, *(blob.digest for blob in one.blobs)}
        known |= {layer.digest, *(blob.digest for blob in layer.blobs)}
    on_disk = {p.name.partition(".")[0] for d in (store.files, store.blobs) for p in d.iterdir()}
    assert on_disk == known
