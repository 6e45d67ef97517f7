"""What the edge gives the audit record: lives of sandboxes, and what misbehaved inside them."""

from __future__ import annotations

from typing import Final

from dsec.core.sandbox_state import State
from dsec.edge.operation import Operation
from dsec.edge.sandbox import Sandbox
from dsec.wire import aether as w
from dsec.wire.audit import AuditEntry, Sink, Value, short

MISBEHAVIOUR: Final = frozenset({"oom", "output_limit", "timed_out"})
"""Reasons for which a command ended; also what the host itself has had to limit."""
FAILURES: Final = frozenset({"killed_from_inside", "aether_lost", "protocol_error", "node_failed"})


class Auditing:
    """With no sink nothing is told."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink

    def _tell(self, sandbox: Sandbox, kind: str, what: str, **detail: Value) -> None:
        if self._sink is None:
            return
        record = sandbox.record
        self._sink(
            AuditEntry(
                kind="action" if kind == "action" else "misbehaviour",
                what=what,
                sandbox=record.id,
                project=record.spec.project,
                who=record.principal if kind == "action" else "",
                detail={k: short(v) if isinstance(v, str) else v for k, v in detail.items()},
            )
        )

    def created(self, sandbox: Sandbox) -> None:
        """Admitted: whether it came to run, its end says."""
        spec = sandbox.record.spec
        self._tell(sandbox, "action", "sandbox.created", image=spec.image, task=spec.task)

    def ended(self, sandbox: Sandbox) -> None:
        """Nothing of it is left."""
        failure = sandbox.machine.failure
        self._tell(sandbox, "action", "sandbox.ended", reason=sandbox.machine.reason)
        if sandbox.state is State.FAILED and failure is not None and failure.code in FAILURES:
            self._tell(sandbox, "misbehaviour", failure.code, message=failure.message)

    def operation_ended(self, sandbox: Sandbox, operation: Operation) -> None:
        result = operation.result
        if isinstance(result, w.Ended) and (result.reason in MISBEHAVIOUR or result.oom_kills > 0):
            self._tell(
                sandbox,
                "misbehaviour",
                "oom" if result.oom_kills > 0 else result.reason,
                operation=operation.id,
                command=operation.intent.command,
                reason=result.reason,
                oom_kills=result.oom_kills,
                stdout_bytes=result.stdout_total,
                stderr_bytes=result.stderr_total,
            )

    def misbehaved(self, sandbox: Sandbox, what: str, **detail: Value) -> None:
        """Seen by others than commands, such as a flow that the network's rules refused."""
        self._tell(sandbox, "misbehaviour", what, **detail)
