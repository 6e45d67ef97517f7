"""The JSON bodies of HTTP `/v1`, shared by the apiserver and the SDK.

Bytes in JSON are a string where they are valid UTF-8, else `{"data": "<base64>", "encoding": "base64"}`.
Times are Unix seconds, durations seconds, sizes bytes, unless a name says otherwise. Request bodies with a
field that is not known are refused; answers may get new fields.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from dsec.core.network import NetworkRules
from dsec.core.specs import SandboxSpec
from dsec.wire.edge import DEFAULT_OUTPUT_LIMIT, MAX_OUTPUT_LIMIT, SandboxInfo

MAX_BATCH: Final = 32_768
MAX_WAIT_S: Final = 3600.0
ATTACH_HEADER: Final = struct.Struct("<BQ")
"""Before the bytes of a binary WebSocket frame: stream (0 stdin, 1 stdout, 2 stderr), absolute offset."""
PTY_DEFAULT: Final = ["/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"]


class Body(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a caller sends."""


class Answer(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What a caller gets."""


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are no valid UTF-8."""

    data: bytes
    encoding: Literal["base64"]


Blob = str | Encoded


def to_blob(data: bytes) -> Blob:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Encoded(data=data, encoding="base64")


def of_blob(blob: Blob) -> bytes:
    return blob.encode() if isinstance(blob, str) else blob.data


class ErrorBody(Answer, kw_only=True, frozen=True):
    code: str
    """One of a closed list: dsec.core.errors."""
    message: str
    retry: Literal["safe", "never", "unknown"] = "never"
    """`safe`: repeat it as it is. `never`: it will fail again. `unknown`: it may have happened; look
    first."""
    details: dict[str, str | int | float | bool | None] = {}


class CommandEnd(Answer, kw_only=True, frozen=True):
    """How a command ended."""

    reason: str
    """exited, signaled, timed_out, oom, output_limit, killed, shell_ended."""
    exit_code: int | None = None
    signal: int | None = None
    stdout_total: int = 0
    """Bytes that the program wrote; more than were kept when the limit cut them."""
    stderr_total: int = 0
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    started_at: float = 0.0
    duration_s: float = 0.0
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    max_rss_kib: int | None = None
    oom_kills: int = 0
    session_replaced: bool = False
    cwd: str = ""


class Operation(Answer, kw_only=True, frozen=True):
    op_id: str
    sandbox_id: str
    kind: str
    state: Literal["running", "ended", "outcome_unknown"]
    session: str = ""
    command: str = ""
    """For people: the start of the command, or the path."""
    started_at: float = 0.0
    pid: int = 0
    result: CommandEnd | None = None
    """Of exec and shell, when ended."""
    error: ErrorBody | None = None
    stdout: Blob = ""
    """What was kept, from `stdout_from`; at most 16 MiB in one answer."""
    stderr: Blob = ""
    stdout_from: int = 0
    stderr_from: int = 0
    stdout_size: int = 0
    """Bytes kept so far in all."""
    stderr_size: int = 0

    @property
    def outcome(self) -> str:
        """For people: `running`, `exit 0`, `signal 9`, `timed_out`, or an error's code."""
        if self.error is not None:
            return self.error.code
        if self.result is None:
            return self.state
        if self.result.reason == "exited":
            return f"exit {self.result.exit_code}"
        return f"signal {self.result.signal}" if self.result.reason == "signaled" else self.result.reason


class OperationList(Answer, kw_only=True, frozen=True):
    operations: list[Operation]


class ErrorAnswer(Answer, kw_only=True, frozen=True):
    error: ErrorBody
    operation: Operation | None = None
    """When an operation failed: with what it had printed."""


class CreateRequest(Body, kw_only=True, frozen=True):
    spec: SandboxSpec
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] = 120.0


class BatchRequest(Body, kw_only=True, frozen=True):
    """Repeating a `name` with the same spec gives the same sandboxes, and then nothing is cancelled when the
    client goes away."""

    spec: SandboxSpec
    count: Annotated[int, Meta(ge=1, le=MAX_BATCH)]
    name: Annotated[str, Meta(max_length=200)] = ""
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] = 600.0


class BatchLine(Answer, kw_only=True, frozen=True):
    index: int
    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None


class NetworkRulesRequest(Body, kw_only=True, frozen=True):
    network_rules: NetworkRules
    """Replaces what there was."""


class CancelRequest(Body, kw_only=True, frozen=True):
    """Undo a creation (`key`) or a batch (`name`, `count`) but for the sandboxes that are to be kept."""

    key: Annotated[str, Meta(max_length=255)] = ""
    name: Annotated[str, Meta(max_length=200)] = ""
    count: Annotated[int, Meta(ge=0, le=MAX_BATCH)] = 0
    keep: list[str] = []


class Cancelled(Answer, kw_only=True, frozen=True):
    stopped: list[str]


