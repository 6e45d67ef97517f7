"""The protocol between edge and aether: frames, and the messages inside them. docs/protocol.md is its text.

One byte stream carries many channels: a Unix socket for containers, a virtio-serial port for VMs. A frame is
a 12-byte header, little-endian `<length u32><channel u32><type u8><flags u8><zero u16>`, and `length` bytes
of payload: msgpack arrays (structs below, fields in order), or raw bytes in DATA. Nothing here does I/O.

Everything that comes from aether is hostile: every length has a limit, and a breach is a ProtocolError.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Final

import msgspec

VERSION: Final = 1
HEADER: Final = struct.Struct("<IIBBH")
MAX_PAYLOAD: Final = 1 << 20
WINDOW: Final = 256 << 10
"""Bytes that may be on their way, unacknowledged, per stream, from aether to the edge."""
UPLOAD_WINDOW: Final = 1 << 20
"""The same from the edge to aether."""
MAX_COMMAND: Final = 256 << 10
MAX_ARGS: Final = 1 << 20
"""Bytes of argv and env together, with one byte for each end."""
CONTROL: Final = 0
"""The channel of the connection itself."""


class Type(IntEnum):
    HELLO = 1  # both ways, channel 0: Hello; the first frame each side sends
    START = 2  # edge: one of the requests below opens a channel
    ATTACH = 3  # edge: Attach: put a known operation on this channel
    STARTED = 4  # aether: Started
    DATA = 5  # both: raw bytes; flags name the Stream
    ACK = 6  # both: u64 absolute offset; bytes below it are safe here, the sender may forget them
    EOF = 7  # both: no more bytes on the stream in flags
    RESULT = 8  # aether: the operation has ended: the result struct of its kind
    ERROR = 9  # aether: the operation could not be done: Failure
    FORGET = 10  # edge: the result is safe here; drop the operation and the channel
    SIGNAL = 11  # edge: Signal
    RESIZE = 12  # edge: Resize
    PING = 13  # edge, channel 0: up to 64 bytes, which PONG repeats
    PONG = 14
    EVENT = 15  # aether, channel 0: Event
    LIST = 16  # edge, channel 0: what operations are known? Answered by OPERATIONS
    OPERATIONS = 17  # aether, channel 0: array of Known
    CONFIG = 20  # edge, once, before HELLO, with file descriptors: Config
    BYE = 21  # edge, channel 0: end the sandbox: SIGTERM to all, SIGKILL after the grace (u32 ms), then exit


class Stream(IntEnum):
    STDIN = 0  # edge to aether: stdin of a program, or the bytes of an upload
    STDOUT = 1
    STDERR = 2
    CONTENT = 3  # aether to edge: the bytes of a file or of a tree


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Encoded as an array, fields in order; fields are only ever added at the end."""


class Hello(Message, frozen=True):
    version: int
    oldest: int
    """The oldest version that the sender still speaks. No overlap: ERROR `version_mismatch`, then close."""
    sandbox_id: str
    instance: bytes
    """16 random bytes that aether makes once: the edge sees by it that it is the same aether as before."""
    features: list[str]


class Attach(Message, frozen=True):
    op_id: str
    stdout: int
    """Offset from which stdout (or content) is wanted again; below what was ACKed it is refused."""
    stderr: int


class Started(Message, frozen=True):
    pid: int
    """Inside the sandbox; 0 where there is no process."""
    known: bool
    """The id was known already: this is the operation of before, nothing was started."""


class Failure(Message, frozen=True):
    code: str
    """One of dsec.core.errors."""
    message: str
    errno: int


class Signal(Message, frozen=True):
    signal: int
    tree: bool
    """All processes that the operation began, not the leader alone."""


class Resize(Message, frozen=True):
    rows: int
    columns: int


class Event(Message, frozen=True):
    kind: str
    """`session_ended`, `oom_kill`."""
    subject: str
    detail: str
    number: int


class Known(Message, frozen=True):
    op_id: str
    kind: str
    """Tag of its request."""
    state: str
    """`running` or `ended`."""
    session: str
    pid: int


# --- Requests (START): the tag is the first element of the array -----------------------------------------


class Request(msgspec.Struct, array_like=True, frozen=True, tag_field="kind"):
    op_id: str


class Exec(Request, frozen=True, tag="exec"):
    """One program, no shell. Answered by STARTED, DATA, EOF, RESULT (Ended)."""

    argv: list[Any]
    """Each str or bytes, which msgspec has no type for."""
    env: dict[str, str]
    """Added to the sandbox's environment."""
    cwd: str
    """Empty: the sandbox's working directory."""
    user: str
    """Empty: the sandbox's user. `name`, `uid`, `name:group`, `uid:gid`."""
    stdin: bool
    """DATA on STDIN follows, until EOF. Otherwise stdin is /dev/null."""
    tty: bool
    """A terminal of its own: all output on STDOUT, RESIZE works, EOF types the end of input (^D)
    there, TERM is `xterm` unless given."""
    rows: int
    columns: int
    timeout_ms: int
    """0: none."""
    output_limit: int
    """Bytes kept per stream; what is beyond is read, counted and dropped."""
    kill_at_limit: bool
    """End the command when a stream reaches its limit (reason `output_limit`)."""


