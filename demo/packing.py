"""One solved sandbox becomes an environment: packed, tried, and started anew."""

from __future__ import annotations

from dataclasses import dataclass

from rollout import GRADE_LIMIT_S
from tasks import Task

from dsec.client import DSecClient, DSecContainerRunArgs, DSecError, Sandbox


@dataclass
class Environment:
    """What was packed, and what a sandbox of it said."""

    task: Task
    name: str
    bytes: int = 0
    """Of the layer."""
    frozen_ms: float = 0.0
    left_out: int = 0
    findings: int = 0
    detail: str = ""
    """Why it failed; empty when the tests pass in a sandbox of it."""


async def pack(sandbox: Sandbox, task: Task) -> Environment:
    """Takes what the agent has changed as a layer. Never raises a DSecError."""
    made = Environment(task, f"solved/{task.package}:1")
    try:
        packed = await sandbox.pack_diff(
            made.name,
            smoke=f"cd {task.directory} && git status --short",
            keep=[task.directory.strip("/") + "/**"],
        )
    except DSecError as e:
        made.detail = f"{e.code}: {e.message}"
        return made
    made.bytes, made.left_out = packed.layer.total, packed.left_out
    made.frozen_ms, made.findings = packed.frozen_s * 1e3, len(packed.findings)
    return made


async def try_out(client: DSecClient, made: Environment, args: DSecContainerRunArgs) -> None:
    """A new sandbox of it: the fix is there, and the tests pass with no agent."""
    if made.detail:
        return
    args.container_image, args.layers = made.name, []
    task = made.task
    async with await client.run_container(args) as sandbox:
        changed = await sandbox.run_shell("git diff --name-only HEAD", cwd=task.directory)
        tests = await sandbox.exec(
            ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", *task.tests],
            cwd=task.directory,
            timeout=GRADE_LIMIT_S,
        )
    if tests.exit_code != 0 or not changed.stdout.strip():
        made.detail = f"a sandbox of it: {tests.summary}, changed: {changed.stdout_text.strip() or 'nothing'}"
