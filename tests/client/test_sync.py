"""The sync twin: up to date, and the same behaviour without await."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.apiserver.stack import StackServer, args

from dsec.client import sync
from dsec.core import errors

ROOT = Path(__file__).resolve().parents[2]


def test_up_to_date() -> None:
    script = ROOT / "scripts/generate_sync.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def use(url: str, token: str, tmp_path: Path) -> None:
    with sync.DSecClient(url=url, token=token) as client:
        sandbox = client.run_container(args(task="sync"))
        assert sandbox.run_shell("cd /tmp; echo hello").stdout_text == "hello\n"
        with pytest.raises(errors.ProgramNotFound):
            sandbox.exec(["/none"])
        command = sandbox.exec(["/bin/cat"], stdin=True, background=True)
        assert isinstance(command, sync.Command)
        command.send_stdin("in\n")
        command.close_stdin()
        assert b"".join(c.data for c in command.stream()) == b"in\n"
        assert sandbox.operation(command.op_id).wait().ok
        got: list[bytes] = []
        assert sandbox.run_shell("echo called", on_stdout=got.append).ok
        assert got == [b"called\n"]
        sandbox.files.write("/tmp/f", b"x")
        assert sandbox.files.read("/tmp/f") == b"x"
        assert b"".join(sandbox.files.stream("/tmp/f")) == b"x"
        assert sandbox.files.download("/tmp/f", tmp_path / "f").bytes == 1
        assert [s.id for s in client.list_sandboxes(task="sync")] == [sandbox.id]
        with sandbox.pty(["/bin/cat"]) as terminal:
            terminal.send("key\n")
            assert b"key" in next(iter(terminal))
        many = client.run_many(args(), count=5)
        first = next(many)
        assert isinstance(first, sync.Sandbox)
        assert sum(1 for _ in many) == 4

        def wrong(data: bytes) -> None:
            sandbox.run_shell("true")

        with pytest.raises(errors.InvalidArgument, match="callback"):
            sandbox.run_shell("echo x", on_stdout=wrong)
        assert client.get_sandbox(sandbox.id).refresh().state == "running"
        with sandbox:
            pass
        assert sandbox.info.state == "stopped"
    assert not [t for t in threading.enumerate() if t.name == "dsec-client"]


async def test_use(server: StackServer, tmp_path: Path) -> None:
    await asyncio.to_thread(use, server.url, server.token, tmp_path)
