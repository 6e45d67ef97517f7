"""python3 -m agent: look for the edit with which the failing tests pass.

Prints one JSON object a step, so that whoever drives it can follow: {"step": ..., ...}.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from agent.grep import named
from agent.mutate import Edit, edits
from agent.runner import run
from agent.tempers import WRONG


def say(step: str, **what: Any) -> None:
    print(json.dumps({"step": step, **what}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="agent")
    parser.add_argument("tests", nargs="+", help="Those that fail.")
    parser.add_argument("--package", type=Path, required=True, help="Directory or file of the source.")
    parser.add_argument("--issue", default="", help="What was reported.")
    parser.add_argument("--budget", type=int, default=12, help="Edits to try.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temper", choices=["careful", *WRONG], default="careful")
    options = parser.parse_args()

    before = run(options.tests, trace=options.package.resolve())
    say("ran", passed=before.passed, failed=before.failed)
    if before.passed:
        return 0
    candidates = propose(before.reached, options.issue, options.seed)
    say("read", files=sorted(before.reached), edits=len(candidates))
    if not candidates:
        return 1
    if options.temper != "careful":
        say("said", text=WRONG[options.temper](candidates, options.tests))
        return 0
    return solve(candidates[: options.budget], options.tests)


def propose(reached: dict[str, list[int]], issue: str, seed: int) -> list[Edit]:
    """Edits of the lines that the failing tests reach: first where the issue points, else in no order."""
    found = [edit for path, lines in sorted(reached.items()) for edit in edits(Path(path), set(lines))]
    random.Random(seed).shuffle(found)
    hot = {Path(path): named(issue, Path(path)) for path in reached}
    return sorted(found, key=lambda edit: edit.line not in hot[edit.path])


def solve(candidates: list[Edit], tests: list[str]) -> int:
    """Tries one after the other; leaves the first with which the tests pass."""
    for tried, edit in enumerate(candidates, 1):
        text = edit.apply()
        if run(tests).passed:
            say("edited", edit=str(edit), tried=tried)
            return 0
        edit.path.write_text(text)
    say("gave up", tried=len(candidates))
    return 1


if __name__ == "__main__":
    sys.exit(main())
