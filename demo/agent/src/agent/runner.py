"""Runs tests in a forked child, so that pytest is loaded once and no edit stays imported."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

CPU_LIMIT_S = 2
WALL_LIMIT_S = 30
"""Of one run: an edit may well make an endless loop, or wait for ever."""


class Outcome(NamedTuple):
    passed: bool
    failed: list[str]
    reached: dict[str, list[int]]
    """Lines of the package's files, where they were asked for."""


class _Watch:
    """A plugin: notes what failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


def run(tests: list[str], *, trace: Path | None = None, quiet: bool = True, limited: bool = True) -> Outcome:
    """The tests' outcome. `trace`: a file or directory; which of its lines are executed is wanted."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(tests, trace, quiet, limited, write)
    os.close(write)
    with open(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:  # the alarm, or the kernel, ended it
        return Outcome(False, tests, {})
    return Outcome(*json.loads(text))


def _child(tests: list[str], trace: Path | None, quiet: bool, limited: bool, write: int) -> None:
    if limited:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    if quiet:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    watch, reached = _Watch(), dict[str, set[int]]()
    if trace:
        sys.settrace(_tracer(str(trace), reached))
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests], plugins=[watch])
    sys.settrace(None)
    outcome = Outcome(status == 0, watch.failed, {k: sorted(v) for k, v in reached.items()})
    with open(write, "w") as answer:
        answer.write(json.dumps(outcome))
    os._exit(0)


def _tracer(root: str, reached: dict[str, set[int]]) -> Any:
    def enter(frame: FrameType, event: str, arg: object) -> Any:
        # A module's own frame is its import: every test reaches that.
        path = frame.f_code.co_filename
        return line if path.startswith(root) and frame.f_code.co_name != "<module>" else None

    def line(frame: FrameType, event: str, arg: object) -> Any:
        reached.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return line

    return enter
