"""What peers get wrong when they run commands: each kind, in a real sandbox, through the SDK."""

from __future__ import annotations

import asyncio
import re

import pytest

from dsec.client import DSecClient, DSecContainerRunArgs

pytestmark = pytest.mark.kernel


@pytest.fixture
async def client(server):
    async with DSecClient(url=server.url, token=server.token) as client:
        yield client


@pytest.fixture
async def sandbox(client):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="base", memory_limit_mb=512))
    yield sandbox
    await sandbox.stop()


async def processes(sandbox) -> set[str]:
    """Command lines of what runs inside, this look left out."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null; echo; done"
    seen = await sandbox.exec(["/bin/sh", "-c", script])
    return {line.strip() for line in seen.stdout_text.splitlines() if line.strip() and "/proc/" not in line}


async def until(condition, limit_s: float = 20):
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_streams_stay_apart_and_whole(sandbox, how):
    script = "printf 'a\\n\\n'; printf 'e1\\n\\n' >&2; printf last; printf elast >&2; exit 3"
    if how == "exec":
        result = await sandbox.exec(["/bin/sh", "-c", script])
    else:
        result = await sandbox.run_shell(f"({script})")
    assert (result.stdout, result.stderr) == (b"a\n\nlast", b"e1\n\nelast")
    assert (result.exit_code, result.reason) == (3, "exited")


async def test_both_pipes_fill(sandbox):
    script = "import sys\nfor i in range(20000): print('o'*99); print('e'*99, file=sys.stderr)"
    result = await sandbox.exec(["python3", "-c", script], timeout=60)
    assert len(result.stdout) == len(result.stderr) == 2_000_000


async def test_slow_reader_stalls_nobody(sandbox):
    taken = asyncio.Event()
    release = asyncio.Event()

    async def slow(data: bytes) -> None:
        taken.set()
        await release.wait()

    flood = asyncio.create_task(
        sandbox.exec(["/bin/sh", "-c", "head -c 8000000 /dev/zero"], on_stdout=slow, timeout=60)
    )
    await taken.wait()
    assert (await sandbox.exec(["/bin/echo", "quick"])).stdout == b"quick\n"
    assert (await sandbox.run_shell("echo quick too")).stdout == b"quick too\n"
    release.set()
    assert (await flood).stdout_total == 8_000_000


async def test_stdin(sandbox):
    assert (await sandbox.exec(["/bin/cat"])).stdout == b""
    assert (await sandbox.run_shell("cat")).stdout == b""
    large = bytes(range(256)) * 20_000
    result = await sandbox.exec(["/bin/cat"], stdin=large)
    assert result.stdout == large
    result = await sandbox.run_shell("sha256sum", stdin=large)
    again = await sandbox.exec(["sha256sum"], stdin=large)
    assert result.stdout == again.stdout
    result = await sandbox.exec(["/bin/true"], stdin=large)
    assert result.exit_code == 0


async def test_timeout_ends_the_tree_and_spares_earlier_daemons(sandbox):
    await sandbox.run_shell("sleep 1111 & disown; setsid sleep 1112 >/dev/null 2>&1 </dev/null &")
    await sandbox.exec(["/bin/sh", "-c", "sleep 1113 >/dev/null 2>&1 &"])
    tree = "setsid sleep {0} & (sleep {0} &) ; sh -c 'sleep {0}; true'; echo never"
    result = await sandbox.exec(["/bin/sh", "-c", tree.format(2222)], timeout=0.5)
    assert result.reason == "timed_out" and b"never" not in result.stdout
    result = await sandbox.run_shell(tree.format(3333), timeout=0.5)
    assert result.reason == "timed_out" and b"never" not in result.stdout
    left = await processes(sandbox)
    assert {"sleep 1111", "sleep 1112", "sleep 1113"} <= left
    assert not {p for p in left if "2222" in p or "3333" in p}
    assert (await sandbox.run_shell("echo alive")).stdout == b"alive\n"


async def test_timeout_while_output_flows(sandbox):
    result = await sandbox.exec(["yes"], timeout=0.5)
    assert result.reason == "timed_out"
    assert result.stdout_truncated and result.stdout_total > len(result.stdout)
    assert len(result.stdout) == 16 << 20


@pytest.mark.parametrize("command", ["while :; do :; done", "f() { while :; do sleep 1; done; }; f"])
async def test_shell_that_does_not_come_back_is_replaced(sandbox, command):
    await sandbox.run_shell("cd /tmp; export KEPT=yes")
    result = await sandbox.run_shell(command, timeout=0.3)
    assert result.reason == "timed_out"
    after = await sandbox.run_shell("echo $KEPT $PWD")
    assert after.stdout == b"yes /tmp\n"


async def test_output_limit(sandbox):
    result = await sandbox.exec(["yes"], output_limit=100_000, kill_at_limit=True, timeout=30)
    assert result.reason == "output_limit"
    assert result.stdout == (b"y\n" * 50_000)
    result = await sandbox.exec(["head", "-c", "300000", "/dev/zero"], output_limit=100_000)
    assert result.reason == "exited" and result.stdout_total == 300_000 and len(result.stdout) == 100_000


async def test_bytes_that_are_no_text(sandbox):
    result = await sandbox.exec(["/bin/sh", "-c", r"printf '\377\000\303'; sleep 0.05; printf '\244'"])
    assert result.stdout == b"\xff\x00\xc3\xa4"
    assert result.stdout_text == "�\x00ä"


async def test_daemons_and_zombies(sandbox):
    result = await sandbox.exec(["/bin/sh", "-c", "sleep 4444 & echo started"], timeout=20)
    assert result.stdout == b"started\n" and result.reason == "exited"
    result = await sandbox.run_shell("sleep 4445 & echo started", timeout=20)
    assert result.stdout == b"started\n"
    await sandbox.exec(["/bin/sh", "-c", "for i in $(seq 50); do (true &) ; done"])
    states = await sandbox.exec(["/bin/sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null | cut -d' ' -f3"])
    assert "Z" not in states.stdout_text.split()
    assert {"sleep 4444", "sleep 4445"} <= await processes(sandbox)


async def test_environment_and_users(sandbox):
    result = await sandbox.exec(["/usr/bin/env"])
    env = dict(line.split("=", 1) for line in result.stdout_text.splitlines())
    assert env["HOME"] == "/root" and env["USER"] == "root" and "/usr/bin" in env["PATH"]
    result = await sandbox.exec(["/usr/bin/id"], user="daemon")
    assert re.match(r"uid=1\(daemon\) gid=1\(daemon\)", result.stdout_text)
    result = await sandbox.exec(["/usr/bin/id"], user="1234:5678")
    assert result.stdout_text.startswith("uid=1234 gid=5678")
    result = await sandbox.exec(["/bin/sh", "-c", "echo $HOME $USER; cat /etc/shadow"], user="daemon")
    assert result.stdout == b"/usr/sbin daemon\n" and b"denied" in result.stderr
    result = await sandbox.exec(["/bin/sh", "-c", "echo $A $PWD"], env={"A": "x y"}, cwd="/usr/lib")
    assert result.stdout == b"x y /usr/lib\n"


async def test_exit_and_signals(sandbox):
    assert (await sandbox.exec(["/bin/sh", "-c", "exit 255"])).exit_code == 255
    result = await sandbox.exec(["/bin/sh", "-c", "kill -SEGV $$"])
    assert (result.reason, result.signal, result.exit_code) == ("signaled", 11, None)


async def test_sessions(sandbox):
    await sandbox.run_shell("cd /usr; export A=1; B=2; f() { echo f$1; }; shopt -s nullglob", session="one")
    result = await sandbox.run_shell("echo $PWD $A $B $(f x); shopt nullglob", session="one")
    assert result.stdout.startswith(b"/usr 1 2 fx\n") and b"on" in result.stdout
    assert (await sandbox.run_shell("echo $PWD-$A", session="two")).stdout == b"/-\n"
    await sandbox.run_shell("false", session="one")
    assert (await sandbox.run_shell("echo $?", session="one")).stdout == b"1\n"
    both = await asyncio.gather(
        *(sandbox.run_shell(f"sleep 0.2; echo {i}", session=f"s{i}", timeout=20) for i in range(8))
    )
    assert [r.stdout for r in both] == [f"{i}\n".encode() for i in range(8)]
    queued = await asyncio.gather(*(sandbox.run_shell(f"echo {i}", session="one") for i in range(8)))
    assert [r.stdout for r in queued] == [f"{i}\n".encode() for i in range(8)]


async def test_session_that_ends_itself(sandbox):
    await sandbox.run_shell("cd /tmp; export A=1")
    result = await sandbox.run_shell("echo bye; exit 7")
    assert (result.reason, result.exit_code, result.stdout) == ("shell_ended", 7, b"bye\n")
    assert result.session_replaced
    assert (await sandbox.run_shell("echo $A $PWD")).stdout == b"1 /tmp\n"


async def test_command_text_is_taken_as_it_is(sandbox):
    script = "cat <<'EOF'\n$HOME `x` \\ \" '\nEOF\necho \"two\nlines\""
    assert (await sandbox.run_shell(script)).stdout == b"$HOME `x` \\ \" '\ntwo\nlines\n"
    result = await sandbox.run_shell("if then")
    assert result.exit_code not in (0, None) and b"syntax" in result.stderr
    result = await sandbox.run_shell("echo $A in $PWD", env={"A": "it's"}, cwd="/usr")
    assert result.stdout == b"it's in /usr\n"
    assert (await sandbox.run_shell("echo [$A] in $PWD")).stdout == b"[] in /\n"


async def test_session_without_bash(client):
    args = DSecContainerRunArgs(container_image="base", layers=["posix-shell"])
    sandbox = await client.run_container(args)
    await sandbox.run_shell("cd /tmp; export A=1; f() { echo f$1; }")
    assert (await sandbox.run_shell("echo $A $PWD $(f x) $0")).stdout == b"1 /tmp fx sh\n"
    assert (await sandbox.run_shell("sleep 9; echo no", timeout=0.3)).reason == "timed_out"
    assert (await sandbox.run_shell("echo $A $PWD")).stdout == b"1 /tmp\n"
    await sandbox.stop()


async def test_terminal(sandbox):
    terminal = await sandbox.pty(["/bin/sh"], rows=33, columns=101)
    async with terminal:
        seen = b""

        async def expect(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                seen += await anext(chunks)
            seen = b""

        chunks = aiter(terminal)
        async with asyncio.timeout(20):
            await terminal.send("stty size; tty\n")
            await expect(b"33 101\r\n/dev/pts/0")
            await terminal.resize(rows=40, columns=120)
            await terminal.send("stty size\n")
            await expect(b"40 120")
            await terminal.send("sleep 5555 &\n echo go$((1+1))\n")
            await expect(b"go2")
            await terminal.send("exit 5\n")
            result = await terminal.wait()
    assert (result.reason, result.exit_code) == ("exited", 5)


async def test_background_found_again(server, client, sandbox):
    script = "read line; echo got $line; i=0; while [ $i -lt 5 ]; do echo $i; i=$((i+1)); done; sleep 6666"
    command = await sandbox.exec(["/bin/sh", "-c", script], background=True, stdin=True)
    await command.send_stdin(b"hello\n")
    async with DSecClient(url=server.url, token=server.token) as other:
        again = await (await other.get_sandbox(sandbox.id)).operation(command.op_id)

        async def all_there() -> bool:
            return (await again.output()).stdout == b"got hello\n0\n1\n2\n3\n4\n"

        await until(all_there)
        part = await again.output(stdout_from=10)
        assert part.stdout == b"0\n1\n2\n3\n4\n" and part.running
        await again.kill()
        result = await again.wait()
    assert result.reason == "killed"
    assert not {p for p in await processes(sandbox) if "6666" in p}


async def test_background_shell_has_the_sessions_state(sandbox):
    await sandbox.run_shell("cd /usr; export A=1")
    command = await sandbox.run_shell("echo $A $PWD; exit 4", background=True)
    result = await command.wait()
    assert (result.stdout, result.exit_code, result.reason) == (b"1 /usr\n", 4, "exited")
    assert (await sandbox.run_shell("echo $PWD")).stdout == b"/usr\n"


async def test_fork_bomb_is_contained(client, sandbox):
    small = await client.run_container(DSecContainerRunArgs(container_image="base", pids_limit=32))
    bomb = "f() { f | f & }; f; sleep 5"
    result = await small.exec(["/bin/bash", "-c", bomb], timeout=2)
    assert result.reason in ("timed_out", "exited", "signaled")
    assert (await sandbox.exec(["/bin/echo", "neighbour"])).stdout == b"neighbour\n"
    await small.stop()


async def test_random_and_clock_and_names(sandbox):
    checks = (
        "getent hosts localhost || cat /etc/hosts; hostname; cat /etc/hostname; echo > /dev/tcp/127.0.0.1/1"
    )
    result = await sandbox.exec(["/bin/bash", "-c", checks])
    lines = result.stdout_text.split()
    assert "localhost" in lines and lines[-1] == lines[-2]
    assert b"refused" in result.stderr
