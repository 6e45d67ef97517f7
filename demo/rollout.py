"""One rollout: an agent in a fresh sandbox, and the reward."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

from tasks import Task

from dsec.client import CommandResult, DSecError, Sandbox

AGENT_LIMIT_S = 45
GRADE_LIMIT_S = 120
OUTPUT_LIMIT = 1 << 20
MEMORY_MB = 256
JUNIT = "/tmp/reward.xml"

OUTCOMES = ("solved", "wrong fix", "gave up", "cheated", "hung", "out of memory", "flooded", "error")
OF_REASON = {"timed_out": "hung", "oom": "out of memory", "output_limit": "flooded"}

# One in ... of the agents goes wrong in each of these ways.
TEMPERS = (("hang", 50, 7), ("hoard", 25, 11), ("flood", 25, 13), ("careless", 20, 3), ("cheat", 25, 17))
EXPECTED = {"hang": "hung", "hoard": "out of memory", "flood": "flooded", "cheat": "cheated"}


@dataclass
class Rollout:
    """What came of it."""

    task: Task
    number: int
    temper: str
    outcome: str = "error"
    reward: float = 0.0
    passed: int = 0
    failed: int = 0
    tried: int = 0
    detail: str = ""
    seconds: float = 0.0
    execs: list[float] = field(default_factory=list)
    """Seconds of short commands, as the caller sees them."""
    memory_peak: int | None = None


def temper_of(number: int) -> str:
    return next((name for name, every, which in TEMPERS if number % every == which), "careful")


async def rollout(sandbox: Sandbox, task: Task, number: int) -> Rollout:
    """Runs the agent, then grades what it left. Never raises a DSecError."""
    result = Rollout(task, number, temper_of(number))
    begin = time.monotonic()
    try:
        await shell(sandbox, result, "git log -1 --format=%s")
        agent = await run_agent(sandbox, task, number, result.temper)
        note(result, agent)
        if agent.reason in OF_REASON:
            result.outcome = OF_REASON[agent.reason]
            result.detail = agent.summary
        else:
            await grade(sandbox, task, result, agent)
        result.memory_peak = (await sandbox.stats()).memory_peak_bytes
    except DSecError as e:
        result.outcome, result.detail = "error", f"{e.code}: {e.message}"
    result.seconds = time.monotonic() - begin
    return result


async def run_agent(sandbox: Sandbox, task: Task, number: int, temper: str) -> CommandResult:
    argv = [
        "agent",
        "--package",
        task.source,
        "--issue",
        task.issue,
        "--seed",
        str(number),
        "--temper",
        temper,
    ]
    return await sandbox.exec(
        [*argv, *task.failing[:2]],
        cwd=task.directory,
        timeout=AGENT_LIMIT_S,
        output_limit=OUTPUT_LIMIT,
        kill_at_limit=True,
    )


def note(result: Rollout, agent: CommandResult) -> None:
    """What the agent said of itself."""
    for line in agent.stdout_text.splitlines()[:50]:
        try:
            step = json.loads(line)
        except ValueError:
            return
        result.tried = step.get("tried", result.tried)
        result.detail = step.get("edit") or step.get("text") or result.detail


async def grade(sandbox: Sandbox, task: Task, result: Rollout, agent: CommandResult) -> None:
    """The reward: the share of the tests that pass, once the tests are those of the task again.

    The status is the one that waitpid gave, which what runs inside cannot forge; counts are the report's.
    """
    changed = set((await shell(sandbox, result, "git diff --name-only HEAD")).split())
    tampered = sorted(changed & set(task.test_files))
    if tampered:
        await shell(sandbox, result, f"git checkout -q HEAD -- {' '.join(tampered)}")
    tests = await sandbox.exec(
        [
            "python3",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            f"--junitxml={JUNIT}",
            *task.tests,
        ],
        cwd=task.directory,
        timeout=GRADE_LIMIT_S,
        output_limit=OUTPUT_LIMIT,
    )
    solved = tests.reason == "exited" and tests.exit_code == 0
    if tests.reason == "exited" and tests.exit_code in (0, 1):
        result.passed, result.failed = counts(await sandbox.files.read(JUNIT))
        result.reward = result.passed / max(1, result.passed + result.failed)
    if solved:
        result.outcome = "solved"
    elif tampered:
        result.outcome, result.detail = "cheated", f"edited {', '.join(tampered)}"
    elif tests.reason in OF_REASON:
        result.outcome, result.detail = "wrong fix", f"the tests: {tests.summary}; {result.detail}"
    else:
        result.outcome = "gave up" if agent.exit_code else "wrong fix"


def counts(report: bytes) -> tuple[int, int]:
    """Tests that passed, and that did not, of a JUnit report."""
    suite = ElementTree.fromstring(report).find("testsuite")
    assert suite is not None
    total, bad, skipped = (
        sum(int(suite.get(key, 0)) for key in keys)
        for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return total - bad - skipped, bad


async def shell(sandbox: Sandbox, result: Rollout, command: str) -> str:
    begin = time.monotonic()
    done = await sandbox.run_shell(command, timeout=60)
    result.execs.append(time.monotonic() - begin)
    return done.stdout_text
