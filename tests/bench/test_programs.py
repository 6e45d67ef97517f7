"""The C programs that the product is compared with: they work, say what they did, and leave nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import tools


def groups() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob("*/dsec-limit-*")) | set(
        Path("/sys/fs/cgroup").glob("dsec-limit-*")
    )


def loops(below: Path) -> set[str]:
    """Of this test alone: others may come and go on a shared machine."""
    files = {path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")}
    return {name for name in files if name.startswith(str(below))}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tools, "CACHE", tmp_path)
    return tmp_path


@pytest.fixture
def layers(cache, monkeypatch) -> list[Path]:
    """Two small images; the lower one has the mount points."""
    base = cache / "base"
    for name in ("proc", "dev", "sys", "etc"):
        (base / name).mkdir(parents=True)
    upper = cache / "upper"
    (upper / "workspace").mkdir(parents=True)
    images = []
    for source in (base, upper):
        image = cache / f"{source.name}.erofs"
        tools.run("mkfs.erofs", image, source)
        images.append(image)
    monkeypatch.setattr(tools, "erofs_layers", lambda: images)
    return images


def test_spawn_limit(cache):
    found = tools.spawn_limit(50, 8)
    assert found["count"] == 50 and found["concurrency"] == 8
    assert found["rate"] > 0 and found["p50_ms"] > 0


def test_spawn_limit_says_when_the_program_fails(cache):
    done = subprocess.run(
        [tools.program("spawn_limit"), "--count", "3", "/bin/false"], capture_output=True, check=False
    )
    assert done.returncode == 1 and b"failed" in done.stderr


@pytest.mark.kernel
@pytest.mark.parametrize("options", [[], ["--full"], ["--cycle"]])
def test_limit(layers, options, tmp_path):
    before = groups()
    found = tools.limit(20, 4, options)
    assert (found["count"], found["jobs"], found["layers"]) == (20, 4, 2)
    assert found["rate"] > 0 and found["p50_ms"] <= found["p99_ms"]
    assert groups() == before and not loops(tmp_path)


@pytest.mark.kernel
def test_limit_that_fails_ends_and_leaves_nothing(layers, tmp_path):
    before = groups()
    layers.append(layers[0].with_name("absent.erofs"))
    with pytest.raises(tools.Unavailable, match=r"absent\.erofs"):
        tools.limit(5, 2)
    assert groups() == before and not loops(tmp_path)


@pytest.mark.kernel
def test_limit_whose_sandboxes_fail_ends_and_leaves_nothing(layers, tmp_path, monkeypatch):
    """A root with no /proc to mount on: PID 1 fails inside."""
    before = groups()
    monkeypatch.setattr(tools, "erofs_layers", lambda: layers[1:])
    with pytest.raises(tools.Unavailable, match="mount"):
        tools.limit(5, 2)
    assert groups() == before and not loops(tmp_path)
