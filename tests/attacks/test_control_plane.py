"""Root inside a sandbox against the control plane of a whole server."""

from __future__ import annotations

import asyncio

import pytest
from tests.e2e.host import footprint

from dsec.client import DSecClient, DSecContainerRunArgs
from dsec.core import errors

pytestmark = pytest.mark.kernel


@pytest.fixture
async def client(server):
    async with DSecClient(url=server.url, token=server.token) as client:
        yield client


@pytest.fixture
async def sandbox(client):
    sandbox = await client.run_container(
        DSecContainerRunArgs(container_image="base", memory_limit_mb=128, pids_limit=64)
    )
    yield sandbox
    await sandbox.stop()


@pytest.fixture
async def neighbour(client):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="base"))
    yield sandbox
    assert (await sandbox.exec(["/bin/echo", "unharmed"])).stdout == b"unharmed\n"
    await sandbox.stop()


async def attempt(sandbox, script: str):
    """Runs the attack as root inside; aether must answer afterwards."""
    result = await sandbox.exec(["/bin/bash", "-c", script], timeout=30)
    assert (await sandbox.exec(["/bin/echo", "alive"])).stdout == b"alive\n"
    return result


@pytest.mark.parametrize("number", [1, 2, 3, 6, 9, 11, 15, 19, 20, 34, 63, 64])
async def test_signals(sandbox, neighbour, number):
    await attempt(sandbox, f"kill -{number} 1; kill -{number} -1 & wait")


SYSCALLS = """
require 'syscall.ph' if 0;
my ($nr, @args) = map { $_ + 0 } @ARGV;
my $r = syscall($nr, @args);
print $r == -1 ? "errno " . ($! + 0) : "result $r", "\\n";
"""


async def call(sandbox, number: int, *args: int) -> str:
    """One system call by number, as root inside: 'errno N' or 'result N'."""
    padded = [str(a) for a in args]
    done = await sandbox.exec(["perl", "-e", SYSCALLS, str(number), *padded])
    assert not done.stderr, done.stderr
    return done.stdout_text.strip()


PTRACE, SETPRIORITY, SCHED_SETAFFINITY, PRLIMIT64, IOPRIO_SET, PROCESS_VM_READV = 101, 141, 203, 302, 251, 310
PIDFD_OPEN, PIDFD_GETFD, SCHED_SETSCHEDULER, KCMP, MIGRATE_PAGES = 434, 438, 144, 312, 256


async def test_trace_and_limits(sandbox, neighbour):
    """ptrace ATTACH and SEIZE, kcmp, prlimit, affinity, priority, scheduler of PID 1."""
    refused = {"errno 1", "errno 3", "errno 13", "errno 38"}
    assert await call(sandbox, PTRACE, 16, 1, 0, 0) in refused
    assert await call(sandbox, PTRACE, 0x4206, 1, 0, 0) in refused
    assert await call(sandbox, KCMP, 1, 1, 0, 0, 0) in refused
    assert await call(sandbox, MIGRATE_PAGES, 1, 0, 0, 0) in refused
    script = r"""
        ulimit -c 0
        prlimit --pid 1 --cpu=1:1 && echo LIMITED
        prlimit --pid 1 --nofile=3:3 && echo LIMITED
        taskset -p 1 1 && echo AFFINITY
        renice -n 19 -p 1 && echo PRIORITY
        chrt -i -p 0 1 && echo SCHEDULER
        ionice -c 3 -p 1 && echo IO
    """
    result = await attempt(sandbox, script)
    for word in ("LIMITED", "AFFINITY", "SCHEDULER"):
        assert word not in result.stdout_text
    # A lower priority of aether is what `renice` could do; it is refused as well.
    assert "PRIORITY" not in result.stdout_text


async def test_memory_and_descriptors_of_pid_1(sandbox, neighbour):
    script = r"""
        for f in mem environ maps auxv syscall stack exe; do
            cat /proc/1/$f >/dev/null 2>&1 && [ -s /proc/1/$f ] && echo "READ $f"
        done
        head -c 1 /proc/1/mem 2>/dev/null && echo "READ mem"
        printf x 2>/dev/null > /proc/1/mem && echo "WROTE mem"
        ls /proc/1/fd/ 2>/dev/null | grep . && echo "READ fd"
        ls /proc/1/root/ 2>/dev/null | grep . && echo "READ root"
        readlink /proc/1/exe /proc/1/cwd /proc/1/ns/mnt && echo "READ links"
        echo 1000 2>/dev/null > /proc/1/oom_score_adj && echo "WROTE oom"
        printf x 2>/dev/null > /proc/1/exe && echo "WROTE exe"
        nsenter -t 1 -m -p true 2>/dev/null && echo "ENTERED"
        true
    """
    result = await attempt(sandbox, script)
    found = [
        line for line in result.stdout_text.splitlines() if line.startswith(("READ", "WROTE", "ENTERED"))
    ]
    assert not found


