"""What the fake aether can do: a handful of commands, and files in a dict."""

from __future__ import annotations

import asyncio
import posixpath
import re
import shlex
from collections.abc import Callable
from typing import Any

from dsec.backends.fake_aether import CHUNK, FakeAether, FakeOperation, FakeSession
from dsec.wire import aether as w

STDOUT, STDERR, CONTENT = w.Stream.STDOUT, w.Stream.STDERR, w.Stream.CONTENT
Then = Callable[[int], None]


def begin(aether: FakeAether, operation: FakeOperation) -> None:
    """Run a request, as far as it goes at once."""
    getattr(_Requests, operation.kind)(aether, operation, operation.request)


class _Requests:
    @staticmethod
    def exec(aether: FakeAether, op: FakeOperation, request: w.Exec) -> None:
        argv = [a if isinstance(a, str) else a.decode() for a in request.argv]
        _timeout(op, request.timeout_ms)
        env = {**aether.environment, **request.env}
        name = posixpath.basename(argv[0])
        if name in ("sh", "bash") and argv[1:2] == ["-c"]:
            _script(aether, op, argv[2], FakeSession(), env, op.exited)
        elif name not in _COMMANDS:
            op.fail("program_not_found", f"{argv[0]}: no such program")
        else:
            _command(aether, op, [name, *argv[1:]], FakeSession(), env, op.exited)

    @staticmethod
    def shell(aether: FakeAether, op: FakeOperation, request: w.Shell) -> None:
        session = aether.sessions.setdefault(request.session, FakeSession())
        _timeout(op, request.timeout_ms)
        env = {**aether.environment, **session.env, **request.env}
        _script(aether, op, request.command.decode(errors="replace"), session, env, op.exited)

    @staticmethod
    def close_session(aether: FakeAether, op: FakeOperation, request: w.CloseSession) -> None:
        if aether.sessions.pop(request.session, None) is None:
            op.fail("session_not_found", f"no session {request.session}")
        else:
            op.done(w.Done(True))

    @staticmethod
    def dial(aether: FakeAether, op: FakeOperation, request: w.Dial) -> None:
        op.on_input = lambda data: op.out(data, CONTENT)
        op.on_input_end = lambda: op.done(w.Done(True))

    @staticmethod
    def read_file(aether: FakeAether, op: FakeOperation, request: w.ReadFile) -> None:
        data = _file(aether, op, request.path)
        if data is None:
            return
        end = len(data) if request.length < 0 else request.offset + request.length
        _feed(
            op, data[request.offset : end], CONTENT, lambda: op.done(w.FileDone(_stat(aether, request.path)))
        )

    @staticmethod
    def write_file(aether: FakeAether, op: FakeOperation, request: w.WriteFile) -> None:
        path = aether.path(request.path)

        def end() -> None:
            if len(op.upload) > request.limit >= 0:
                op.fail("payload_too_large", f"{path}: over {request.limit} bytes")
                return
            before = (aether.files.get(path) or b"") if request.append else b""
            aether.files[path] = before + bytes(op.upload)
            op.done(w.FileDone(_stat(aether, request.path)))

        if path in aether.files and aether.files[path] is None:
            op.fail("is_a_directory", f"{path} is a directory")
        elif not request.parents and posixpath.dirname(path) not in aether.files:
            op.fail("file_not_found", f"{posixpath.dirname(path)} does not exist")
        else:
            _make_parents(aether, path)
            op.on_input, op.on_input_end = op.upload.extend, end

    @staticmethod
    def list_dir(aether: FakeAether, op: FakeOperation, request: w.ListDir) -> None:
        top = aether.path(request.path)
        if top not in aether.files:
            op.fail("file_not_found", f"{top} does not exist")
            return
        prefix = top.rstrip("/") + "/"
        names = sorted(p for p in aether.files if p.startswith(prefix) and p != "/")
        found = [p for p in names if p[len(prefix) :].count("/") < request.depth]
        entries = [_stat(aether, p.encode(errors="surrogateescape")) for p in found[: request.limit]]
        op.done(w.Listing(entries, len(found) > request.limit))

    @staticmethod
    def stat(aether: FakeAether, op: FakeOperation, request: w.StatFile) -> None:
        if aether.path(request.path) not in aether.files:
            op.fail("file_not_found", f"{request.path!r} does not exist")
        else:
            op.done(w.FileDone(_stat(aether, request.path)))

    @staticmethod
    def mkdir(aether: FakeAether, op: FakeOperation, request: w.MakeDir) -> None:
        path = aether.path(request.path)
        if path in aether.files and not (request.parents and aether.files[path] is None):
            op.fail("file_exists", f"{path} exists")
        elif not request.parents and posixpath.dirname(path) not in aether.files:
            op.fail("file_not_found", f"{posixpath.dirname(path)} does not exist")
        else:
            _make_parents(aether, path)
            aether.files[path] = None
            op.done(w.FileDone(_stat(aether, request.path)))

    @staticmethod
    def move(aether: FakeAether, op: FakeOperation, request: w.Move) -> None:
        path, target = aether.path(request.path), aether.path(request.target)
        if path not in aether.files:
            op.fail("file_not_found", f"{path} does not exist")
        elif target in aether.files and not request.overwrite:
            op.fail("file_exists", f"{target} exists")
        else:
            for p in [p for p in aether.files if p == path or p.startswith(path + "/")]:
                aether.files[target + p[len(path) :]] = aether.files.pop(p)
            op.done(w.FileDone(_stat(aether, request.target)))

    @staticmethod
    def remove(aether: FakeAether, op: FakeOperation, request: w.Remove) -> None:
        path = aether.path(request.path)
        below = [p for p in aether.files if p.startswith(path + "/")]
        if path not in aether.files and not request.missing_ok:
            op.fail("file_not_found", f"{path} does not exist")
        elif below and not request.recursive:
            op.fail("directory_not_empty", f"{path} is not empty")
        else:
            for p in [path, *below]:
                aether.files.pop(p, None)
            op.done(w.Done(True))

    @staticmethod
    def watch(aether: FakeAether, op: FakeOperation, request: w.Watch) -> None:
        """Nothing ever changes; a signal ends it."""

    @staticmethod
    def put_tree(aether: FakeAether, op: FakeOperation, request: w.PutTree) -> None:
        """The archive is kept as it came, beside its directory."""
        path = aether.path(request.path)

        def end() -> None:
            _make_parents(aether, path)
            aether.files[path] = None
            aether.files[path + "/.tar"] = bytes(op.upload)
            op.done(w.TreeDone(1, len(op.upload)))

        op.on_input, op.on_input_end = op.upload.extend, end

    @staticmethod
    def get_tree(aether: FakeAether, op: FakeOperation, request: w.GetTree) -> None:
        data = aether.files.get(aether.path(request.path) + "/.tar") or b"\0" * 1024
        _feed(op, data, CONTENT, lambda: op.done(w.TreeDone(1, len(data))))


