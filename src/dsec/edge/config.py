"""The knobs of one edge."""

from __future__ import annotations

import os

import msgspec

from dsec.core.network import Service


def _cpus() -> int:
    return os.cpu_count() or 1


class EdgeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds, sizes bytes unless the name says otherwise."""

    max_sandboxes: int = 10_000
    services: dict[str, Service] = {}
    """What the names in network_rules mean on this node."""
    drop_denied: bool = False
    """Drop what the network's rules deny instead of refusing it."""
    memory_overcommit: float = 512.0
    memory_reserve_mb: int = 256
    pids_overcommit: float = 512.0
    launches_at_once: int = msgspec.field(default_factory=lambda: 4 * _cpus())
    stops_at_once: int = msgspec.field(default_factory=lambda: 4 * _cpus())
    hello_deadline_s: float = 20.0
    """Within which aether must say HELLO on a new connection."""
    answer_deadline_s: float = 30.0
    """Within which aether must answer a START, then a PING; else the connection is dropped and made again."""
    lost_after_s: float = 45.0
    """Without a connection for so long, a sandbox whose process lives is `aether_lost`."""
    breaches: int = 3
    """Breaches of the protocol in a row after which a sandbox has failed."""
    retry_s: float = 1.0
    """First pause before a failed stop or destroy is tried again; doubled up to a minute."""
    max_operations: int = 256
    """Running at once in one sandbox."""
    max_connections: int = 128
    """Through the server to ports inside one sandbox, at once."""
    content_limit: int = 64 << 20
    """Bytes of a file or tree that are kept for a caller that does not stream it."""
    inline_limit: int = 16 << 20
    """Bytes of output per stream in one answer; the rest is to be asked for by offset."""
    hang_up_after_s: float = 60.0
    """A terminal whose stream has been gone for so long is hung up: what runs on it gets SIGHUP."""
    ended_kept: int = 4096
    ended_bytes: int = 64 << 20
    """Ended operations held in memory, for all sandboxes; the others are read from the log."""
    stopped_kept: int = 10_000
    stopped_kept_s: float = 3600.0
    spool_per_sandbox: int = 512 << 20
    """Bytes of output that are kept on disk for one sandbox; beyond it the oldest goes."""
    spool_kept: int = 4 << 30
    """Bytes of output of stopped sandboxes that are kept on disk."""
    stop_deadline_s: float = 60.0
    """At the end of the edge: for all sandboxes to be destroyed."""
