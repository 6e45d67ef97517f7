"""Images whose /proc, /sys and /dev are odd: masks hold, or the launch is refused and undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.backends.conftest import Rig
from tests.backends.inside import Inside
from tests.backends.root import build_root, image_of

from dsec.backends.container import policy
from dsec.core.errors import LaunchFailed

pytestmark = pytest.mark.kernel


def _link(name: str, to: str) -> Callable[[Path], None]:
    return lambda tree: ((tree / name).rmdir(), (tree / name).symlink_to(to))[1]


def _file(name: str) -> Callable[[Path], None]:
    return lambda tree: ((tree / name).rmdir(), (tree / name).write_text("no directory"), None)[2]


ODD: dict[str, Callable[[Path], None]] = {
    **{
        f"/{name} is a link to {to}": _link(name, to)
        for name in ("proc", "sys", "dev")
        for to in ("/", "tmp")
    },
    **{f"/{name} is a link to nothing": _link(name, "nowhere") for name in ("proc", "sys", "dev")},
    **{f"/{name} is a file": _file(name) for name in ("proc", "sys", "dev")},
    "/proc is missing": lambda tree: (tree / "proc").rmdir(),
    "/proc is /dev": _link("proc", "dev"),
}
LOOK = r"""
for d in / /.. /proc /tmp /dev; do
  [ -e "$d/self/stat" ] || continue
  for f in kcore keys timer_list sched_debug; do
    [ -s "$d/$f" ] && [ "$(head -c 1 "$d/$f" 2>/dev/null | wc -c)" != 0 ] && echo "open: $d/$f"
  done
  (echo 1 >$d/sys/kernel/hostname) 2>/dev/null && echo "writable: $d/sys"
done
cd /.. && pwd && [ -e self/stat ] && echo "procfs over the root"
true
"""


@pytest.mark.parametrize("how", list(ODD))
async def test_odd_image(container: Rig, tmp_path: Path, how: str) -> None:
    build_root(tree := tmp_path / "tree")
    ODD[how](tree)
    image = image_of(tree, tmp_path / "odd.erofs")
    try:
        _, inside = await container.inside(layers=[image])
    except LaunchFailed as e:
        refused = str(e)
    else:
        refused = ""
    if refused:
        assert "entering the sandbox" in refused
        return
    seen = await inside.sh(LOOK)
    assert seen.stdout.decode().split() == ["/"], (how, seen)
    assert isinstance(inside, Inside) and policy.MASKED