# --- commands ---


def _timeout(op: FakeOperation, timeout_ms: int) -> None:
    if timeout_ms:
        loop = asyncio.get_running_loop()
        op.timers.append(loop.call_later(timeout_ms / 1000, op.kill, 9, "timed_out"))


def _script(
    aether: FakeAether, op: FakeOperation, text: str, session: FakeSession, env: dict[str, str], then: Then
) -> None:
    """One part after the other; `&&` goes on only after success."""
    parts = re.split(r"(;|&&|\n)", text)
    steps = [(("&&" if i and parts[i - 1] == "&&" else ";"), p) for i, p in enumerate(parts) if i % 2 == 0]

    def go(i: int, status: int) -> None:
        while i < len(steps) and (not steps[i][1].strip() or (steps[i][0] == "&&" and status != 0)):
            i += 1
        if i >= len(steps):
            then(status)
            return
        expanded = re.sub(r"\$(\w+)", lambda x: env.get(x[1], ""), steps[i][1])
        _command(aether, op, shlex.split(expanded), session, env, lambda code: go(i + 1, code))

    go(0, 0)


def _command(
    aether: FakeAether,
    op: FakeOperation,
    argv: list[str],
    session: FakeSession,
    env: dict[str, str],
    then: Then,
) -> None:
    command = _COMMANDS.get(argv[0])
    if command is None:
        op.out(f"{argv[0]}: not found\n".encode(), STDERR)
        then(127)
    else:
        command(aether, op, argv[1:], session, env, then)


def _echo(aether: Any, op: FakeOperation, args: list[str], session: Any, env: Any, then: Then) -> None:
    stream = STDERR if args[-1:] == [">&2"] else STDOUT
    words = args[:-1] if stream == STDERR else args
    op.out((" ".join(words) + "\n").encode(), stream)
    then(0)


def _cat(
    aether: FakeAether, op: FakeOperation, args: list[str], session: FakeSession, env: Any, then: Then
) -> None:
    if args:
        path = posixpath.normpath(posixpath.join(session.cwd, args[0]))
        data = aether.files.get(path)
        if data is None:
            op.out(f"cat: {args[0]}: No such file\n".encode(), STDERR)
            then(1)
        else:
            _feed(op, data, STDOUT, lambda: then(0))
    elif not op.request.stdin or op.input_ended:
        then(0)
    else:
        op.on_input, op.on_input_end = op.out, lambda: then(0)


