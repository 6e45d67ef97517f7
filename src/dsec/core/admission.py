"""Is there room on a node for one more sandbox? Pure arithmetic on what was promised and what is free."""

from __future__ import annotations

import msgspec

from dsec.core.errors import AdmissionRefused


class Share(msgspec.Struct, frozen=True):
    """What sandboxes were promised."""

    sandboxes: int = 0
    memory_mb: int = 0
    pids: int = 0

    def plus(self, other: Share) -> Share:
        return Share(
            self.sandboxes + other.sandboxes, self.memory_mb + other.memory_mb, self.pids + other.pids
        )

    def minus(self, other: Share) -> Share:
        return Share(
            self.sandboxes - other.sandboxes, self.memory_mb - other.memory_mb, self.pids - other.pids
        )


class NodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a node gives. A ratio says how often the same memory (process number) may be promised."""

    max_sandboxes: int
    memory_total_mb: int
    memory_overcommit: float
    """Sandboxes use a small part of their limit; the limit is what one of them may take at its worst."""
    memory_reserve_mb: int
    """Free memory below which nothing is admitted, whatever was promised."""
    pids_total: int
    pids_overcommit: float


def admit(limits: NodeLimits, used: Share, asked: Share, *, memory_available_mb: int) -> Share:
    """What is used with `asked` in it. Raises AdmissionRefused that names the limit met."""
    after = used.plus(asked)
    if after.sandboxes > limits.max_sandboxes:
        raise AdmissionRefused(f"the node holds its {limits.max_sandboxes} sandboxes; stop some, or retry")
    promised = int(limits.memory_total_mb * limits.memory_overcommit)
    if after.memory_mb > promised:
        raise AdmissionRefused(
            f"memory limits of all sandboxes would be {after.memory_mb} MiB, the node promises at most "
            f"{promised} MiB; stop some, or ask for less than {asked.memory_mb} MiB"
        )
    if after.pids > int(limits.pids_total * limits.pids_overcommit):
        raise AdmissionRefused(
            f"process limits of all sandboxes would be {after.pids}, over what the node promises"
        )
    if memory_available_mb < limits.memory_reserve_mb:
        raise AdmissionRefused(
            f"the node has {memory_available_mb} MiB of memory free and keeps {limits.memory_reserve_mb}"
        )
    return after
