"""A real aether, entered by the real launcher, with a small root of the host's own programs."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.agent.wire import Wire
from tests.backends.conftest import Rig, make_rig, pytest_asyncio_loop_factories
from tests.backends.root import build_root, image_of

from dsec.backends.base import Handle, LayerRef

__all__ = ["pytest_asyncio_loop_factories"]
PASSWD = (
    "root:x:0:0:root:/root:/bin/bash\n"
    "user:x:1000:1000:A User:/home/user:/bin/sh\n"
    "many:x:1001:1000::/home/many:/bin/sh\n"
    "broken line\n:::::\nodd:x:notanumber:1:::\n"
)
GROUP = "root:x:0:\nuser:x:1000:\nwheel:x:10:many,user\naudio:x:29:many\nbroken\n"
EXTRA = ("setsid", "stty", "mkfifo", "nohup", "sha256sum", "tty", "rmdir")


@pytest.fixture(scope="session")
def agent_layer(tmp_path_factory: pytest.TempPathFactory) -> LayerRef:
    where = tmp_path_factory.mktemp("agent")
    root = where / "root"
    build_root(root, {f"/bin/{n}": Path(os.path.realpath(p)) for n in EXTRA if (p := shutil.which(n))})
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text(GROUP)
    (root / "home/many").mkdir(mode=0o700)
    (root / "root/secret").mkdir(mode=0o700)
    (root / "root").chmod(0o700)
    (root / "etc/profile").write_text("echo a profile was read\nexport PROFILE=read\n")
    (root / "root/.bashrc").write_text("echo a bashrc was read\n")
    (root / "opt").mkdir()
    _script(root / "opt/script", "#!/bin/sh\necho script $1\n")
    _script(root / "opt/no-interpreter", "#!/no/such/interpreter\n")
    _script(root / "opt/garbage", "\x01\x02\x03 not a program\n")
    _script(root / "opt/not-executable", "#!/bin/sh\n", 0o644)
    return image_of(root, where / "agent.erofs")


def _script(path: Path, text: str, mode: int = 0o755) -> None:
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture
async def rig(tmp_path: Path, agent_layer: LayerRef) -> AsyncIterator[Rig]:
    async for made in make_rig("fd", tmp_path, agent_layer):
        yield made


@pytest.fixture
async def launched(rig: Rig) -> AsyncIterator[tuple[Handle, Wire]]:
    handle, sock = await rig.launch(pids_limit=128, memory_limit_mb=128, env={"FROM_IMAGE": "yes"})
    async with Wire(sock) as wire:
        yield handle, wire


@pytest.fixture
def wire(launched: tuple[Handle, Wire]) -> Wire:
    return launched[1]
