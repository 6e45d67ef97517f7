"""Ways in which agents go wrong. Each does in earnest what real ones do by accident."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from agent.mutate import Edit
from agent.runner import run


def careless(candidates: list[Edit], tests: list[str]) -> str:
    """Takes the first idea and does not look whether it helps."""
    candidates[0].apply()
    return f"done: {candidates[0]}"


def cheat(candidates: list[Edit], tests: list[str]) -> str:
    """Makes the tests agree with the code."""
    for path in {Path(test.partition("::")[0]) for test in tests}:
        path.write_text("def test_everything():\n    assert True\n")
    return "done: all tests pass"


def hang(candidates: list[Edit], tests: list[str]) -> str:
    """Puts a lock that nobody opens where the tests come by, and runs them without a limit."""
    edit = candidates[0]
    lines = edit.path.read_text().splitlines(keepends=True)
    text = lines[edit.line - 1]
    indent = text[: len(text) - len(text.lstrip())]
    lines.insert(edit.line - 1, f"{indent}__import__('threading').Event().wait()\n")
    edit.path.write_text("".join(lines))
    run(tests, limited=False)
    threading.Event().wait()  # an edit that broke the syntax ended the run: hang all the same
    return "never said"


def hoard(candidates: list[Edit], tests: list[str]) -> str:
    """Keeps all that it reads, for ever."""
    memory: list[str] = []
    source = candidates[0].path.read_text()
    while True:
        memory.append(source + str(len(memory)))


def flood(candidates: list[Edit], tests: list[str]) -> str:
    """Thinks aloud, without end."""
    source = candidates[0].path.read_text()
    while True:
        sys.stdout.write(source)


WRONG = {"careless": careless, "cheat": cheat, "hang": hang, "hoard": hoard, "flood": flood}