def _sleep(aether: Any, op: FakeOperation, args: list[str], session: Any, env: Any, then: Then) -> None:
    def awake() -> None:
        then(0)
        op.flush()

    op.timers.append(asyncio.get_running_loop().call_later(float(args[0]), awake))


def _exit(aether: Any, op: FakeOperation, args: list[str], session: Any, env: Any, then: Then) -> None:
    code = int(args[0]) if args else 0
    op.exited(code, "shell_ended" if op.kind == "shell" else "exited")


def _yes(aether: Any, op: FakeOperation, args: list[str], session: Any, env: Any, then: Then) -> None:
    line = (" ".join(args or ["y"]) + "\n").encode()
    block = line * (CHUNK // len(line))
    out = op.streams[int(STDOUT)]

    def more() -> None:
        while out.room >= len(block) and out.kept < out.limit:
            out.write(block)
        if out.kept >= out.limit and op.request.kill_at_limit:
            op.kill(9, "output_limit")

    op.on_room = more
    more()


def _count(aether: Any, op: FakeOperation, args: list[str], session: Any, env: Any, then: Then) -> None:
    _feed(op, (b"0123456789abcde\n" * (int(args[0]) // 16 + 1))[: int(args[0])], STDOUT, lambda: then(0))


def _cd(
    aether: FakeAether, op: FakeOperation, args: list[str], session: FakeSession, env: Any, then: Then
) -> None:
    path = posixpath.normpath(posixpath.join(session.cwd, args[0] if args else "/root"))
    if aether.files.get(path, b"") is None:
        session.cwd = path
        then(0)
    else:
        op.out(f"cd: {path}: No such file or directory\n".encode(), STDERR)
        then(1)


def _pwd(aether: Any, op: FakeOperation, args: list[str], session: FakeSession, env: Any, then: Then) -> None:
    op.out(session.cwd.encode() + b"\n")
    then(0)


def _export(
    aether: Any, op: FakeOperation, args: list[str], session: FakeSession, env: dict[str, str], then: Then
) -> None:
    for arg in args:
        name, _, value = arg.partition("=")
        session.env[name] = env[name] = value
    then(0)


def _kill(aether: FakeAether, op: FakeOperation, args: list[str], session: Any, env: Any, then: Then) -> None:
    if args[-1:] == ["1"]:
        asyncio.get_running_loop().call_soon(aether.on_exit, 137)
    else:
        then(1)


_COMMANDS: dict[str, Callable[..., None]] = {
    "true": lambda a, op, args, s, e, then: then(0),
    "false": lambda a, op, args, s, e, then: then(1),
    "echo": _echo,
    "cat": _cat,
    "sleep": _sleep,
    "exit": _exit,
    "yes": _yes,
    "count": _count,
    "cd": _cd,
    "pwd": _pwd,
    "export": _export,
    "kill": _kill,
}

# --- files ---


def _feed(op: FakeOperation, data: bytes, stream: int, then: Callable[[], None]) -> None:
    """Write it as the window has room."""
    out, at = op.streams[int(stream)], 0

    def more() -> None:
        nonlocal at
        while at < len(data) and out.room > 0:
            part = data[at : at + min(CHUNK, out.room)]
            out.write(part)
            at += len(part)
        if at >= len(data):
            op.on_room = None
            then()

    op.on_room = more
    more()


def _file(aether: FakeAether, op: FakeOperation, path: bytes) -> bytes | None:
    name = aether.path(path)
    if name not in aether.files:
        op.fail("file_not_found", f"{name} does not exist")
        return None
    data = aether.files[name]
    if data is None:
        op.fail("is_a_directory", f"{name} is a directory")
    return data


def _make_parents(aether: FakeAether, path: str) -> None:
    while (path := posixpath.dirname(path)) != "/":
        aether.files.setdefault(path, None)


def _stat(aether: FakeAether, path: bytes) -> w.Stat:
    name = aether.path(path)
    data = aether.files.get(name)
    return w.Stat(
        path=path,
        type="directory" if data is None else "file",
        size=len(data or b""),
        mode=0o755 if data is None else 0o644,
        uid=0,
        gid=0,
        mtime_ns=0,
        atime_ns=0,
        ctime_ns=0,
        inode=1,
        links=1,
        target=b"",
        user="root",
        group="root",
    )