class CommandRequest(Body, kw_only=True, frozen=True):
    op_id: str = ""
    """Made by the client, so that a repeat joins the first; the server makes one when it is empty."""
    cwd: str = ""
    env: dict[str, str] = {}
    user: str = ""
    stdin: Blob | None = None
    """Nothing: no input, unless `open_input`."""
    open_input: bool = False
    """More input follows: over attach, or POST …/input."""
    timeout_s: Annotated[float, Meta(gt=0, le=30 * 24 * 3600)] | None = None
    output_limit: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_LIMIT)] = DEFAULT_OUTPUT_LIMIT
    kill_at_limit: bool = False
    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] | None = None
    """Answer 202 with what is known after so long; absent: when it ends."""


class ExecRequest(CommandRequest, kw_only=True, frozen=True, tag_field="kind", tag="exec"):
    argv: list[Blob]
    tty: bool = False
    rows: Annotated[int, Meta(ge=1, le=4096)] = 24
    columns: Annotated[int, Meta(ge=1, le=4096)] = 80


class ShellRequest(CommandRequest, kw_only=True, frozen=True, tag_field="kind", tag="shell"):
    command: Blob
    session: str = "default"
    background: bool = False
    """In a shell of its own, which begins with the session's directory and environment."""


class SignalRequest(Body, kw_only=True, frozen=True):
    signal: Annotated[int, Meta(ge=1, le=64)] = 9
    tree: bool = True
    """All processes that the operation began, not the leader alone."""


class ResizeRequest(Body, kw_only=True, frozen=True):
    rows: Annotated[int, Meta(ge=1, le=4096)]
    columns: Annotated[int, Meta(ge=1, le=4096)]


# --- control messages of the attach WebSocket (text frames) -------------------------------------------------


class StreamEnd(msgspec.Struct, frozen=True, tag_field="t", tag="eof"):
    """To the client: no more bytes on this stream."""

    stream: int


class AttachEnd(msgspec.Struct, frozen=True, tag_field="t", tag="end"):
    """To the client, last: the operation has ended."""

    operation: Operation


class AttachError(msgspec.Struct, frozen=True, tag_field="t", tag="error"):
    """To the client, last: the stream could not go on."""

    error: ErrorBody


class InputEnd(msgspec.Struct, frozen=True, tag_field="t", tag="in_eof"):
    """To the server: stdin has ended."""


class Resize(msgspec.Struct, frozen=True, tag_field="t", tag="resize"):
    rows: int
    columns: int


class Kill(msgspec.Struct, frozen=True, tag_field="t", tag="kill"):
    signal: int = 9
    tree: bool = True


ToClient = StreamEnd | AttachEnd | AttachError
ToServer = InputEnd | Resize | Kill

# --- files --------------------------------------------------------------------------------------------------


class FileInfo(Answer, kw_only=True, frozen=True):
    path: str
    """With U+FFFD for what is no UTF-8; then `path_b64` holds the bytes."""
    type: str
    """file, directory, symlink, fifo, socket, char, block."""
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    user: str = ""
    group: str = ""
    mtime_ns: int = 0
    atime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    links: int = 0
    target: str = ""
    """Of a symlink."""
    path_b64: bytes | None = None
    target_b64: bytes | None = None

    @property
    def path_bytes(self) -> bytes:
        """The path as it is, whatever its bytes."""
        return self.path.encode() if self.path_b64 is None else self.path_b64

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]


class FileList(Answer, kw_only=True, frozen=True):
    entries: list[FileInfo]
    truncated: bool = False
    """There were more than `limit`, or than fit into one answer."""


class TreeResult(Answer, kw_only=True, frozen=True):
    entries: int
    bytes: int


class WatchEvent(Answer, kw_only=True, frozen=True):
    """Text frames of the watch WebSocket. `event`: watching (first: from here on nothing is missed), created,
    modified, removed, moved_from, moved_to, attrib, overflow (events were lost: list again)."""

    event: str
    path: str = ""
    path_b64: bytes | None = None

    @property
    def path_bytes(self) -> bytes:
        return self.path.encode() if self.path_b64 is None else self.path_b64


# --- the rest -----------------------------------------------------------------------------------------------


class ImportRequest(Body, kw_only=True, frozen=True):
    """An image of a registry, as HOST/REPOSITORY:TAG or HOST/REPOSITORY@sha256:DIGEST."""

    source: str
    name: str = ""
    """Empty: as in its registry."""
    kind: Literal["base", "workspace", "toolkit", "snapshot"] = "base"
    labels: dict[str, str] = {}
    platform: str = ""
    """Such as linux/arm64. Empty: Linux on the node's machine."""


class PackRequest(Body, kw_only=True, frozen=True):
    """See dsec.wire.layers.PackDiff."""

    name: str = ""
    labels: dict[str, str] = {}
    defaults: bool = True
    remove: list[str] = []
    keep: list[str] = []
    refuse: bool = True
    smoke: str = ""
    smoke_timeout_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] = 60.0


class Done(Answer, kw_only=True, frozen=True):
    ok: bool = True


class Health(Answer, kw_only=True, frozen=True):
    status: str
    version: str