class Shell(Request, frozen=True, tag="shell"):
    """A command in a shell session, which is begun if there is none of this name. RESULT is Ended."""

    session: str
    command: bytes
    cwd: str
    """Not empty: run there, and the session's directory is as before afterwards."""
    env: dict[str, str]
    """For this command alone."""
    user: str
    """Whose session; for an existing session it must be empty or the same (`session_busy`, else)."""
    stdin: bool
    background: bool
    """In a shell of its own that begins with the session's saved directory and environment."""
    timeout_ms: int
    output_limit: int
    kill_at_limit: bool


class CloseSession(Request, frozen=True, tag="close_session"):
    """Ends the session's shell and its process tree. RESULT is Done."""

    session: str


class ReadFile(Request, frozen=True, tag="read_file"):
    """STARTED, DATA on CONTENT, EOF, RESULT (FileDone with the file's Stat)."""

    path: bytes
    user: str
    offset: int
    length: int
    """-1: to the end."""


class WriteFile(Request, frozen=True, tag="write_file"):
    """DATA on STDIN, EOF. Written beside the target and renamed over it: whole or not at all."""

    path: bytes
    user: str
    mode: int
    """-1: 0644 less umask for a new file, an existing file's mode kept."""
    owner: str
    """Empty: the acting user. `user`, `user:group`, `uid:gid`."""
    mtime_ns: int
    """-1: now."""
    parents: bool
    """Make missing parents, owned by the acting user."""
    append: bool
    limit: int
    """Most bytes taken; one more is `payload_too_large`, and nothing is left behind."""


class ListDir(Request, frozen=True, tag="list_dir"):
    """RESULT is Listing."""

    path: bytes
    user: str
    depth: int
    """1: the directory's entries."""
    limit: int


class StatFile(Request, frozen=True, tag="stat"):
    """RESULT is FileDone."""

    path: bytes
    user: str
    follow: bool


class MakeDir(Request, frozen=True, tag="mkdir"):
    path: bytes
    user: str
    mode: int
    parents: bool
    """Make parents; an existing directory is no error."""


class Move(Request, frozen=True, tag="move"):
    path: bytes
    target: bytes
    user: str
    overwrite: bool


class Remove(Request, frozen=True, tag="remove"):
    path: bytes
    user: str
    recursive: bool
    missing_ok: bool


class Watch(Request, frozen=True, tag="watch"):
    """STARTED, then on CONTENT a stream of msgpack arrays [event, path], until SIGNAL ends it.

    event: created, modified, removed, moved_from, moved_to, attrib, overflow (events were lost: list again).
    """

    path: bytes
    user: str
    recursive: bool


class PutTree(Request, frozen=True, tag="put_tree"):
    """A tar stream (ustar, pax, GNU long names) on STDIN, unpacked below `path`. RESULT is TreeDone."""

    path: bytes
    user: str
    owner: str
    """Empty: the acting user; `keep`: the archive's numeric owners; else as in WriteFile."""
    limit_bytes: int
    limit_entries: int


class GetTree(Request, frozen=True, tag="get_tree"):
    """A pax tar of `path` on CONTENT; names are relative to it. RESULT is TreeDone."""

    path: bytes
    user: str
    limit_bytes: int
    limit_entries: int


class Dial(Request, frozen=True, tag="dial"):
    """A TCP connection to a port inside. STARTED once it stands, or ERROR `port_refused`; then DATA both ways,
    CONTENT from the port and STDIN to it, each with its EOF. RESULT (Done) when both have ended, ERROR
    `port_reset` when it was torn. Begun and forgotten by the edge alone: it is in no operation log."""

    address: str
    """A loopback address; empty: 127.0.0.1, then ::1."""
    port: int
    timeout_ms: int
    """Until it stands; 0: the kernel's own."""


AnyRequest = (
    Exec
    | Shell
    | CloseSession
    | ReadFile
    | WriteFile
    | ListDir
    | StatFile
    | MakeDir
    | Move
    | Remove
    | Watch
    | PutTree
    | GetTree
)

# --- Results (RESULT) ------------------------------------------------------------------------------------


