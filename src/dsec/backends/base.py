"""The seam between the edge and what a sandbox runs on. Narrow: eight verbs, and capabilities for the rest.

Everything that happens inside a running sandbox (commands, files, terminals) goes through aether over the
connection that `connect` gives, the same for every backend. tests/backends/ is the suite that all must pass.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from dsec.core.images import ImageConfig as ImageConfig
from dsec.core.images import LayerRef as LayerRef
from dsec.core.network import Policy
from dsec.core.specs import SandboxSpec


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend needs to launch. `layers` are bottom to top."""

    sandbox_id: str
    slot: int
    """Unique among live sandboxes of this edge; user ids and other per-sandbox ranges derive from it."""
    spec: SandboxSpec
    layers: list[LayerRef]
    image: ImageConfig
    policy: Policy | None = None
    """What its network_rules come to on this node; None: it has no network."""
    network_env: dict[str, str] = {}
    """What allowed services set, below what its owner sets."""


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data, kept by the edge, from which a later edge finds the sandbox again."""

    backend: str
    sandbox_id: str
    slot: int
    pid: int
    """Of aether or of the VMM, in the host's pid namespace; 0: none."""
    start_time: int
    """Field 22 of /proc/pid/stat: with the boot id it tells this process from a later one of the same pid."""
    boot_id: str
    socket_path: str
    data: dict[str, str] = {}
    """The backend's own."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What this node can do with a backend, and why not."""

    available: bool
    reason: str = ""
    attributes: dict[str, str] = {}
    """Such as `mount_path`, `cgroup`, `disk_limit`: what is in force here."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Of one sandbox. Bytes, microseconds, counts; None where the host cannot tell."""

    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    cpu_us: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    oom_kills: int | None = None


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """Why the sandbox's own process is gone."""

    exit_code: int | None = None
    signal: int | None = None
    host_oom: bool = False
    """The host, not the sandbox's limit, ended it for memory."""
    log: str = ""
    """What aether or the VMM said last, for the failure's message."""


class WritableSnapshot:
    """A sandbox's writable layer as it was at one instant. To be closed, in a thread: that blocks."""

    def __init__(
        self,
        upper: Path,
        *,
        frozen_s: float,
        how: str,
        close: Callable[[], None],
        platform: Mapping[str, str] | None = None,
    ) -> None:
        self.upper = upper
        """The upper directory of an overlay, with whiteouts and opaque directories; nothing writes to it."""
        self.frozen_s = frozen_s
        """How long what runs in the sandbox stood still, in seconds."""
        self.how = how
        """`snapshot`, `reflink` or `copy`: whether the time depends on nothing, on files, or on bytes."""
        self.platform = dict(platform or {})
        """Files of /etc that were the sandbox's own, not its image's: name and content as written."""
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Remove it. Idempotent. What was never closed is removed by `reclaim`."""
        close, self._close = self._close, None
        if close:
            close()

    def __enter__(self) -> WritableSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Backend(Protocol):
    """Every method may raise a dsec.core.errors.DSecError; anything else is a bug.

    Slow kernel work runs in threads of the backend's own, so that the event loop never waits.
    """

    name: str
    capabilities: frozenset[str]
    """Of: pack, pause, fork, snapshot, screen, network."""

    async def open(self) -> None:
        """Make what all sandboxes of this node share. Idempotent; may find the leavings of a killed edge."""

    async def close(self, *, keep: bool) -> None:
        """Give back what `open` made. `keep`: sandboxes are alive, so leave what they stand on."""

    async def fingerprint(self) -> Fingerprint: ...

    async def launch(self, spec: LaunchSpec) -> tuple[Handle, socket.socket]:
        """Make the sandbox and wait until its aether is ready.

        The socket is connected, non-blocking, and aether's HELLO is the next thing to be read. Raises
        LaunchFailed, LayerCorrupt, UserNotFound, DiskFull, ... and has then undone all that it did; what it
        could not undo is logged, and `destroy` and `reclaim` will find it. Cancellation undoes it as well.
        """

    async def recover(self, handle: Handle) -> socket.socket:
        """Connect again to a sandbox of an earlier edge. Raises SandboxFailed when it is gone."""

    async def connect(self, handle: Handle) -> socket.socket:
        """A new connection to a running sandbox's aether (which drops the one before)."""

    async def wait_exit(self, handle: Handle) -> Exit:
        """Returns when the sandbox's own process has ended, however it was ended. Costs no task a poll."""

    async def stop(self, handle: Handle) -> None:
        """End everything that runs, now. What it left (writable layer, groups) stays until `destroy`."""

    async def destroy(self, handle: Handle) -> None:
        """Remove all that `launch` made. Idempotent, and safe after a failed or half-made launch."""

    async def stats(self, handle: Handle) -> Stats: ...

    def answered(self, handle: Handle) -> None:
        """Told once, when the sandbox's first operation has ended. Quick, raises nothing."""

    async def reclaim(self, claimed: frozenset[str]) -> list[str]:
        """Destroy whatever this edge's earlier lives made and no id in `claimed` owns; say what it was."""

    def half_made(self, sandbox_id: str, slot: int) -> Handle:
        """The handle to destroy when an edge died between its record and the end of `launch`."""


class Packs(Protocol):
    """What a backend with the capability `pack` can do besides."""

    async def snapshot_writable(self, handle: Handle) -> WritableSnapshot:
        """Freeze what runs inside, take the writable layer as it is, thaw; the sandbox goes on.

        Thaws whatever happens, and the next life of a killed edge thaws what that left frozen. Of one sandbox
        one at a time. Raises SandboxFailed where it is gone or being destroyed, Unavailable where something
        inside does not stand still, DiskFull, and Unsupported where this host cannot freeze.
        """


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a sandbox was not let do."""

    what: str
    """flow, dns, http, tls or proxy."""
    reason: str
    address: str = ""
    port: int = 0
    protocol: str = ""
    name: str = ""
    inbound: bool = False
    left_out: int = 0
    """How many more are in no event."""


class Networks(Protocol):
    """What a backend with the capability `network` can do besides: LaunchSpec.policy, and these."""

    on_seen: Callable[[str, Seen], None]
    """Set by the edge; called on its loop, with a sandbox's id."""

    async def set_network_rules(self, handle: Handle, policy: Policy, spec: SandboxSpec) -> None:
        """In force when this returns, for flows that are open as well.

        Also puts the rules of a sandbox of an earlier life in force again, before `reclaim`. Raises
        InvalidArgument for rules that do not fit, WrongState for a sandbox without a network, Unavailable.
        """
