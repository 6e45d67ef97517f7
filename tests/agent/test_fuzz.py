"""The C parsers under AddressSanitizer and UndefinedBehaviorSanitizer, against mutated input."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fuzzer() -> Path:
    subprocess.run(["make", "-s", "-C", str(ROOT / "agent"), "fuzz"], check=True)
    return ROOT / "build" / "fuzz"


@pytest.mark.parametrize("seed", range(4))
def test_parsers(fuzzer: Path, seed: int) -> None:
    done = subprocess.run([fuzzer, str(seed), "50000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "50000 inputs\n"
