"""Makes the demo's layers: a base, a workspace for each task, a toolkit. Each is made once and kept.

The workspaces are made on the platform itself: sources go into a sandbox on the base layer, where the tests
are run with the fault and without it, and what comes out is the layer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from tasks import DEPENDENCIES, SRV, TASKS, Task

from dsec.client import DSecClient, DSecContainerRunArgs, Sandbox

HERE = Path(__file__).parent
INCLUDE = "python3,git"
DEBIAN_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
AUTHOR = {
    "GIT_AUTHOR_NAME": "dsec demo",
    "GIT_AUTHOR_EMAIL": "demo@localhost",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "dsec demo",
    "GIT_COMMITTER_EMAIL": "demo@localhost",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}
Say = Callable[[str], None]


class Layers:
    """The names of what was prepared."""

    def __init__(self, base: str, toolkit: str, workspaces: dict[str, str]) -> None:
        self.base = base
        self.toolkit = toolkit
        self.workspaces = workspaces
        self.tasks = [task for task in TASKS if task.package in workspaces]


def run(argv: list[str], env: dict[str, str] | None = None) -> str:
    """A command's output. Ends the demo with the command's words when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


class Unfit(Exception):
    """The tests of a task do not behave on this base as they should: another Python, for one."""


class Store:
    """The layer store, through the command line, as anybody would use it."""

    def __init__(self, data: Path) -> None:
        self._data = os.fspath(data)

    def _layer(self, *arguments: str) -> str:
        return run(
            [
                sys.executable,
                "-m",
                "dsec.cli.main",
                "layer",
                *arguments[:1],
                "--data",
                self._data,
                *arguments[1:],
            ]
        )

    def names(self) -> set[str]:
        return {layer["name"] for layer in json.loads(self._layer("ls", "--json"))}

    def build(self, name: str, *arguments: str) -> None:
        self._layer("build", *arguments, name)

    def build_from(self, name: str, source: Path, *arguments: str) -> None:
        self._layer("build", *arguments, name, os.fspath(source))


def suite() -> str:
    """This host's own suite on Debian, else Debian's where its keys are, else this host's."""
    host = platform.freedesktop_os_release()
    codename = host.get("VERSION_CODENAME", "bookworm")
    return codename if host.get("ID") == "debian" or not DEBIAN_KEYS.exists() else "bookworm"


def make_base(store: Store, suite: str, say: Say) -> str:
    name = f"demo/base:{suite}"
    if name not in store.names():
        say(f"base layer: {suite} with {INCLUDE}, by mmdebstrap")
        store.build(name, "--mmdebstrap", suite, "--include", INCLUDE)
    return name


def make_toolkit(store: Store, work: Path, say: Say) -> str:
    files = sorted(
        p for p in (HERE / "agent").rglob("*") if p.suffix == ".py" or (p.name == "agent" and p.is_file())
    )
    name = f"demo/agent:{digest(*(p.read_bytes() for p in files))}"
    if name in store.names():
        return name
    say("toolkit layer: the agent")
    tree = work / "toolkit"
    shutil.rmtree(tree, ignore_errors=True)
    for path in files:
        to = tree / "opt/agent" / path.relative_to(HERE / "agent")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        to.chmod(0o755 if path.parent.name == "bin" else 0o644)
    for path in (*tree.rglob("*"), tree):
        os.utime(path, (0, 0))
    store.build_from(name, tree, "--kind", "toolkit", "-e", "PATH=/opt/agent/bin:${PATH}")
    shutil.rmtree(tree)
    return name


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def workspace_name(task: Task, base: str) -> str:
    recipe = digest(repr(task).encode(), task.patch.read_bytes(), base.encode(), Path(__file__).read_bytes())
    return f"demo/{task.package}:{recipe}"


async def make_workspaces(
    client: DSecClient, store: Store, base: str, work: Path, say: Say
) -> dict[str, str]:
    there = store.names()
    names: dict[str, str] = {}
    for task in TASKS:
        name = workspace_name(task, base)
        if name not in there:
            say(f"workspace layer: {task.package} {task.version}, its tests and dependencies, and the fault")
            try:
                archive = await make_workspace(client, base, task, work)
            except Unfit as e:
                say(f"left out: {e}")
                continue
            environment = [f"PYTHONPATH={DEPENDENCIES}", "PYTHONDONTWRITEBYTECODE=1"]
            options = [x for e in environment for x in ("-e", e)] + ["-w", task.directory]
            await asyncio.to_thread(store.build_from, name, archive, "--kind", "workspace", *options)
            archive.unlink()
        names[task.package] = name
    if not names:
        raise SystemExit("no task is fit for this suite")
    return names