async def test_sockets_and_host_files_cannot_be_reached(server, sandbox, neighbour):
    data = str(server.data)
    script = f"""
        ls -d {data} 2>/dev/null && echo "SAW data"
        cat /proc/net/unix | grep -q '{sandbox.id}' && cat /proc/net/unix
        find / -xdev -name '*{sandbox.id}*' 2>/dev/null
        find / -xdev -type s 2>/dev/null
        mount -t tmpfs x /mnt 2>/dev/null && echo MOUNTED
        umount /proc 2>/dev/null && echo UNMOUNTED
        unshare -U true 2>/dev/null && echo UNSHARED
        mknod /tmp/disk b 254 0 2>/dev/null && head -c 1 /tmp/disk 2>/dev/null && echo DISK
        mknod /tmp/mem c 1 1 2>/dev/null && head -c 1 /tmp/mem && echo MEM
        echo x 2>/dev/null > /proc/sys/kernel/core_pattern && echo CORE
        echo b 2>/dev/null > /proc/sysrq-trigger && echo SYSRQ
        true
    """
    result = await attempt(sandbox, script)
    assert result.stdout_text.strip() == ""


async def test_descriptors_are_not_inherited(sandbox):
    listing = await sandbox.exec(["/bin/sh", "-c", "ls /proc/self/fd"])
    assert set(listing.stdout_text.split()) <= {"0", "1", "2", "3"}  # 3: of ls itself
    listing = await sandbox.run_shell("ls /proc/self/fd; : </proc/self/fd/7", session="s")
    assert set(listing.stdout_text.split()) <= {"0", "1", "2", "3"}
    assert listing.exit_code != 0


async def test_starved(sandbox, neighbour):
    """Memory, processes and CPU of the sandbox at their limits: aether still answers."""
    hog = await sandbox.exec(["/bin/bash", "-c", "x=$(head -c 300000000 /dev/zero | tr '\\0' x)"], timeout=60)
    assert hog.reason == "oom"
    bomb = await sandbox.exec(
        ["/bin/bash", "-c", "b() { b | b & }; b 2>/dev/null; sleep 60"], background=True
    )
    spin = await sandbox.exec(["/bin/bash", "-c", "while :; do :; done"], background=True)
    async with asyncio.timeout(60):
        assert (await sandbox.files.stat("/etc/passwd")).size > 0 if await room(sandbox) else True
        await bomb.kill()
        await spin.kill()
        await bomb.wait()
        await spin.wait()
    await sandbox.exec(["/bin/sh", "-c", "kill -9 -1"])
    assert (await sandbox.exec(["/bin/echo", "alive"])).stdout == b"alive\n"


async def room(sandbox) -> bool:
    """Whether a process more may run; a full sandbox says so with a typed error, and hangs nobody."""
    try:
        await sandbox.exec(["/bin/true"], timeout=30)
    except errors.ResourceExhausted:
        return False
    return True


async def test_shell_overwritten(sandbox, neighbour):
    await sandbox.run_shell(
        "cp /bin/true /tmp/t; mv -f /tmp/t /bin/bash; cp /bin/true /tmp/t; mv -f /tmp/t /bin/sh"
    )
    result = await sandbox.run_shell("echo forged", session="fresh", timeout=20)
    assert result.reason in ("shell_ended", "timed_out") and result.stdout == b""
    assert (await sandbox.exec(["/bin/echo", "alive"])).stdout == b"alive\n"


async def test_everything_deleted(sandbox, neighbour):
    await sandbox.exec(["/bin/sh", "-c", "rm -rf --no-preserve-root / 2>/dev/null; true"], timeout=60)
    with pytest.raises(errors.DSecError):
        await sandbox.exec(["/bin/echo"])
    await sandbox.files.write("/still", b"here")
    assert await sandbox.files.read("/still") == b"here"


async def test_reading_all_of_proc_and_sys(sandbox, neighbour):
    await attempt(sandbox, "timeout 10 grep -r nothing-like-this /proc /sys >/dev/null 2>&1; true")


async def test_what_ends_the_sandbox_from_inside_is_named(server, client):
    """Nothing inside can end PID 1. What does end it, unasked, is never called an infrastructure failure."""
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="base"))
    pid = await host_pid_of_init(sandbox)
    import os
    import signal

    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while (info := await sandbox.refresh()).state not in ("failed", "stopped"):
            await asyncio.sleep(0.02)
    assert info.state == "failed" and info.error is not None
    assert info.error.code == "killed_from_inside"
    assert sandbox.id not in footprint(server.data)


async def host_pid_of_init(sandbox) -> int:
    """By the sandbox's own hostname, seen from the host's procfs."""
    from pathlib import Path

    inside = (await sandbox.exec(["readlink", "/proc/self/ns/pid"])).stdout_text.strip()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                namespace = str((entry / "ns" / "pid").readlink())
                status = (entry / "status").read_text()
            except OSError:
                continue
            if namespace == inside and "NSpid:" in status:
                line = next(x for x in status.splitlines() if x.startswith("NSpid:"))
                if line.split()[-1] == "1":
                    return int(entry.name)
    raise AssertionError("no init found")
