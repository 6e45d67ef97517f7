"""What is said to an edge over the Bus: subject `edge.<edge id>.<verb>`, one request struct per verb.

| verb | request | answer |
| --- | --- | --- |
| create | CreateSandbox | SandboxInfo, when it runs |
| get | SandboxId | SandboxInfo |
| list | ListSandboxes | SandboxPage |
| stop | StopSandbox | SandboxInfo, when it is gone |
| operate | Operate | OperationInfo |
| operation | GetOperation | OperationInfo |
| operations | SandboxId | OperationPage |
| signal | SignalOperation | OperationInfo |
| input | InputOperation | OperationInfo |
| resize | ResizeOperation | OperationInfo |
| sandbox_stats | SandboxId | SandboxStats |
| network | SandboxId | NetworkInfo |
| set_network_rules | SetNetworkRules | NetworkInfo, when they are in force |
| events | EventsQuery | EventPage |
| node | NodeQuery | NodeInfo |

Streams: `edge.<edge id>.attach`, opened with AttachOperation, carries AttachFrames both ways.
`edge.<edge id>.dial`, opened with DialPort, carries Dialed first and then Output and OutputEnd to the caller,
Input and InputEnd to the edge; the caller's going away ends the connection.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dsec.core.network import NetworkRules
from dsec.core.specs import SandboxSpec
from dsec.wire import aether

State = Literal["creating", "running", "pausing", "paused", "resuming", "stopping", "stopped", "failed"]
DEFAULT_OUTPUT_LIMIT = 16 << 20
MAX_OUTPUT_LIMIT = 1 << 30


class EdgeMessage(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    pass


class ErrorInfo(EdgeMessage, frozen=True):
    """A DSecError as data."""

    code: str
    message: str
    retry: str = "never"
    details: dict[str, str | int | float | bool | None] = {}


class CreateSandbox(EdgeMessage, frozen=True):
    """Repeating an id with the same spec gives the same sandbox (joins a creation that is under way)."""

    sandbox_id: str
    spec: SandboxSpec
    principal: str = ""
    deadline_s: float = 120.0
    """From its arrival; past it the creation is undone and DeadlineExceeded raised."""


class SandboxId(EdgeMessage, frozen=True):
    sandbox_id: str


class ListSandboxes(EdgeMessage, frozen=True):
    project: str | None = None
    task: str | None = None
    labels: dict[str, str] = {}
    states: list[str] = []
    after: str = ""
    """The last id of the page before."""
    limit: int = 100


class StopSandbox(EdgeMessage, frozen=True):
    sandbox_id: str
    reason: str = "requested"


class SetNetworkRules(EdgeMessage, frozen=True):
    sandbox_id: str
    rules: NetworkRules


class NetworkInfo(EdgeMessage, frozen=True):
    """What a sandbox may reach. `rules` is None where it has no network."""

    sandbox_id: str
    rules: NetworkRules | None = None


class EventsQuery(EdgeMessage, frozen=True):
    """Events of a sandbox after a position; waits up to `wait_s` for the first."""

    sandbox_id: str
    after: int = 0
    limit: int = 100
    wait_s: float = 0.0


class SandboxEvent(EdgeMessage, frozen=True):
    """Something that was seen of a sandbox from outside."""

    position: int
    time: float
    """Unix seconds."""
    kind: str
    """`network_denied`."""
    what: str = ""
    """flow, dns, http, tls or proxy."""
    reason: str = ""
    address: str = ""
    port: int = 0
    protocol: str = ""
    name: str = ""
    """The domain that was asked for."""
    inbound: bool = False
    left_out: int = 0
    """How many more like it there were: events are limited in rate."""


class EventPage(EdgeMessage, frozen=True):
    events: list[SandboxEvent]
    next: int = 0
    """Ask again with `after` of this."""
    lost: int = 0
    """Events after `after` that are not kept any more."""


class SandboxInfo(EdgeMessage, frozen=True):
    """A sandbox as its owner sees it. Times are Unix seconds."""

    id: str
    state: State
    edge: str
    backend: str
    image: str
    layers: list[str] = []
    project: str = "default"
    task: str = ""
    labels: dict[str, str] = {}
    created_at: float = 0.0
    ready_at: float | None = None
    ended_at: float | None = None
    last_used_at: float = 0.0
    ttl_running_stop: int | None = None
    ttl_max: int | None = None
    memory_limit_mb: int = 0
    cpu_cores_limit: float = 0.0
    reason: str = ""
    """Why it stopped: requested, ttl_running_stop, ttl_max, server_stopped; or what failed."""
    error: ErrorInfo | None = None
    warnings: list[str] = []
    timings_ms: dict[str, float] = {}
    """Stages of its creation."""


class SandboxPage(EdgeMessage, frozen=True):
    sandboxes: list[SandboxInfo]
    next: str = ""


class Operate(EdgeMessage, frozen=True):
    """Start an operation, or join the one of this id. The request carries the op id.

    `stdin`: bytes given whole (commands with stdin, small uploads); a command's `stdin` field must be true.
    `wait_s`: 0 returns at once with what is known; else waits that long for the end (the operation goes on
    afterwards).
    `open_input`: more input follows over attach; otherwise the input ends after `stdin`.
    """

    sandbox_id: str
    request: aether.AnyRequest
    stdin: bytes = b""
    open_input: bool = False
    wait_s: float | None = None
    """None: until it ends."""


class GetOperation(EdgeMessage, frozen=True):
    sandbox_id: str
    op_id: str
    wait_s: float | None = 0.0
    stdout_from: int = 0
    stderr_from: int = 0


class OperationInfo(EdgeMessage, frozen=True):
    op_id: str
    sandbox_id: str
    kind: str
    state: Literal["running", "ended", "outcome_unknown"]
    session: str = ""
    command: str = ""
    """For people: the start of the command or the path."""
    started_at: float = 0.0
    pid: int = 0
    result: aether.AnyResult | None = None
    error: ErrorInfo | None = None
    stdout: bytes = b""
    """What was kept, from `stdout_from`; of content operations, the content."""
    stderr: bytes = b""
    stdout_from: int = 0
    stderr_from: int = 0
    stdout_size: int = 0
    """Bytes kept so far in all."""
    stderr_size: int = 0


class OperationPage(EdgeMessage, frozen=True):
    operations: list[OperationInfo]


class SignalOperation(EdgeMessage, frozen=True):
    sandbox_id: str
    op_id: str
    signal: int = 9
    tree: bool = True


class InputOperation(EdgeMessage, frozen=True):
    sandbox_id: str
    op_id: str
    data: bytes = b""
    eof: bool = False
    offset: int | None = None
    """Where `data` belongs in the input: what the operation has had is skipped, so that a repeat is safe."""


class ResizeOperation(EdgeMessage, frozen=True):
    sandbox_id: str
    op_id: str
    rows: int
    columns: int


class AttachOperation(EdgeMessage, frozen=True):
    """Opens a stream on an operation. `start` starts it (or joins it) first, as Operate does."""

    sandbox_id: str
    op_id: str
    start: aether.AnyRequest | None = None
    stdout_from: int = 0
    stderr_from: int = 0
    stdin_from: int | None = None
    """Not None: this stream also sends input, beginning at this offset."""


class DialPort(EdgeMessage, frozen=True):
    """Opens a connection to a TCP port inside. Raises PortRefused, PortReset, TooManyOperations."""

    sandbox_id: str
    port: int
    address: str = ""
    """A loopback address; empty: 127.0.0.1, then ::1."""
    wait_s: float = 0.0
    """For so long a port where nothing listens is tried again."""
    timeout_s: float = 10.0
    """For the connection to stand."""


class AttachFrame(msgspec.Struct, frozen=True, tag=True, tag_field="t"):
    pass


class Dialed(AttachFrame, frozen=True, tag="dialed"):
    """To the caller, first: the connection stands."""


class Output(AttachFrame, frozen=True, tag="out"):
    """To the caller."""

    stream: int
    """aether.Stream."""
    offset: int
    data: bytes


class OutputEnd(AttachFrame, frozen=True, tag="eof"):
    stream: int


class OperationEnd(AttachFrame, frozen=True, tag="end"):
    """The last frame to the caller."""

    operation: OperationInfo


class Input(AttachFrame, frozen=True, tag="in"):
    """To the edge."""

    data: bytes


class InputEnd(AttachFrame, frozen=True, tag="in_eof"):
    pass


class Resize(AttachFrame, frozen=True, tag="resize"):
    rows: int
    columns: int


class Kill(AttachFrame, frozen=True, tag="kill"):
    signal: int = 9
    tree: bool = True


AnyAttachFrame = Output | OutputEnd | OperationEnd | Input | InputEnd | Resize | Kill


class SandboxStats(EdgeMessage, frozen=True):
    sandbox_id: str
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    cpu_us: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    oom_kills: int | None = None
    operations: int = 0
    uptime_s: float = 0.0


class NodeQuery(EdgeMessage, frozen=True):
    pass


class BackendInfo(EdgeMessage, frozen=True):
    name: str
    available: bool
    reason: str = ""
    attributes: dict[str, str] = {}


class NodeInfo(EdgeMessage, frozen=True):
    """A node as placement and people see it."""

    edge: str
    version: str
    backends: list[BackendInfo]
    counts: dict[str, int]
    """Sandboxes by state."""
    max_sandboxes: int
    memory_total_mb: int
    memory_available_mb: int
    load: float
    cpus: int
    pressure: dict[str, float] = {}
    """PSI some avg10 of cpu, memory, io, where the kernel has it."""
    created_total: int = 0
    failed_total: int = 0
    operations_total: int = 0
    started_at: float = 0.0
    draining: bool = False