async def make_workspace(client: DSecClient, base: str, task: Task, work: Path) -> Path:
    """A tar archive of the workspace's tree, checked on the base layer."""
    upload = await asyncio.to_thread(fetch, task, work)
    args = DSecContainerRunArgs(container_image=base, task=f"prepare-{task.package}", ttl_max=1800)
    async with await client.run_container(args) as sandbox:
        await sandbox.files.write("/tmp/in.tar", upload.read_bytes())
        await sandbox.files.write("/tmp/fault.patch", task.patch.read_bytes())
        await shell(
            sandbox, f"tar -C {SRV} -xf /tmp/in.tar && cd {task.directory} && git apply -R /tmp/fault.patch"
        )
        await check(sandbox, task, expect=())
        await shell(sandbox, "git apply /tmp/fault.patch")
        await check(sandbox, task, expect=task.failing)
        # Compiled now, so that no rollout has to; pytest keeps what it makes of the tests as well.
        await shell(sandbox, f"python3 -m compileall -q {SRV}; git status --porcelain --untracked-files=no")
        await check(sandbox, task, expect=task.failing, compiled=True)
        await shell(sandbox, f"tar -C / -cf /tmp/out.tar {SRV[1:]}")
        archive = work / f"{task.package}.tar"
        archive.write_bytes(await sandbox.files.read("/tmp/out.tar"))
    upload.unlink()
    return archive


async def shell(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run_shell(command, timeout=300)
    if not result.ok:
        raise SystemExit(f"{command}\n{result.summary}:\n{result.stdout_text}{result.stderr_text}")
    return result.stdout_text


async def check(sandbox: Sandbox, task: Task, expect: tuple[str, ...], *, compiled: bool = False) -> None:
    """That exactly these tests fail: a task whose fault does not show, or hides another, is none."""
    argv = ["python3", "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=no", *task.tests]
    env = {"PYTHONPATH": DEPENDENCIES}
    if not compiled:  # two versions of a file, of one size and one second, look alike to Python
        env["PYTHONDONTWRITEBYTECODE"] = "1"
    result = await sandbox.exec(argv, cwd=task.directory, env=env, timeout=300)
    lines = result.stdout_text.splitlines()
    failed = {line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))}
    if failed != set(expect) or result.exit_code != (1 if expect else 0):
        raise Unfit(
            f"{task.package} {task.version}: expected to fail: {sorted(expect)}; failed: {sorted(failed)} "
            f"({result.summary})\n{result.stdout_text[-2000:]}{result.stderr_text[-2000:]}"
        )


def fetch(task: Task, work: Path) -> Path:
    """The package's source distribution with the fault, its dependencies beside it, as a tar archive."""
    tree = work / f"tree-{task.package}"
    shutil.rmtree(tree, ignore_errors=True)
    source = tree / task.package
    source.mkdir(parents=True)
    run(
        [
            "tar",
            "-xzf",
            os.fspath(sdist(task, work)),
            "-C",
            os.fspath(source),
            "--strip-components=1",
            "--no-same-owner",
        ]
    )
    git = ["git", "-C", os.fspath(source), "-c", "core.autocrlf=false"]
    environment = {**os.environ, **AUTHOR}
    run([*git, "init", "-q", "-b", "main"])
    for setting in ("core.trustctime=false", "core.checkStat=minimal", "gc.auto=0"):
        run([*git, "config", *setting.split("=")])
    run([*git, "apply", os.fspath(task.patch)])
    (source / ".git/info/exclude").write_text("__pycache__/\n*.pyc\n")
    run([*git, "add", "--all", "--force"], env=environment)
    run([*git, "commit", "-q", "-m", f"{task.package} {task.version}"], env=environment)
    pip(
        "install",
        "--no-deps",
        "--no-compile",
        "--target",
        os.fspath(tree / Path(DEPENDENCIES).name),
        *task.dependencies,
    )
    archive = work / f"{task.package}.in.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(tree, ".", filter=_owned_by_root)
    shutil.rmtree(tree)
    return archive


def _owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def sdist(task: Task, work: Path) -> Path:
    """Downloaded once."""
    cache = work / "sdists"
    pattern = f"{task.package.replace('-', '[-_]')}-{task.version}.tar.gz"
    if not list(cache.glob(pattern)):
        beside = work / "sdists.new"
        shutil.rmtree(beside, ignore_errors=True)
        pip(
            "download",
            "--no-deps",
            "--no-binary",
            task.package,
            "-d",
            os.fspath(beside),
            f"{task.package}=={task.version}",
        )
        cache.mkdir(exist_ok=True)
        for path in beside.iterdir():
            path.rename(cache / path.name)
    return next(cache.glob(pattern))


def pip(*arguments: str) -> None:
    run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments])
