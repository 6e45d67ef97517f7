"""Between JSON bodies and the edge's messages. Everything that a caller says is checked here or on the
edge."""

from __future__ import annotations

import math
from typing import Any

from dsec.apiserver.http import OperationFailed, check_path
from dsec.core.errors import InvalidArgument, OutcomeUnknown, PayloadTooLarge, from_code
from dsec.core.ids import check_operation_id, check_session_name, new_operation_id
from dsec.core.specs import USER, check_env
from dsec.wire import aether as w
from dsec.wire import api
from dsec.wire import edge as m
from dsec.wire.audit import MAX_TEXT


def command_head(body: api.ExecRequest | api.ShellRequest) -> str:
    """Enough of a command to know it by, for the audit record."""
    words = [body.command] if isinstance(body, api.ShellRequest) else body.argv[:16]
    return " ".join(api.of_blob(word)[:MAX_TEXT].decode(errors="replace") for word in words)


def command_request(r: api.ExecRequest | api.ShellRequest, op_id: str = "") -> w.Exec | w.Shell:
    """Raises InvalidArgument, PathInvalid or PayloadTooLarge."""
    op_id = check_operation_id(op_id or r.op_id or new_operation_id())
    check_env(r.env)
    if r.cwd:
        check_path(r.cwd.encode(), "cwd")
    stdin = r.stdin is not None or r.open_input
    timeout_ms = 0 if r.timeout_s is None else math.ceil(r.timeout_s * 1000)
    if isinstance(r, api.ExecRequest):
        return w.Exec(
            op_id=op_id,
            argv=_argv(r.argv, r.env),
            env=r.env,
            cwd=r.cwd,
            user=check_user(r.user),
            stdin=stdin,
            tty=r.tty,
            rows=r.rows,
            columns=r.columns,
            timeout_ms=timeout_ms,
            output_limit=r.output_limit,
            kill_at_limit=r.kill_at_limit,
        )
    return w.Shell(
        op_id=op_id,
        session=check_session_name(r.session),
        command=_command(r.command),
        cwd=r.cwd,
        env=r.env,
        user=check_user(r.user),
        stdin=stdin,
        background=r.background,
        timeout_ms=timeout_ms,
        output_limit=r.output_limit,
        kill_at_limit=r.kill_at_limit,
    )


def _argv(argv: list[api.Blob], env: dict[str, str]) -> list[Any]:
    if not argv or not argv[0]:
        raise InvalidArgument("argv: name a program")
    out = [a if isinstance(a, str) else a.data for a in argv]
    if any(("\0" in a) if isinstance(a, str) else (b"\0" in a) for a in out):
        raise InvalidArgument("argv: holds a NUL")
    size = sum(len(a) + 1 for a in out) + sum(len(k) + len(v) + 2 for k, v in env.items())
    if size > w.MAX_ARGS - 4096:
        raise PayloadTooLarge(f"argv and env of {size} bytes; at most {w.MAX_ARGS - 4096}")
    return out


def _command(blob: api.Blob) -> bytes:
    command = api.of_blob(blob)
    if b"\0" in command:
        raise InvalidArgument("command: holds a NUL")
    if len(command) > w.MAX_COMMAND:
        raise PayloadTooLarge(
            f"a command of {len(command)} bytes; at most {w.MAX_COMMAND}: write it to a file, run the file"
        )
    return command


def check_user(user: str) -> str:
    if user and not USER.match(user):
        raise InvalidArgument(f"user: {user[:80]!r} is no user (name, uid, name:group, uid:gid)")
    return user


def operation(info: m.OperationInfo) -> api.Operation:
    """For callers. An error of the operation itself stands in it."""
    result = info.result if isinstance(info.result, w.Ended) else None
    error = None
    if info.error is not None:
        e = info.error
        known = from_code(e.code, e.message)
        error = api.ErrorBody(code=known.code, message=known.message, retry=known.retry, details=e.details)
    return api.Operation(
        op_id=info.op_id,
        sandbox_id=info.sandbox_id,
        kind=info.kind,
        state=info.state,
        session=info.session,
        command=info.command,
        started_at=info.started_at,
        pid=info.pid,
        result=None if result is None else _ended(result),
        error=error,
        stdout=api.to_blob(info.stdout) if info.stdout else "",
        stderr=api.to_blob(info.stderr) if info.stderr else "",
        stdout_from=min(info.stdout_from, info.stdout_size),
        stderr_from=min(info.stderr_from, info.stderr_size),
        stdout_size=info.stdout_size,
        stderr_size=info.stderr_size,
    )


def _ended(e: w.Ended) -> api.CommandEnd:
    return api.CommandEnd(
        reason=e.reason,
        exit_code=None if e.exit_code < 0 else e.exit_code,
        signal=e.signal or None,
        stdout_total=e.stdout_total,
        stderr_total=e.stderr_total,
        stdout_truncated=e.stdout_total > e.stdout_kept,
        stderr_truncated=e.stderr_total > e.stderr_kept,
        started_at=e.started_ns / 1e9,
        duration_s=e.duration_ns / 1e9,
        cpu_user_s=None if e.cpu_user_us < 0 else e.cpu_user_us / 1e6,
        cpu_system_s=None if e.cpu_system_us < 0 else e.cpu_system_us / 1e6,
        max_rss_kib=None if e.max_rss_kib < 0 else e.max_rss_kib,
        oom_kills=e.oom_kills,
        session_replaced=e.session_replaced,
        cwd=e.cwd,
    )


def raise_failed(info: m.OperationInfo) -> None:
    """Raises OperationFailed if the operation ended in an error."""
    if info.error is not None:
        error = from_code(info.error.code, info.error.message, **info.error.details)
        raise OperationFailed(error, operation(info))
    if info.state == "outcome_unknown":
        error = OutcomeUnknown(f"operation {info.op_id} began and its end was not seen")
        raise OperationFailed(error, operation(info))


def _name(path: bytes) -> tuple[str, bytes | None]:
    try:
        return path.decode(), None
    except UnicodeDecodeError:
        return path.decode(errors="replace"), path


def file_info(s: w.Stat) -> api.FileInfo:
    path, path_b64 = _name(s.path)
    target, target_b64 = _name(s.target)
    return api.FileInfo(
        path=path,
        path_b64=path_b64,
        type=s.type,
        size=s.size,
        mode=s.mode,
        uid=s.uid,
        gid=s.gid,
        user=s.user,
        group=s.group,
        mtime_ns=s.mtime_ns,
        atime_ns=s.atime_ns,
        ctime_ns=s.ctime_ns,
        inode=s.inode,
        links=s.links,
        target=target,
        target_b64=target_b64,
    )


def watch_event(event: str, path: bytes) -> api.WatchEvent:
    text, b64 = _name(path)
    return api.WatchEvent(event=event, path=text, path_b64=b64)
