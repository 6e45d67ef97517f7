"""Shell sessions: what persists, what is apart, and what becomes of a shell that misbehaves."""

from __future__ import annotations

import asyncio
import signal

import pytest
from tests.agent.wire import Call, Refused, Wire
from tests.backends.conftest import Rig

from dsec.backends.base import Handle
from dsec.backends.container import policy
from dsec.wire import aether as w

pytestmark = pytest.mark.kernel
SHELLS = ["/bin/bash", "/bin/sh"]


@pytest.fixture(params=SHELLS)
async def wire(request: pytest.FixtureRequest, rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """With bash, and with a POSIX shell."""
    monkeypatch.setattr(policy, "SHELLS", [request.param])
    _, sock = await rig.launch(pids_limit=128, memory_limit_mb=128, env={"FROM_IMAGE": "yes"})
    async with Wire(sock) as wire:
        yield wire


async def run(wire: Wire, command: str | bytes, **how: object) -> tuple[w.Ended, bytes, bytes]:
    call = wire.shell(command, **how)
    return await call.end(), call.stdout, call.stderr


async def refused(call: Call) -> str:
    with pytest.raises(Refused) as caught:
        await call.end()
    call.forget()
    return caught.value.code


async def close(wire: Wire, name: str = "default") -> None:
    call = wire.call()
    await wire.start(w.CloseSession(op_id=call.op_id, session=name)).result()


async def test_streams_and_status(wire: Wire) -> None:
    ended, out, err = await run(wire, r"printf 'a\n\n\377'; printf 'e\n' >&2; printf last; (exit 9)")
    assert (out, err) == (b"a\n\n\xfflast", b"e\n")
    assert (ended.reason, ended.exit_code, ended.cwd, ended.session_replaced) == ("exited", 9, "/", False)
    assert (ended.cpu_user_us, ended.stdout_total, ended.stderr_kept) == (-1, 8, 2)
    ended, out, _ = await run(wire, "echo $?")
    assert out == b"9\n"
    assert (await run(wire, ""))[0].exit_code == 0
    assert (await run(wire, "# nothing"))[0].exit_code == 0


async def test_what_persists(wire: Wire) -> None:
    await wire.text("cd /opt; export A=1; B='two words'; f() { echo f$1; }; umask 077")
    assert await wire.text("echo $PWD $A $B $(f x); umask") == "/opt 1 two words fx\n0077"
    assert (await run(wire, "cd /tmp"))[0].cwd == "/tmp"
    assert await wire.text("pwd; sh -c 'echo $A$B'") == "/tmp\n1"
    assert await wire.text("echo [$A] $PWD", session="other") == "[] /"


async def test_environment(wire: Wire) -> None:
    seen = await wire.text("env")
    assert "HOME=/root" in seen and "USER=root" in seen and "FROM_IMAGE=yes" in seen
    assert "profile" not in seen.lower() and "__dsec" not in seen
    assert "HOME=/home/user" in await wire.text("env", user="user", session="theirs")
    assert await wire.text("id -un; id -Gn", user="user", session="theirs") == "user\nuser wheel"
    assert await wire.text("id -un", session="theirs") == "user"
    assert await refused(wire.shell("id", user="root", session="theirs")) == "session_busy"
    assert await refused(wire.shell("id", user="nobody-here", session="new")) == "user_not_found"


async def test_for_one_command(wire: Wire) -> None:
    await wire.text("export A=was; cd /opt")
    assert await wire.text("echo $A $N $PWD", env={"A": "it's\n$x", "N": "n"}, cwd="/tmp") == "it's $x n /tmp"
    assert await wire.text("echo $A [$N] $PWD") == "was [] /opt"
    assert await wire.text("echo ${N-unset}") == "unset"
    ended, out, err = await run(wire, "echo ran", cwd="/no/such")
    assert ended.exit_code != 0 and out == b"" and b"/no/such" in err
    assert await wire.text("pwd") == "/opt"
    for name in ("A;echo x", "A-B", "1A", "", "ä", "A" * 500):
        assert await refused(wire.shell("true", env={name: "x"})) == "invalid_argument", name


async def test_much_output_with_an_environment_of_its_own(wire: Wire) -> None:
    """The stderr that setting it up had is not the end of the command's."""
    for _ in range(5):
        ended, _, err = await run(
            wire, "sleep 0.02; head -c 300000 /dev/zero >&2", env={"A": "1"}, cwd="/opt"
        )
        assert (ended.reason, len(err)) == ("exited", 300_000)


async def test_much_output_on_both(wire: Wire) -> None:
    ended, out, err = await run(wire, "head -c 2000000 /dev/zero & head -c 2000000 /dev/zero >&2; wait")
    assert ended.exit_code == 0 and len(out) == len(err) == 2_000_000


async def test_slow_reader_stalls_its_own_session_only(wire: Wire) -> None:
    slow = wire.shell("head -c 3000000 /dev/zero; echo end >&2", hold=True)
    await slow.until(lambda c: c.received(w.Stream.STDOUT) >= w.WINDOW)
    assert await wire.text("echo quick", session="other") == "quick"
    slow.hold = False
    slow.acknowledge(w.Stream.STDOUT)
    assert (await slow.end()).stdout_total == 3_000_000 and slow.stderr == b"end\n"


async def test_stdin(wire: Wire) -> None:
    assert await wire.text("cat; readlink /proc/self/fd/0") == "/dev/null"
    call = wire.shell("cat; echo end", stdin=True)
    data = b"x" * 200_000
    call.write(data)
    call.eof()
    assert (await call.end()).exit_code == 0
    assert call.stdout == data + b"end\n" and call.taken == len(data)


async def test_stdin_that_ends_before_the_command_begins(wire: Wire) -> None:
    await wire.text("true")
    for data in (b"", b"one\n", b"y" * 100_000):
        first = wire.shell("sleep 0.2")
        call = wire.shell("cat", stdin=True)
        call.write(data)
        call.eof()
        await first.end()
        assert (await call.end()).exit_code == 0
        assert call.stdout == data


async def test_stdin_that_is_not_read(wire: Wire) -> None:
    call = wire.shell("true", stdin=True)
    call.write(b"x" * 500_000)
    assert (await call.end()).exit_code == 0
    await call.until(lambda c: c.taken == 500_000)
    assert await wire.text("echo next") == "next"


async def test_stdin_line_by_line(wire: Wire) -> None:
    call = wire.shell("while read -r line; do echo got $line; done", stdin=True)
    for i in range(3):
        call.write(b"%d\n" % i)
        await call.seen(b"got %d\n" % i)
    call.eof()
    assert (await call.end()).exit_code == 0


async def test_one_after_another_and_side_by_side(wire: Wire) -> None:
    calls = [wire.shell(f"sleep 0.01; echo {i}; x=${{x}}{i}") for i in range(10)]
    await asyncio.gather(*(c.end() for c in calls))
    assert [c.stdout for c in calls] == [f"{i}\n".encode() for i in range(10)]
    assert await wire.text("echo $x") == "0123456789"
    await asyncio.gather(*(wire.text(f"mkfifo /tmp/f{i}", session=f"s{i}") for i in range(4)))
    chain = [wire.shell(f"read x </tmp/f{i}; echo $x >/tmp/f{i + 1}", session=f"s{i}") for i in range(3)]
    last = wire.shell("cat /tmp/f3", session="s3")
    await wire.text("echo through >/tmp/f0", session="s4")
    await asyncio.gather(*(c.end() for c in chain), last.end())
    assert last.stdout == b"through\n"


async def test_ended_by_itself(wire: Wire) -> None:
    await wire.text("cd /opt; export A='a b'")
    ended, out, _ = await run(wire, "echo bye; exit 7")
    assert (ended.reason, ended.exit_code, out, ended.session_replaced) == ("shell_ended", 7, b"bye\n", True)
    assert await wire.text("echo $A $PWD") == "a b /opt"
    ended, _, _ = await run(wire, "kill -9 $$")
    assert (ended.reason, ended.signal, ended.exit_code) == ("shell_ended", 9, -1)
    assert await wire.text("echo $A $PWD") == "a b /opt"
    ended, _, _ = await run(wire, "exec sh -c 'exit 5'")
    assert (ended.reason, ended.exit_code) == ("shell_ended", 5)
    queued = [wire.shell(c) for c in ("echo one", "exit 1", "echo two $A")]
    ends = [await c.end() for c in queued]
    assert [e.reason for e in ends] == ["exited", "shell_ended", "exited"]
    assert queued[2].stdout == b"two a b\n"


async def test_killed_while_idle(wire: Wire) -> None:
    await wire.text("cd /opt; export A=1")
    pid = await wire.text("echo $$")
    await wire.run("/bin/kill", "-9", pid)
    ended, out, _ = await run(wire, "echo $A $PWD")
    assert (out, ended.session_replaced) == (b"1 /opt\n", True)
    assert not (await run(wire, "true"))[0].session_replaced


async def test_options_of_the_shell_do_no_harm(wire: Wire) -> None:
    for option in ("-u", "-f", "-x", "-v", "-C", "-a"):
        await run(wire, f"set {option}")
    assert await wire.text("echo fine") == "fine"
    await run(wire, "IFS=0123456789")
    assert await wire.text("echo fine") == "fine"
    await run(wire, "set +x; unset PATH; alias echo=false; cd /; PS1=; PS4=")
    ended, out, _ = await run(wire, "printf 'fine\\n'")
    assert (ended.reason, out) == ("exited", b"fine\n")


async def test_errexit_ends_the_session_as_it_says(wire: Wire) -> None:
    await run(wire, "set -e; export A=1")
    assert (await run(wire, "true"))[0].reason == "exited"
    ended, out, _ = await run(wire, "echo before; false; echo after")
    assert (ended.reason, ended.exit_code, out) == ("shell_ended", 1, b"before\n")
    assert await wire.text("echo $A") == "1"


async def test_syntax_errors(wire: Wire) -> None:
    for bad in ("if then", "echo 'open", "((", "for", "echo ) x", "{ echo"):
        ended, out, err = await run(wire, bad)
        assert ended.exit_code not in (0, -1) and err, bad
        assert out == b"", bad
    assert await wire.text("echo fine") == "fine"


async def test_command_text_is_taken_as_it_is(wire: Wire) -> None:
    script = "cat <<'EOF'\n$HOME `x` \\ \" ' \xff\nEOF\necho \"two\nlines\"".encode("latin-1")
    _, out, _ = await run(wire, script)
    assert out == b"$HOME `x` \\ \" ' \xff\ntwo\nlines\n"
    assert await wire.text("printf '%s' 'ends with backslash\\'") == "ends with backslash\\"
    assert await wire.text("echo a \\\n b") == "a b"
    long = "echo " + "x" * 200_000
    assert len(await wire.text(long)) == 200_000
    assert await refused(wire.shell("x" * (w.MAX_COMMAND + 1))) == "invalid_argument"
    assert await refused(wire.shell(b"a\0b")) == "invalid_argument"
    assert await refused(wire.shell("true", session="")) == "invalid_argument"


async def test_descriptors_of_the_driver_are_not_inherited(wire: Wire) -> None:
    assert set((await wire.text("ls /proc/self/fd")).split()) == {"0", "1", "2", "3"}
    await wire.text("sleep 99 & sleep 0.05; ls -l /proc/$!/fd > /tmp/fds; kill $!")
    assert "status" not in await wire.text("cat /tmp/fds")
    assert len((await wire.text("cat /tmp/fds")).splitlines()) == 4  # the total, and three


async def test_descriptors_of_the_user_stay(wire: Wire) -> None:
    await wire.text("exec 5>/tmp/five; echo a >&5")
    assert await wire.text("echo b >&5; cat /tmp/five") == "a\nb"


TREE = "setsid sleep {0} & (sleep {0} &); sh -c 'sleep {0}; true'; echo never"


async def test_timeout_ends_what_it_began_and_spares_the_rest(wire: Wire) -> None:
    await wire.text("sleep 1111 >/dev/null 2>&1 & setsid sleep 1112 >/dev/null 2>&1 </dev/null &")
    # A daemon that begins more processes while the command runs, which are the daemon's own.
    forks = "while :; do sleep 0.05; sleep 1113 & sleep 0.3; kill $!; wait; done"
    await wire.text(f"sh -c '{forks}' >/dev/null 2>&1 & echo")
    await wire.text("export A=1; cd /opt")
    ended, out, _ = await run(wire, TREE.format(2222), timeout_ms=500)
    assert (ended.reason, out) == ("timed_out", b"")
    assert ended.duration_ns < 3e9
    left = await wire.processes()
    assert {"sleep 1111", "sleep 1112"} <= left and "sleep 2222" not in left
    assert any("sleep 1113" in p and p.startswith("sh ") for p in left)
    ended, out, _ = await run(wire, "echo $A $PWD")
    assert out == b"1 /opt\n"


@pytest.mark.parametrize(
    "command",
    [
        "while :; do :; done",
        "while :; do sleep 0.01; done",
        "f() { while :; do sleep 1; done; }; f",
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "sleep 100; sleep 100; sleep 100",
        "for i in 1 2 3; do sleep 100; done",
        "sleep 100 | sleep 100",
        "x=$(sleep 100)",
        "(while :; do :; done); :",  # bash takes the signal after the builtin that follows
        "read x </tmp/fifo",
        "trap - 63; while :; do :; done",
        "trap '' 63; while :; do :; done",
        "kill -STOP $$",
    ],
)
async def test_timeout_of_all_sorts(wire: Wire, command: str) -> None:
    await wire.text("mkfifo /tmp/fifo; cd /opt; export A=1; B=2")
    ended, out, _ = await run(wire, command + "; echo never", timeout_ms=200)
    assert (ended.reason, out) == ("timed_out", b"")
    assert ended.duration_ns < 3e9
    assert await wire.text("echo $A $PWD") == "1 /opt"
    left = await wire.processes()
    assert not {p for p in left if "sleep" in p and "__dsec" not in p}, left


async def test_a_timeout_that_spares_the_shell_keeps_all(wire: Wire) -> None:
    await wire.text("B=2; f() { echo f; }")
    ended, _, _ = await run(wire, "sleep 100", timeout_ms=200)
    assert (ended.reason, ended.session_replaced) == ("timed_out", False)
    assert await wire.text("echo $B; f") == "2\nf"


async def test_timeout_counts_from_the_commands_beginning(wire: Wire) -> None:
    first = wire.shell("sleep 0.5")
    second = wire.shell("echo ran", timeout_ms=300)
    await first.end()
    ended = await second.end()
    assert (ended.reason, second.stdout) == ("exited", b"ran\n")
    assert ended.duration_ns < 300e6


async def test_timeout_holds_for_what_ignores_a_signal(wire: Wire) -> None:
    call = wire.shell("sh -c 'trap \"\" TERM; echo ready; while :; do sleep 0.05; done'", timeout_ms=600)
    await call.seen(b"ready")
    call.signal(signal.SIGTERM)
    assert (await call.end()).reason == "timed_out"


async def test_signals(wire: Wire) -> None:
    await wire.text("B=2")
    call = wire.shell("echo ready; sleep 1234")
    await call.seen(b"ready")
    call.signal(signal.SIGKILL)
    ended = await call.end()
    assert (ended.reason, ended.session_replaced) == ("killed", False)
    call = wire.shell("echo ready; sleep 1234; echo went on")
    await call.seen(b"ready")
    await asyncio.sleep(0)
    await _until_runs(wire, "sleep 1234")
    call.signal(signal.SIGINT)
    ended = await call.end()
    assert "sleep 1234" not in await wire.processes()
    call = wire.shell("echo ready; while :; do :; done")
    await call.seen(b"ready")
    call.signal(signal.SIGTERM)
    assert (await call.end()).reason == "killed"
    assert await wire.text("echo $B") == "2"


async def _until_gone(wire: Wire, name: str) -> None:
    """A process that was killed is seen until it has let go of its memory."""
    async with asyncio.timeout(20):
        while name in await wire.processes():
            pass


async def _until_runs(wire: Wire, name: str) -> None:
    async with asyncio.timeout(20):
        while name not in await wire.processes():
            pass


async def test_signal_to_one_that_waits(wire: Wire) -> None:
    first = wire.shell("sleep 0.3; echo first")
    second = wire.shell("echo second >/tmp/second")
    third = wire.shell("echo third; ls /tmp")
    second.signal(signal.SIGTERM)
    assert (await second.end()).reason == "killed"
    await asyncio.gather(first.end(), third.end())
    assert (first.stdout, third.stdout) == (b"first\n", b"third\n")


async def test_a_signal_that_was_survived_is_not_the_cause(wire: Wire) -> None:
    call = wire.shell("sh -c 'trap : USR1; echo ready; read x; exit 3'", stdin=True)
    await call.seen(b"ready")
    call.signal(signal.SIGUSR1)
    call.write(b"\n")
    ended = await call.end()
    assert (ended.reason, ended.exit_code) == ("exited", 3)


async def test_daemons_do_not_hold_the_call(wire: Wire) -> None:
    script = "(while echo alive; do sleep 0.01; done; echo died >/tmp/died) & echo started"
    ended, out, _ = await run(wire, script)
    assert ended.reason == "exited" and b"started\n" in out
    assert "died" not in await wire.text("sleep 0.3; ls /tmp")
    await wire.text("(head -c 3000000 /dev/zero; echo $? >/tmp/status) & true")
    wait = "until [ -s /tmp/status ]; do sleep 0.02; done; cat /tmp/status"
    assert await wire.text(wait, timeout_ms=20_000) == "0"


async def test_output_limit(wire: Wire) -> None:
    ended, out, _ = await run(wire, "head -c 300000 /dev/zero", output_limit=100_001)
    assert (ended.reason, len(out), ended.stdout_total) == ("exited", 100_001, 300_000)
    ended, out, _ = await run(wire, "yes", output_limit=100_000, kill_at_limit=True)
    assert (ended.reason, len(out)) == ("output_limit", 100_000)
    assert "yes" not in str(await wire.processes())
    assert await wire.text("echo fine") == "fine"


async def test_out_of_memory(wire: Wire) -> None:
    await wire.text("export A=1")
    hog = "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo unreachable"
    ended, out, _ = await run(wire, hog)
    assert (ended.reason, out) == ("oom", b"") and ended.session_replaced
    assert await wire.text("echo $A") == "1"
    ended, out, _ = await run(wire, 'sh -c "$HOG"', env={"HOG": hog})
    assert (ended.reason, ended.session_replaced) == ("oom", False)


async def test_background(wire: Wire) -> None:
    await wire.text("cd /opt; export A=1; B=2")
    call = wire.shell("echo $A [$B] $PWD; exit 4", background=True)
    ended = await call.end()
    assert (call.stdout, ended.reason, ended.exit_code) == (b"1 [] /opt\n", "exited", 4)
    call = await wire.shell("cd /tmp; export A=2; echo ready; sleep 1234", background=True).begun()
    await call.seen(b"ready")
    assert await wire.text("echo $A $PWD") == "1 /opt"
    call.signal(signal.SIGTERM)
    assert (await call.end()).reason == "killed"
    ended, _, _ = await run(wire, TREE.format(2223), background=True, timeout_ms=300)
    assert ended.reason == "timed_out"
    left = await wire.processes()
    assert not {p for p in left if "sleep" in p and "__dsec" not in p}
    call = wire.shell("cat", background=True, stdin=True)
    call.write(b"in")
    call.eof()
    assert (await call.end()).exit_code == 0 and call.stdout == b"in"
    fresh = wire.shell("echo $PWD", background=True, session="never begun")
    await fresh.end()
    assert fresh.stdout == b"/\n"


async def test_background_is_not_the_sessions(wire: Wire) -> None:
    """What a background command began is spared when a later command of the session times out."""
    await wire.text("true")
    call = wire.shell(
        "echo ready; read x; setsid sleep 1115 >/dev/null 2>&1 & read x; echo $x", background=True, stdin=True
    )
    await call.seen(b"ready")
    timed = wire.shell("echo ready; sleep 100", timeout_ms=600)
    await timed.seen(b"ready")
    call.write(b"\n")
    await _until_runs(wire, "sleep 1115")
    assert (await timed.end()).reason == "timed_out"
    assert "sleep 1115" in await wire.processes()
    call.write(b"end\n")
    assert (await call.end()).exit_code == 0
    left = await wire.processes()
    assert "sleep 1115" in left
    await close(wire)
    assert "sleep 1115" in await wire.processes()


async def test_closed(wire: Wire) -> None:
    await wire.text("cd /opt; export A=1; sleep 1114 >/dev/null 2>&1 & (setsid sleep 1114 >/dev/null 2>&1 &)")
    running = wire.shell("echo ready; sleep 1114")
    await running.seen(b"ready")
    waiting = wire.shell("echo never")
    await close(wire)
    assert (await running.end()).reason == "killed"
    assert (await waiting.end()).reason == "killed" and waiting.stdout == b""
    await _until_gone(wire, "sleep 1114")
    assert await wire.text("echo [$A] $PWD") == "[] /"
    call = wire.call()
    assert await refused(wire.start(w.CloseSession(op_id=call.op_id, session="none"))) == "session_not_found"
    await run(wire, "(sleep 1116 &); exit 0", session="gone")
    await close(wire, "gone")
    await _until_gone(wire, "sleep 1116")


async def test_directory_that_is_gone(wire: Wire) -> None:
    await wire.text("mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone; export A=1")
    await run(wire, "exit")
    assert await wire.text("echo $A $PWD") == "1 /"


async def test_very_long_and_odd_directories(wire: Wire) -> None:
    await wire.text("mkdir -p '/tmp/new\nline'; cd '/tmp/new\nline'")
    assert (await run(wire, "true"))[0].cwd == "/tmp/new\nline"
    await run(wire, "exit")
    assert await wire.text("pwd") == "/tmp/new\nline"
    assert (await run(wire, "mkdir -p \"/tmp/$(printf '\\377')\"; cd /tmp/?"))[0].cwd == "/tmp/?"
    await run(wire, "exit")
    assert await wire.text('[ "$PWD" = "/tmp/$(printf \'\\377\')" ] && echo same') == "same"


async def test_shell_that_the_agent_has_replaced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "SHELLS", SHELLS)
    _, sock = await rig.launch(pids_limit=64)
    async with Wire(sock) as wire:
        await wire.run("/bin/sh", "-c", "cat /bin/true >/bin/bash")
        ended, _, _ = await run(wire, "echo x")
        assert (ended.reason, ended.exit_code) == ("shell_ended", 0)
        await wire.run("/bin/sh", "-c", "cat /bin/sleep >/bin/bash")
        ended, _, _ = await run(wire, "echo x")
        assert ended.reason == "shell_ended"
        await wire.run("/bin/sh", "-c", "printf '#!/bin/sh\\nexec sleep 1000\\n' >/bin/bash")
        ended, _, _ = await run(wire, "echo x", timeout_ms=300)
        assert ended.reason == "timed_out"
        await wire.run("/bin/sh", "-c", "echo garbage >/bin/bash")
        assert await refused(wire.shell("echo x", session="new")) == "no_shell"
        await wire.run("/bin/sh", "-c", "rm /bin/bash")
        assert await wire.text("echo posix", session="other") == "posix"
        await wire.run("/bin/rm", "/bin/sh")
        assert await refused(wire.shell("echo x", session="third")) == "no_shell"
        assert (await wire.run("/bin/true"))[0].exit_code == 0


