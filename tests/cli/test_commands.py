"""The `dsec` command, as a person or a script runs it, against a real server."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel


class Dsec:
    def __init__(self, url: str, token: str) -> None:
        self.environment = {**os.environ, "DSEC_URL": url, "DSEC_TOKEN": token, "COLUMNS": "200"}

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dsec.cli.main", *words]

    def __call__(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.argv(*words), input=stdin, capture_output=True, env=self.environment, timeout=60, check=False
        )


@pytest.fixture
def dsec(server):
    return Dsec(server.url, server.token)


@pytest.fixture
def sandbox_id(dsec):
    made = dsec("run", "-d", "base")
    assert made.returncode == 0, made.stderr
    sandbox_id = made.stdout.decode().strip()
    yield sandbox_id
    assert dsec("stop", sandbox_id).returncode == 0


def test_run_shows_output_and_status(dsec):
    done = dsec("run", "base", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    done = dsec("run", "--timeout", "0.3", "base", "sleep", "60")
    assert done.returncode == 124 and b"timed_out" in done.stderr
    done = dsec(
        "run", "-e", "A=b c", "-u", "daemon", "-w", "/usr", "base", "sh", "-c", "echo $A; id -un; pwd"
    )
    assert done.stdout == b"b c\ndaemon\n/usr\n"
    listed = json.loads(dsec("ps", "--json").stdout)
    assert listed == []


def test_errors_are_one_line_and_a_status(dsec):
    done = dsec("run", "no-such-image", "true")
    assert done.returncode == 125 and done.stderr.startswith(b"dsec: unknown_layer:")
    done = dsec("exec", "sbx-wrong-aaaaaaaaaaaa", "true")
    assert done.returncode == 125 and b"Traceback" not in done.stderr
    assert dsec("stop").returncode == 2
    assert dsec("run", "--env", "broken", "base", "true").returncode == 2


def test_exec_ps_logs_top(dsec, sandbox_id):
    large = os.urandom(1 << 20)
    assert dsec("exec", "-i", sandbox_id, "cat", stdin=large).stdout == large
    assert dsec("exec", sandbox_id, "--", "sh", "-c", "exit 3").returncode == 3
    assert sandbox_id in dsec("ps").stdout.decode()
    assert [s["id"] for s in json.loads(dsec("ps", "--json").stdout)] == [sandbox_id]
    operations = json.loads(dsec("logs", "--json", sandbox_id).stdout)
    first = next(o for o in operations if "cat" in o["command"])
    assert dsec("logs", sandbox_id, first["op_id"]).stdout == large
    assert sandbox_id in dsec("top", "--once").stdout.decode()
    assert json.loads(dsec("top", "--json").stdout)["node"]["counts"]["running"] == 1


def test_cp(dsec, sandbox_id, tmp_path: Path):
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "file").write_bytes(b"content")
    (tree / "link").symlink_to("a/file")
    assert dsec("cp", str(tree), f"{sandbox_id}:/srv/tree").returncode == 0
    assert dsec("exec", sandbox_id, "cat", "/srv/tree/link").stdout == b"content"
    assert dsec("cp", f"{sandbox_id}:/srv/tree", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back" / "link").read_bytes() == b"content"
    assert dsec("cp", "a", "b").returncode == 2
    assert dsec("cp", f"{sandbox_id}:/absent", str(tmp_path / "x")).returncode == 125
    assert not (tmp_path / "x").exists()


def test_shell_is_a_terminal(dsec, sandbox_id):
    """Typed into a real terminal of ours: size, line editing, exit status; our terminal is put back."""
    leader, follower = pty.openpty()
    shell = subprocess.Popen(
        dsec.argv("shell", sandbox_id, "/bin/sh"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=dsec.environment,
        start_new_session=True,
    )
    try:
        seen = b""
        for typed, answer in (
            (b"tty; echo go$((1+1))\n", b"go2"),
            (b"stty size\n", b" "),
            (b"exit 9\n", b""),
        ):
            os.write(leader, typed)
            end = time.monotonic() + 30
            while answer not in seen and time.monotonic() < end:
                if select.select([leader], [], [], 1)[0]:
                    seen += os.read(leader, 65536)
            assert answer in seen, seen
        assert b"/dev/pts/" in seen
        assert shell.wait(timeout=30) == 9
    finally:
        shell.kill()
        shell.wait()
        os.close(leader)
        os.close(follower)


def test_doctor():
    done = subprocess.run(
        [sys.executable, "-m", "dsec.cli.main", "doctor", "--json"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    checks = {c["name"]: c for c in json.loads(done.stdout)}
    assert checks["kernel"]["verdict"] in ("ok", "lacks")
    assert all(c["cost"] for c in checks.values() if c["verdict"] != "ok")
    assert (done.returncode == 1) == any(c["verdict"] == "broken" for c in checks.values())


def test_two_servers_side_by_side_and_one_per_directory(server, tmp_path):
    second = subprocess.run(
        [sys.executable, "-m", "dsec.cli.main", "up", "--data", str(server.data), "--listen", "127.0.0.1:0"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1 and b"another server uses" in second.stderr
