"""How long it takes, and how much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import io, json, random, resource, stat, sys, time
from dsec.layers.erofs.reader import read
from dsec.layers.erofs.tree import Blob, Extent, File, Span, Tree
from dsec.layers.erofs.writer import write

def rss():
    """In MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def made(files):
    rng = random.Random(1)
    tree = Tree(blobs=[Blob("a" * 64, 1 << 30)], spools=[io.BytesIO(bytes(1 << 20))])
    at = 0
    for number in range(files):
        if number % 20 == 0:
            here = tree.make_directories(b"package%d/directory%d" % (number // 1000, number // 20))
        size = min(int(rng.lognormvariate(8, 1.5)), 1 << 20)
        blocks, tail = divmod(size, 4096) if size > 3072 else (0, size)
        if tail > 3072:
            blocks, tail = blocks + 1, 0
        here.children[b"file_%d.py" % number] = File(
            stat.S_IFREG | 0o644, 1000, 1000, 1_700_000_000_000_000_000 + number, size=size,
            extents=(Extent(0, at, blocks),) if blocks else (),
            tail=Span(0, rng.randrange(1 << 19), tail) if tail > 64 else bytes(tail),
        )
        at += blocks
    return tree

what, files, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tree = made(files) if what == "write" else None
before = rss()
started = time.process_time()
with open(path, "wb" if what == "write" else "rb") as image:
    if tree:
        write(tree, image, uuid=bytes(16))
    else:
        tree = read(image)
print(json.dumps({"us": (time.process_time() - started) * 1e6 / files, "rss": rss(), "before": before}))
'''


def measured(what: str, files: int, image: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what, str(files), str(image)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    result: dict[str, float] = json.loads(done.stdout)
    print(
        f"{what} {files} files: {result['us']:.1f} us each, {result['rss']:.0f} MiB at most", file=sys.stderr
    )
    return result


def test_fifty_thousand_files(tmp_path: Path) -> None:
    """Bounds far above what it takes, so that a busy machine does not fail it."""
    for what in ("write", "read"):
        assert measured(what, 50_000, tmp_path / "image")["us"] < 100


@pytest.mark.slow
def test_a_million_files(tmp_path: Path) -> None:
    for what in ("write", "read"):
        result = measured(what, 1_000_000, tmp_path / "image")
        assert result["us"] < 40 and result["rss"] < 600
        assert what == "read" or result["rss"] - result["before"] < 100
