"""How a command ended, and what it printed."""

from __future__ import annotations

import msgspec

from dsec.wire.api import Operation


class CommandFailed(Exception):
    """Raised by `CommandResult.check`."""

    def __init__(self, result: CommandResult) -> None:
        tail = result.stderr_text[-500:].strip()
        super().__init__(f"{result.summary}{': ' + tail if tail else ''}")
        self.result = result


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What a command has printed so far, from the offsets that were asked for."""

    stdout: bytes
    stderr: bytes
    stdout_end: int
    """Offset to ask from next."""
    stderr_end: int
    running: bool

    @property
    def stdout_text(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def stderr_text(self) -> str:
        return self.stderr.decode(errors="replace")


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """stdout and stderr are bytes, whole up to the output limit. Durations are seconds."""

    op_id: str
    stdout: bytes
    stderr: bytes
    reason: str
    """exited, signaled, timed_out, oom, output_limit, killed, shell_ended."""
    exit_code: int | None
    signal: int | None
    started_at: float
    duration_s: float
    stdout_total: int
    """Bytes that the program wrote."""
    stderr_total: int
    stdout_truncated: bool
    stderr_truncated: bool
    cpu_user_s: float | None
    cpu_system_s: float | None
    max_rss_kib: int | None
    oom_kills: int
    session_replaced: bool
    """The session's shell had to be replaced; directory and saved environment were carried over."""
    cwd: str
    """Of the session afterwards."""

    @property
    def stdout_text(self) -> str:
        """As UTF-8; what is none becomes U+FFFD."""
        return self.stdout.decode(errors="replace")

    @property
    def stderr_text(self) -> str:
        return self.stderr.decode(errors="replace")

    @property
    def text(self) -> str:
        return self.stdout_text

    @property
    def ok(self) -> bool:
        return self.reason == "exited" and self.exit_code == 0

    @property
    def summary(self) -> str:
        """For people."""
        if self.reason == "exited":
            return f"exit {self.exit_code}"
        return f"signal {self.signal}" if self.reason == "signaled" else self.reason

    def check(self) -> CommandResult:
        """Itself, if it exited with 0. Raises CommandFailed."""
        if not self.ok:
            raise CommandFailed(self)
        return self


def result_of(operation: Operation, stdout: bytes, stderr: bytes) -> CommandResult:
    end = operation.result
    assert end is not None
    return CommandResult(
        op_id=operation.op_id,
        stdout=stdout,
        stderr=stderr,
        reason=end.reason,
        exit_code=end.exit_code,
        signal=end.signal,
        started_at=end.started_at,
        duration_s=end.duration_s,
        stdout_total=end.stdout_total,
        stderr_total=end.stderr_total,
        stdout_truncated=end.stdout_truncated,
        stderr_truncated=end.stderr_truncated,
        cpu_user_s=end.cpu_user_s,
        cpu_system_s=end.cpu_system_s,
        max_rss_kib=end.max_rss_kib,
        oom_kills=end.oom_kills,
        session_replaced=end.session_replaced,
        cwd=end.cwd,
    )