async def test_a_shell_that_is_hostile_to_its_driver(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shell can reach of its own is its own harm: aether neither hangs nor ends."""
    monkeypatch.setattr(policy, "SHELLS", SHELLS)
    _, sock = await rig.launch(pids_limit=64)
    async with Wire(sock) as wire:
        await wire.text("true")
        own = "cd /proc/$$/fd/7 && "
        for harm in (
            "rm -f env && mkfifo env",
            "for i in $(seq 100); do mkfifo c$i o$i e$i 2>/dev/null; done; true",
            "head -c 9000000 /dev/zero > full; true",
            "rm -rf ./*; true",
            "head -c 5000000 /dev/urandom >/proc/$$/fd/8",
            "printf '99 99 99\\n\\0' >/proc/$$/fd/8; printf '\\0\\0\\0x\\0' >/proc/$$/fd/8",
            "kill -STOP $$",
        ):
            call = wire.shell(own + harm, timeout_ms=1000)
            try:
                await call.end()
            except Refused:
                call.forget()
            assert await wire.ping() == b"ping", harm
            background = wire.shell("echo x", background=True, timeout_ms=1000)
            try:
                await background.end()
            except Refused:
                background.forget()
            assert await wire.ping() == b"ping", harm
            await close(wire)
        assert await wire.text("echo fine") == "fine"


async def test_list_names_sessions(launched: tuple[Handle, Wire]) -> None:
    _, wire = launched
    call = wire.shell("echo ready; sleep 100", session="named")
    await call.seen(b"ready")
    (known,) = await wire.list()
    assert (known.op_id, known.kind, known.state, known.session) == (call.op_id, "shell", "running", "named")
    assert known.pid > 1
    call.signal(9)
    await call.result()
    (known,) = await wire.list()
    assert (known.state, known.session) == ("ended", "named")
    call.forget()
    assert await wire.list() == []
