"""Terminals: size, resize, hang-up."""

from __future__ import annotations

import pytest
from tests.agent.wire import Wire

pytestmark = pytest.mark.kernel


async def test_size_and_resize(wire: Wire) -> None:
    call = wire.exec("/bin/bash", "--norc", tty=True, rows=33, columns=101, env={"PS1": "> "})
    call.write(b"stty size; tty\n")
    await call.seen(b"33 101\r\n/dev/pts/")
    call.write(b"trap 'echo resized' WINCH; echo rea''dy\n")
    await call.seen(b"ready")
    call.resize(40, 120)
    await call.seen(b"resized")
    call.write(b"stty size\n")
    await call.seen(b"40 120")
    for rows, columns in ((0, 0), (-1, 5), (1 << 40, 1), (100_000, 1)):
        call.resize(rows, columns)
    call.write(b"stty size; exit 5\n")
    ended = await call.end()
    assert call.stdout.count(b"40 120") == 2
    assert (ended.reason, ended.exit_code, call.stderr) == ("exited", 5, b"")


async def test_size_that_was_not_given(wire: Wire) -> None:
    ended, out, _ = await wire.run("/bin/stty", "size", tty=True)
    assert (ended.exit_code, out) == (0, b"24 80\r\n")


async def test_type_of_the_terminal(wire: Wire) -> None:
    _, out, _ = await wire.run(
        "/bin/sh", "-c", "echo $TERM; test -t 0 && test -t 1 && test -t 2 && echo all", tty=True
    )
    assert out == b"xterm\r\nall\r\n"
    _, out, _ = await wire.run("/bin/sh", "-c", "echo $TERM", tty=True, env={"TERM": "dumb"})
    assert out == b"dumb\r\n"


IN_FOREGROUND = """
for p in /proc/[0-9]*; do
    read -r _ name _ _ group _ _ foreground _ <$p/stat 2>/dev/null || continue
    [ "$name" = "(sleep)" ] && [ "$group" = "$foreground" ] && echo yes
done
"""


async def test_interrupt_and_job_control(wire: Wire) -> None:
    call = wire.exec("/bin/bash", "--norc", tty=True)
    call.write(b"sleep 1000; echo st''atus $?\n")
    await call.seen(b"sleep 1000")

    async def runs() -> bool:
        return "sleep 1000" in await wire.processes()

    while not await runs():
        pass
    call.write(b"\x03")
    call.write(b"echo st''atus $?\n")
    await call.seen(b"status 130")
    call.write(b"sleep 1001 &\nfg\n")
    await call.seen(b"sleep 1001\r\n")
    # The shell tells of it before it gives it the terminal, and a ^Z in between would go to the shell.
    while b"yes" not in (await wire.run("/bin/sh", "-c", IN_FOREGROUND))[1]:
        pass
    call.write(b"\x1a")
    await call.seen(b"Stopped")
    call.write(b"kill %1; exit 0\n")
    call.write(b"exit 0\n")
    assert (await call.end()).exit_code in (0, 148)


async def test_end_of_the_input_is_typed(wire: Wire) -> None:
    call = wire.exec("/bin/cat", tty=True)
    call.write(b"x\n")
    await call.seen(b"x\r\nx\r\n")
    call.eof()
    ended = await call.end()
    assert (ended.reason, ended.exit_code) == ("exited", 0)
    call = wire.sh("stty -echo; echo ready; cat >/dev/null; echo after", tty=True)
    await call.seen(b"ready")
    call.write(b"y\n" * 20_000)
    call.eof()
    assert (await call.end()).exit_code == 0 and b"after" in call.stdout


async def test_all_output_before_the_end(wire: Wire) -> None:
    for _ in range(5):
        ended, out, _ = await wire.run("/bin/seq", "20000", tty=True)
        assert ended.exit_code == 0
        assert out == b"".join(b"%d\r\n" % i for i in range(1, 20001))


async def test_jobs_left_behind_do_not_hold_the_call(wire: Wire) -> None:
    call = wire.sh("nohup sleep 1002 >/dev/null 2>&1 & sleep 0.05; echo started", tty=True)
    assert (await call.end()).exit_code == 0
    assert "sleep 1002" in await wire.processes()


async def test_timeout_and_kill(wire: Wire) -> None:
    ended, _, _ = await wire.run("/bin/bash", "--norc", tty=True, timeout_ms=200)
    assert ended.reason == "timed_out"
    call = await wire.exec("/bin/sleep", "1003", tty=True).begun()
    call.signal(9)
    assert (await call.end()).reason == "killed"


async def test_as_a_user(wire: Wire) -> None:
    call = wire.sh("tty; id -u; stty -echo && echo done", tty=True, user="user")
    assert (await call.end()).exit_code == 0
    assert b"1000\r\ndone\r\n" in call.stdout


async def test_large_input_is_not_lost(wire: Wire) -> None:
    call = wire.sh("stty raw -echo; echo ready; head -c 300000 | sha256sum", tty=True)
    await call.seen(b"ready")
    call.write(b"x" * 300_000)
    assert (await call.end()).exit_code == 0
    import hashlib

    assert hashlib.sha256(b"x" * 300_000).hexdigest().encode() in call.stdout
