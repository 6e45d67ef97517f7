"""Every error that a user of DSec can meet: a closed list, one class each.

    DSecError
    ├── InvalidArgument          the request can never succeed as it is
    │   ├── UnknownLayer, UserNotFound, NoShell, PayloadTooLarge, PathInvalid
    ├── Unauthenticated, PermissionDenied
    ├── NotFound                 SandboxNotFound, OperationNotFound, FileNotFound, WrongEdge, SessionNotFound
    ├── Conflict                 WrongState, OperationConflict, FileExists, IdempotencyMismatch
    ├── ResourceExhausted        AdmissionRefused, DiskFull, OutOfMemory, TooManyOperations, TooManyRequests
    ├── FileError                NotADirectory, IsADirectory, DirectoryNotEmpty, FileAccessDenied
    ├── DeadlineExceeded
    ├── SandboxFailed            KilledFromInside, LaunchFailed, LayerCorrupt, NodeFailed
    ├── Unavailable              AetherLost
    ├── PortError                PortRefused, PortReset
    ├── OutcomeUnknown
    ├── AuditDamaged
    └── Internal

The same `code` crosses HTTP, the Bus and the SDK. `retry` says what a caller may do: `safe` (repeat it as
it is), `never` (it will fail again), `unknown` (it may have happened; look before repeating).
"""

from __future__ import annotations

from typing import ClassVar, Literal

Retry = Literal["safe", "never", "unknown"]


class DSecError(Exception):
    """Base of all. `message` says what was being done to what, and how to mend it."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retry: ClassVar[Retry] = "never"

    def __init__(self, message: str, **details: str | int | float | bool | None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class InvalidArgument(DSecError):
    code = "invalid_argument"
    http_status = 400


class UnknownLayer(InvalidArgument):
    code = "unknown_layer"
    http_status = 404


class UserNotFound(InvalidArgument):
    code = "user_not_found"


class NoShell(InvalidArgument):
    code = "no_shell"


class ProgramNotFound(InvalidArgument):
    """`exec` found no such program, or it cannot be executed."""

    code = "program_not_found"


class PayloadTooLarge(InvalidArgument):
    code = "payload_too_large"
    http_status = 413


class PathInvalid(InvalidArgument):
    code = "path_invalid"


class Unsupported(InvalidArgument):
    """The backend or this host cannot do it."""

    code = "unsupported"
    http_status = 501


class Unauthenticated(DSecError):
    code = "unauthenticated"
    http_status = 401


class PermissionDenied(DSecError):
    code = "permission_denied"
    http_status = 403


class NotFound(DSecError):
    code = "not_found"
    http_status = 404


class SandboxNotFound(NotFound):
    code = "sandbox_not_found"


class WrongEdge(NotFound):
    """The id names an edge that is not known here."""

    code = "wrong_edge"


class OperationNotFound(NotFound):
    code = "operation_not_found"


class SessionNotFound(NotFound):
    code = "session_not_found"


class FileNotFound(NotFound):
    code = "file_not_found"


class Conflict(DSecError):
    code = "conflict"
    http_status = 409


class WrongState(Conflict):
    """The sandbox is in a state in which this cannot be done."""

    code = "wrong_state"


class OperationConflict(Conflict):
    """An operation id was used again for a different request."""

    code = "operation_conflict"


class IdempotencyMismatch(Conflict):
    """An idempotency key was used again for a different request."""

    code = "idempotency_mismatch"


class SessionBusy(Conflict):
    code = "session_busy"


class FileExists(Conflict):
    code = "file_exists"


class ResourceExhausted(DSecError):
    code = "resource_exhausted"
    http_status = 429
    retry: ClassVar[Retry] = "safe"


class AdmissionRefused(ResourceExhausted):
    """The node has no room for it now."""

    code = "admission_refused"
    http_status = 503


class DiskFull(ResourceExhausted):
    code = "disk_full"
    http_status = 507
    retry: ClassVar[Retry] = "never"


class OutOfMemory(ResourceExhausted):
    code = "out_of_memory"
    http_status = 507
    retry: ClassVar[Retry] = "never"


class TooManyOperations(ResourceExhausted):
    code = "too_many_operations"


class TooManyRequests(ResourceExhausted):
    code = "too_many_requests"


class FileError(DSecError):
    code = "file_error"
    http_status = 409


class NotADirectory(FileError):
    code = "not_a_directory"


class IsADirectory(FileError):
    code = "is_a_directory"


class DirectoryNotEmpty(FileError):
    code = "directory_not_empty"


class FileAccessDenied(FileError):
    code = "file_access_denied"
    http_status = 403


class DeadlineExceeded(DSecError):
    code = "deadline_exceeded"
    http_status = 504
    retry: ClassVar[Retry] = "unknown"


class Cancelled(DSecError):
    code = "cancelled"
    http_status = 499
    retry: ClassVar[Retry] = "safe"


class SandboxFailed(DSecError):
    code = "sandbox_failed"
    http_status = 410


class KilledFromInside(SandboxFailed):
    """What ran in the sandbox ended it. Never an infrastructure failure that a trainer should retry."""

    code = "killed_from_inside"


class LaunchFailed(SandboxFailed):
    code = "launch_failed"
    http_status = 500
    retry: ClassVar[Retry] = "safe"


class LayerCorrupt(SandboxFailed):
    code = "layer_corrupt"
    http_status = 500


class NodeFailed(SandboxFailed):
    """The node, not what ran in it, ended the sandbox: out of memory as a whole, for one."""

    code = "node_failed"
    http_status = 500
    retry: ClassVar[Retry] = "unknown"


class Unavailable(DSecError):
    code = "unavailable"
    http_status = 503
    retry: ClassVar[Retry] = "safe"


class AetherLost(Unavailable):
    """The sandbox did not answer by its deadline."""

    code = "aether_lost"
    retry: ClassVar[Retry] = "unknown"


class ProtocolError(DSecError):
    """The other side broke the protocol. From a sandbox: it is hostile or damaged."""

    code = "protocol_error"
    http_status = 502


class PortError(DSecError):
    """A port inside a sandbox, or what answers there."""

    code = "port_error"
    http_status = 502


class PortRefused(PortError):
    """Nothing listens on the port. It may come to."""

    code = "port_refused"
    retry: ClassVar[Retry] = "safe"


class PortReset(PortError):
    """The connection was torn from inside, or what came over it is not what was asked for."""

    code = "port_reset"
    retry: ClassVar[Retry] = "unknown"


class OutcomeUnknown(DSecError):
    """The step began and its end was not seen. It is never run again on its own."""

    code = "outcome_unknown"
    http_status = 500
    retry: ClassVar[Retry] = "unknown"


class AuditDamaged(DSecError):
    """The audit record was changed, or a part of it was taken out."""

    code = "audit_damaged"


class Internal(DSecError):
    code = "internal"


def _all(cls: type[DSecError]) -> list[type[DSecError]]:
    return [cls, *(d for sub in cls.__subclasses__() for d in _all(sub))]


BY_CODE: dict[str, type[DSecError]] = {c.code: c for c in _all(DSecError)} | {"internal": Internal}


def from_code(code: str, message: str, **details: str | int | float | bool | None) -> DSecError:
    """The error that `code` names; an unknown code becomes `Internal` and keeps its name in the message."""
    cls = BY_CODE.get(code)
    return cls(message, **details) if cls else Internal(f"{code}: {message}", **details)