class Ended(Message, frozen=True):
    """How a command ended."""

    reason: str
    """`exited`, `signaled`, `timed_out`, `oom`, `output_limit`, `killed` (by SIGNAL), `shell_ended`."""
    exit_code: int
    """-1: none."""
    signal: int
    """0: none."""
    stdout_total: int
    """Bytes written by the program; more than were sent when the limit cut them."""
    stderr_total: int
    stdout_kept: int
    stderr_kept: int
    started_ns: int
    """CLOCK_REALTIME."""
    duration_ns: int
    """CLOCK_MONOTONIC."""
    cpu_user_us: int
    """Of exec's leader and the children it waited for; -1 in a session."""
    cpu_system_us: int
    max_rss_kib: int
    oom_kills: int
    """Processes of the sandbox that the kernel killed for memory while it ran."""
    session_replaced: bool
    """The session's shell had to be replaced; directory and saved environment were carried over."""
    cwd: str
    """Of the session after the command; empty for exec."""


class Stat(Message, frozen=True):
    path: bytes
    type: str
    """file, directory, symlink, fifo, socket, char, block."""
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    atime_ns: int
    ctime_ns: int
    inode: int
    links: int
    target: bytes
    """Of a symlink; otherwise empty."""
    user: str
    group: str


class FileDone(Message, frozen=True):
    stat: Stat


class Listing(Message, frozen=True):
    entries: list[Stat]
    truncated: bool
    """There were more than `limit`."""


class TreeDone(Message, frozen=True):
    entries: int
    bytes: int


class Done(Message, frozen=True):
    """Nothing to say but that it is done."""

    ok: bool


AnyResult = Ended | FileDone | Listing | TreeDone | Done

RESULT_OF: dict[type[Request], type[Message]] = {
    Exec: Ended,
    Shell: Ended,
    CloseSession: Done,
    ReadFile: FileDone,
    WriteFile: FileDone,
    ListDir: Listing,
    StatFile: FileDone,
    MakeDir: FileDone,
    Move: FileDone,
    Remove: Done,
    Watch: Done,
    PutTree: TreeDone,
    GetTree: TreeDone,
}

# --- Start-up --------------------------------------------------------------------------------------------


class Step(Message, frozen=True):
    """One thing to do in the new root before pivot_root; targets are resolved below the root only.

    | op | target | source | flags | data |
    | --- | --- | --- | --- | --- |
    | mount | mount point | filesystem type | MS_* | its options |
    | attach | mount point (file or directory) | | index of a detached mount in the fds, moved there | |
    | mask | path, skipped if missing: /dev/null over a file, an empty read-only tmpfs on a directory | | | |
    | readonly | path, skipped if missing: bound on itself and remounted read-only | | MS_* kept | |
    | mkdir | path; an existing directory is no error | | mode | |
    | symlink | path; an existing entry is no error | what it points to | | |
    | file | path; made or truncated | content | mode | |
    """

    op: str
    target: str
    source: str
    flags: int
    data: str


class RLimit(Message, frozen=True):
    resource: int
    soft: int
    hard: int


class Config(Message, frozen=True):
    """All policy of one sandbox, as data. Descriptors are named by their index in the SCM_RIGHTS array."""

    version: int
    sandbox_id: str
    root: int
    """fd index of the detached overlay mount that becomes `/`."""
    listen: int
    """fd index of the bound, listening Unix socket for later edges; -1: none."""
    cgroup_join: list[int]
    """fd indices of files opened for writing, where a 0 joins: v1 `tasks`, v2 `cgroup.procs`."""
    cgroup_home: list[int]
    """The same for aether's own group."""
    cgroup_v2: bool
    oom_counter: int
    """fd index of memory.oom_control (v1) or memory.events (v2), opened for reading: a line `oom_kill N`."""
    hostname: str
    steps: list[Step]
    seccomp: bytes
    """struct sock_filter[], little-endian; empty: none."""
    capabilities: int
    """Bounding, permitted, effective set of root inside; inheritable and ambient are empty."""
    rlimits: list[RLimit]
    env: dict[str, str]
    user: str
    workdir: str
    shell: list[str]
    """Tried in order for sessions, absolute paths: /bin/bash, /bin/sh."""
    oom_score_adj: int
    """Of what runs inside."""
    umask: int
    max_operations: int
    loopback: bool
    """Bring up lo."""


PAIR = -1
"""As `owner_uid`, with no fds: asks for a pair of namespaces, answered by Paired."""


class Spawn(Message, frozen=True):
    """To a launcher, over SOCK_SEQPACKET, with fds: [control socket of the new aether] or, to enter a
    prepared pair, [control socket, user namespace, network namespace]. Answered by Spawned, and later Reaped.
    """

    sequence: int
    owner_uid: int
    """The uid, mapped in no sandbox, that owns the user namespace and that aether runs as."""


class Spawned(Message, frozen=True):
    """With one fd, a pidfd, when `errno` is 0."""

    kind: str
    """`spawned`."""
    sequence: int
    pid: int
    errno: int


class Paired(Message, frozen=True):
    """With two fds when `errno` is 0: a user namespace without ids, and a network namespace that it owns."""

    kind: str
    """`paired`."""
    sequence: int
    errno: int


class Reaped(Message, frozen=True):
    kind: str
    """`reaped`."""
    pid: int
    status: int
    """As wait(2) gives it."""
