"""Exit statuses of the `dsec` command itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

DSEC = [sys.executable, "-m", "dsec.cli.main"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--version"], 0, "dsec, version"),
        (["layer", "--help"], 0, "Usage:"),
        (["nosuch"], 2, "No such command"),
        (["layer", "show"], 2, "Missing argument"),
        (["ps", "--url", "http://127.0.0.1:1"], 125, "dsec: unavailable:"),
    ],
)
def test_statuses(words: list[str], status: int, said: str) -> None:
    done = subprocess.run([*DSEC, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
