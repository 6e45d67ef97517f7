"""Programs: streams, input, time, limits, users, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal

import msgspec
import pytest
from tests.agent.wire import Call, Refused, Wire

from dsec.backends.base import Handle
from dsec.wire import aether as w

pytestmark = pytest.mark.kernel


async def refused(call: Call) -> str:
    with pytest.raises(Refused) as caught:
        await call.end()
    call.forget()
    return caught.value.code


async def test_streams_stay_apart_and_whole(wire: Wire) -> None:
    ended, out, err = await wire.run(
        "/bin/sh", "-c", r"printf 'a\n\n'; printf '\377\n' >&2; printf last; printf e >&2; exit 3"
    )
    assert (out, err) == (b"a\n\nlast", b"\xff\ne")
    assert (ended.reason, ended.exit_code, ended.signal) == ("exited", 3, 0)
    assert (ended.stdout_total, ended.stdout_kept, ended.stderr_total, ended.stderr_kept) == (7, 7, 3, 3)
    assert ended.duration_ns > 0 and ended.started_ns > 1e18 and ended.cwd == ""
    assert ended.cpu_user_us >= 0 and ended.cpu_system_us >= 0 and ended.max_rss_kib > 0


async def test_arguments_are_taken_as_bytes(wire: Wire) -> None:
    _, out, _ = await wire.run("/bin/echo", b"\xff\xfe", "ä $HOME `x` \n")
    assert out == b"\xff\xfe \xc3\xa4 $HOME `x` \n\n"
    assert await refused(wire.exec("/bin/echo", b"a\0b")) == "invalid_argument"
    assert await refused(wire.exec()) == "invalid_argument"
    assert await refused(wire.exec("")) == "invalid_argument"


async def test_stdin_is_closed_unless_given(wire: Wire) -> None:
    ended, out, _ = await wire.run("/bin/cat")
    assert (ended.exit_code, out) == (0, b"")
    _, out, _ = await wire.run("/bin/readlink", "/proc/self/fd/0")
    assert out == b"/dev/null\n"


async def test_large_stdin(wire: Wire) -> None:
    data = bytes(range(256)) * 8000
    call = wire.exec("/bin/cat", stdin=True)
    for at in range(0, len(data), 1 << 18):
        call.write(data[at : at + (1 << 18)])
        await call.until(lambda c, at=at: (c.taken or 0) >= at)
    call.eof()
    assert (await call.end()).exit_code == 0
    assert call.stdout == data and call.taken == len(data)


async def test_stdin_that_nobody_reads(wire: Wire) -> None:
    call = wire.exec("/bin/sh", "-c", "exec <&-; echo closed; sleep 0.1; echo done", stdin=True)
    await call.seen(b"closed")
    call.write(b"x" * 500_000)
    await call.until(lambda c: c.taken == 500_000)
    assert (await call.end()).exit_code == 0


async def test_closing_stdin_is_passed_on(wire: Wire) -> None:
    call = wire.exec("/bin/sh", "-c", "cat; echo end", stdin=True)
    call.write(b"one\n")
    await call.seen(b"one\n")
    call.eof()
    await call.end()
    assert call.stdout == b"one\nend\n"


async def test_both_pipes_fill(wire: Wire) -> None:
    script = f"i=0; while [ $i -lt 3000 ]; do echo {'o' * 99}; echo {'e' * 99} >&2; i=$((i+1)); done"
    ended, out, err = await wire.run("/bin/sh", "-c", script)
    assert ended.exit_code == 0 and len(out) == len(err) == 300_000


async def test_slow_reader_stalls_nobody(wire: Wire) -> None:
    slow = wire.exec("/bin/head", "-c", "3000000", "/dev/zero", hold=True)
    await slow.until(lambda c: c.received(w.Stream.STDOUT) >= w.WINDOW)
    _, out, _ = await wire.run("/bin/echo", "quick")
    assert out == b"quick\n"
    assert slow.received(w.Stream.STDOUT) == w.WINDOW
    slow.hold = False
    slow.acknowledge(w.Stream.STDOUT)
    assert (await slow.end()).stdout_total == 3_000_000
    assert len(slow.stdout) == 3_000_000


async def test_output_limit_is_exact(wire: Wire) -> None:
    ended, out, _ = await wire.run("/bin/head", "-c", "300000", "/dev/zero", output_limit=100_001)
    assert (len(out), ended.stdout_total, ended.stdout_kept) == (100_001, 300_000, 100_001)
    assert ended.reason == "exited"
    ended, out, err = await wire.run("/bin/sh", "-c", "echo abc; echo def >&2", output_limit=0)
    assert (out, err, ended.stdout_total) == (b"", b"", 4)
    ended, out, _ = await wire.run("/bin/echo", "abc", output_limit=4, kill_at_limit=True)
    assert (ended.reason, out) == ("exited", b"abc\n")


async def test_kill_at_limit(wire: Wire) -> None:
    ended, out, _ = await wire.run("/bin/yes", output_limit=100_000, kill_at_limit=True)
    assert (ended.reason, len(out), ended.signal) == ("output_limit", 100_000, 9)
    assert "yes" not in str(await wire.processes())


async def test_timeout_ends_the_tree_and_nothing_else(wire: Wire) -> None:
    await wire.run("/bin/sh", "-c", "sleep 1111 >/dev/null 2>&1 &")
    tree = "setsid sleep 2222 & (sleep 2222 &); sh -c 'sleep 2222; true'; echo never"
    ended, out, _ = await wire.run("/bin/sh", "-c", tree, timeout_ms=300)
    assert (ended.reason, ended.signal, out) == ("timed_out", 9, b"")
    assert 300e6 <= ended.duration_ns < 5e9
    left = await wire.processes()
    assert "sleep 1111" in left and "sleep 2222" not in left


async def test_timeout_holds_for_what_ignores_a_signal(wire: Wire) -> None:
    call = wire.sh("trap '' TERM; echo ready; while :; do sleep 0.05; done", timeout_ms=700)
    await call.seen(b"ready")
    call.signal(signal.SIGTERM)
    assert (await call.end()).reason == "timed_out"


async def test_timeout_while_output_flows_unread(wire: Wire) -> None:
    call = wire.exec("/bin/yes", timeout_ms=300, hold=True)
    await call.until(lambda c: c.received(w.Stream.STDOUT) >= w.WINDOW)
    call.hold = False
    call.acknowledge(w.Stream.STDOUT)
    assert (await call.end()).reason == "timed_out"


async def test_timeout_counts_the_program_not_its_reader(wire: Wire) -> None:
    call = wire.exec("/bin/head", "-c", "300000", "/dev/zero", timeout_ms=400, hold=True)
    await call.until(lambda c: c.received(w.Stream.STDOUT) >= w.WINDOW)
    other = wire.exec("/bin/sleep", "0.6")
    await other.end()
    call.hold = False
    call.acknowledge(w.Stream.STDOUT)
    assert (await call.end()).reason == "exited" and len(call.stdout) == 300_000


async def test_signals(wire: Wire) -> None:
    ended, _, _ = await wire.run("/bin/sh", "-c", "kill -SEGV $$")
    assert (ended.reason, ended.signal, ended.exit_code) == ("signaled", 11, -1)
    call = await wire.exec("/bin/sleep", "1234").begun()
    call.signal(signal.SIGTERM)
    ended = await call.end()
    assert (ended.reason, ended.signal) == ("killed", 15)
    call = wire.sh("trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.02; done")
    await call.seen(b"ready")
    call.signal(signal.SIGUSR1, tree=False)
    ended = await call.end()
    assert (ended.reason, ended.exit_code, call.stdout) == ("exited", 7, b"ready\ncaught\n")


async def test_a_signal_that_was_survived_is_not_the_cause(wire: Wire) -> None:
    call = wire.sh("trap : USR1; echo ready; read x; kill -SEGV $$", stdin=True)
    await call.seen(b"ready")
    call.signal(signal.SIGUSR1, tree=False)
    call.write(b"\n")
    ended = await call.end()
    assert (ended.reason, ended.signal) == ("signaled", 11)


async def test_kill_reaches_the_whole_tree_or_the_leader_alone(wire: Wire) -> None:
    call = wire.sh("sleep 3333 & setsid sleep 3333 & echo ready; wait")
    await call.seen(b"ready")
    call.signal(signal.SIGKILL)
    assert (await call.end()).reason == "killed"
    assert "sleep 3333" not in await wire.processes()
    call = wire.sh("sleep 3334 >/dev/null 2>&1 & echo ready; exec sleep 3335")
    await call.seen(b"ready")
    call.signal(signal.SIGKILL, tree=False)
    assert (await call.end()).reason == "killed"
    left = await wire.processes()
    assert "sleep 3334" in left and "sleep 3335" not in left


async def test_daemons_do_not_hold_the_call(wire: Wire) -> None:
    ended, out, _ = await wire.run(
        "/bin/sh", "-c", "(while echo alive; do sleep 0.01; done; echo died >/tmp/died) & echo started"
    )
    assert ended.reason == "exited" and out.startswith(b"started\n")
    ended, out, _ = await wire.run("/bin/sh", "-c", "sleep 0.3; ls /tmp")
    assert b"died" not in out


async def test_a_daemon_that_floods_is_neither_stopped_nor_killed(wire: Wire) -> None:
    script = "(head -c 5000000 /dev/zero; echo $? >/tmp/status) & echo started; exit 0"
    ended, _, _ = await wire.run("/bin/sh", "-c", script)
    assert ended.exit_code == 0
    wait = "until [ -s /tmp/status ]; do sleep 0.02; done; cat /tmp/status"
    _, out, _ = await wire.run("/bin/sh", "-c", wait, timeout_ms=20_000)
    assert out == b"0\n"


async def test_no_zombies(wire: Wire) -> None:
    await wire.run("/bin/sh", "-c", "for i in $(seq 50); do (true &); done")
    await wire.ping()
    _, out, _ = await wire.run("/bin/sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null")
    states = [line.rsplit(")", 1)[1].split()[0] for line in out.decode().splitlines()]
    assert states and "Z" not in states


async def test_environment(wire: Wire) -> None:
    async def env(**how: object) -> dict[str, str]:
        _, out, _ = await wire.run("/bin/env", **how)
        return dict(line.split("=", 1) for line in out.decode().splitlines())

    seen = await env()
    assert seen.pop("DSEC_OP")
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert seen == {
        "PATH": path,
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "FROM_IMAGE": "yes",
    }
    seen = await env(user="user", env={"A": "x=y", "FROM_IMAGE": "no", "LOGNAME": "me"})
    assert (seen["HOME"], seen["USER"], seen["LOGNAME"]) == ("/home/user", "user", "me")
    assert (seen["A"], seen["FROM_IMAGE"]) == ("x=y", "no")
    seen = await env(user="4321")
    assert seen["HOME"] == "/" and "USER" not in seen


async def test_users(wire: Wire) -> None:
    async def id_of(user: str) -> str:
        _, out, _ = await wire.run("/bin/id", user=user)
        return out.decode().strip()

    assert await id_of("") == "uid=0(root) gid=0(root) groups=0(root)"
    assert await id_of("user") == "uid=1000(user) gid=1000(user) groups=1000(user),10(wheel)"
    assert await id_of("1000") == "uid=1000(user) gid=1000(user) groups=1000(user),10(wheel)"
    assert await id_of("many") == "uid=1001(many) gid=1000(user) groups=1000(user),10(wheel),29(audio)"
    assert await id_of("user:audio") == "uid=1000(user) gid=29(audio) groups=29(audio)"
    assert await id_of("1234:5678") == "uid=1234 gid=5678 groups=5678"
    assert await id_of("1234") == "uid=1234 gid=0(root) groups=0(root)"
    for unknown in ("nobody-here", "user:nogroup", "odd", "99999999999", "-1", ":", "root:", "x" * 500):
        assert await refused(wire.exec("/bin/true", user=unknown)) == "user_not_found", unknown
    assert await refused(wire.exec("/bin/true", user="100000")) == "user_not_found"  # not mapped
    ended, _, err = await wire.run("/bin/sh", "-c", "ls /root/secret", user="user")
    assert ended.exit_code != 0 and b"denied" in err


async def test_capabilities_of_root_and_of_others(wire: Wire) -> None:
    async def caps(**how: object) -> dict[str, str]:
        _, out, _ = await wire.run(
            "/bin/grep", "-E", "^(Cap|NoNewPrivs|Seccomp:)", "/proc/self/status", **how
        )
        return dict(re.findall(r"(\w+):\s+(\S+)", out.decode()))

    root = await caps()
    docker = "00000000a80425fb"
    assert root["CapEff"] == root["CapPrm"] == root["CapBnd"] == docker
    assert root["CapInh"] == root["CapAmb"] == "0" * 16
    assert (root["NoNewPrivs"], root["Seccomp"]) == ("0", "2")
    user = await caps(user="user")
    assert user["CapEff"] == user["CapPrm"] == user["CapInh"] == user["CapAmb"] == "0" * 16
    assert user["CapBnd"] == docker


async def test_directory(wire: Wire) -> None:
    _, out, _ = await wire.run("/bin/sh", "-c", "pwd", cwd="/opt")
    assert out == b"/opt\n"
    assert await refused(wire.exec("/bin/true", cwd="/no/such")) == "file_not_found"
    assert await refused(wire.exec("/bin/true", cwd="/etc/passwd")) == "not_a_directory"
    assert await refused(wire.exec("/bin/true", cwd="/root/secret", user="user")) == "file_access_denied"


async def test_programs_that_cannot_be_run(wire: Wire) -> None:
    for program in ("/no/such", "no-such", "/opt", "/opt/not-executable", "/opt/garbage", "/etc/passwd/x"):
        assert await refused(wire.exec(program)) == "program_not_found", program
    assert await refused(wire.exec("/opt/no-interpreter")) == "program_not_found"
    _, out, _ = await wire.run("/opt/script", "x")
    assert out == b"script x\n"
    _, out, _ = await wire.run("script", "y", env={"PATH": "/nowhere:/opt:/bin"})
    assert out == b"script y\n"
    _, out, _ = await wire.run("./script", "z", cwd="/opt")
    assert out == b"script z\n"
    assert await refused(wire.exec("/bin/echo", "x" * 200_000)) == "program_not_found"  # E2BIG of one


async def test_descriptors_of_a_program_are_its_three(wire: Wire) -> None:
    _, out, _ = await wire.run("/bin/sh", "-c", "ls /proc/self/fd; ls /proc/$$/fd")
    assert set(out.decode().split()) <= {"0", "1", "2", "3"}  # 3: the directory that ls reads
    _, out, _ = await wire.run("/bin/grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")
    assert out == b"SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"


async def test_own_session_and_umask(wire: Wire) -> None:
    _, out, _ = await wire.run("/bin/sh", "-c", "umask; set -- $(cat /proc/$$/stat); echo $1 $6")
    umask, ids = out.decode().splitlines()
    assert umask == "0022" and len(set(ids.split())) == 1


async def test_out_of_memory_is_told_apart(wire: Wire) -> None:
    hog = "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo unreachable"
    ended, out, _ = await wire.run("/bin/sh", "-c", hog)
    assert (ended.reason, out) == ("oom", b"") and ended.oom_kills >= 1
    ended, _, _ = await wire.run("/bin/sh", "-c", "kill -9 $$")
    assert (ended.reason, ended.signal, ended.oom_kills) == ("signaled", 9, 0)
    ended, out, _ = await wire.run("/bin/sh", "-c", f"({hog}) 2>/dev/null; echo went on")
    assert (ended.reason, out) == ("exited", b"went on\n") and ended.oom_kills >= 1


async def test_no_more_processes(wire: Wire) -> None:
    hogs = await wire.sh("for i in $(seq 200); do sleep 77 & done; wait").begun()
    await hogs.until(lambda c: b"fork" in c.stderr.lower() or c.raw_result)
    call = wire.exec("/bin/true")
    with contextlib.suppress(Refused):
        assert (await call.end()).exit_code == 0
    # aether is not bound by the limit, but what it starts is
    assert call.failure is None or call.failure.code == "resource_exhausted"
    hogs.signal(signal.SIGKILL)
    assert (await hogs.end()).reason in ("killed", "exited")
    ended, _, _ = await wire.run("/bin/true")
    assert ended.exit_code == 0


async def test_many_at_once(wire: Wire) -> None:
    calls = [wire.exec("/bin/echo", str(i)) for i in range(100)]
    ends = await asyncio.gather(*(c.end() for c in calls))
    assert all(e.exit_code == 0 for e in ends)
    assert [c.stdout for c in calls] == [f"{i}\n".encode() for i in range(100)]
    assert await wire.list() == []


async def test_too_many_operations(wire: Wire) -> None:
    calls = [wire.exec("/bin/true") for _ in range(1025)]
    with pytest.raises(Refused) as caught:
        await calls[-1].result()
    assert caught.value.code == "too_many_operations"
    for call in calls[:-1]:
        await call.result()
        call.forget()
    assert await wire.list() == []


async def test_hostile_passwd(launched: tuple[Handle, Wire]) -> None:
    _, wire = launched

    async def replaced(script: str) -> w.Ended:
        ended, _, err = await wire.run("/bin/sh", "-c", script)
        assert ended.exit_code == 0, err
        call = wire.exec("/bin/true")
        await call.end()  # root needs no file
        return await wire.exec("/bin/true", user="1000").end()

    await replaced("rm /etc/passwd; mkfifo /etc/passwd")
    await replaced("rm /etc/passwd; ln -s /dev/zero /etc/passwd")
    await replaced("rm /etc/passwd; ln -s /proc/self/fd/0 /etc/passwd")
    await replaced("rm /etc/passwd; ln -s passwd /etc/passwd")
    await replaced("rm /etc/passwd; mkdir /etc/passwd")
    await replaced("rm -r /etc/passwd; head -c 3000000 /dev/urandom > /etc/passwd")
    await replaced(
        "rm /etc/passwd /etc/group; yes a:b:1:2:3:4:5 | head -c 3000000 > /etc/passwd; ln -s /x /etc/group"
    )
    await replaced("yes ::::::::: | tr -d '\\n' | head -c 3000000 > /etc/passwd")


async def test_result_is_a_whole_struct(wire: Wire) -> None:
    raw = await wire.exec("/bin/true").result()
    assert len(msgspec.msgpack.decode(raw)) == len(w.Ended.__struct_fields__)
