"""Operations of all sandboxes: start or join by id, output kept, waiters, and their records."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.core.errors import (
    Cancelled,
    DSecError,
    InvalidArgument,
    OperationConflict,
    OperationNotFound,
    OutcomeUnknown,
    PayloadTooLarge,
    TooManyOperations,
    Unavailable,
    from_code,
)
from dsec.core.ids import check_operation_id, check_session_name
from dsec.edge.aether import AetherConnection
from dsec.edge.config import EdgeConfig
from dsec.edge.operation import COMMANDS, CONTENT, CONTENTS, RESULTS, UPLOADS, Operation
from dsec.edge.oplog import Entry, Intent, OperationLog, Outcome
from dsec.edge.output import Input, Output
from dsec.edge.sandbox import Sandbox, error_info
from dsec.edge.spool import Spool
from dsec.wire import aether as w
from dsec.wire.edge import MAX_OUTPUT_LIMIT, OperationInfo
from dsec.wire.frames import message

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
COMMAND_HEAD: Final = 200
TAGS: Final[dict[type[Any], str]] = {r: str(r.__struct_config__.tag) for r in w.RESULT_OF}


class Operations:
    """Shared by all sandboxes; what belongs to one is in its Sandbox."""

    def __init__(
        self,
        oplog: OperationLog,
        spool: Spool,
        config: EdgeConfig,
        touched: Callable[[Sandbox], None],
        noticed: Callable[[Sandbox, Operation], None] = lambda sandbox, operation: None,
    ) -> None:
        self._log = oplog
        self._spool = spool
        self._config = config
        self._touched = touched
        """Told when the last operation of a sandbox has ended."""
        self._noticed = noticed
        """Told of each operation that has ended."""
        self._sandbox_of: dict[Operation, Sandbox] = {}
        self._kept: OrderedDict[tuple[str, str], Operation] = OrderedDict()
        self._kept_bytes = 0
        self.total = 0

    # --- start, join, find ---

    def start(
        self, sandbox: Sandbox, request: w.AnyRequest, *, stdin: bytes = b"", open_input: bool, streamed: bool
    ) -> Operation:
        """The operation of this id: begun now, or the one of before if the request is the same."""
        payload = _encode(request)
        digest = blake2b(payload, digest_size=16).digest()
        if stdin:
            digest += blake2b(stdin, digest_size=8).digest()
        known = self.look(sandbox, request.op_id)
        if known is not None:
            return _same(known, digest)
        self._check(sandbox, request, payload)
        intent = self._intent(request, digest, streamed)
        operation = Operation(self, sandbox.id, intent, payload, self._spool.of(sandbox.id))
        self._log.intent(sandbox.id, intent)
        sandbox.running[intent.op_id] = operation
        self._sandbox_of[operation] = sandbox
        sandbox.operations_total += 1
        self.total += 1
        if stdin or _takes_input(request):
            operation.put(stdin, eof=not open_input)
        if sandbox.connection is not None:
            operation.begin(sandbox.connection)
        return operation

    def look(self, sandbox: Sandbox, op_id: str) -> Operation | None:
        """A known operation: running, held in memory, or read from the log."""
        operation = sandbox.running.get(op_id)
        if operation is None:
            operation = self._kept.get((sandbox.id, op_id))
        if operation is None and (entry := self._log.find(sandbox.id, op_id)) is not None:
            operation = self._from_log(sandbox.id, entry)
        return operation

    def get(self, sandbox: Sandbox, op_id: str) -> Operation:
        operation = self.look(sandbox, op_id)
        if operation is None:
            raise OperationNotFound(f"{sandbox.id} knows no operation {op_id[:80]!r}")
        return operation

    def all(self, sandbox: Sandbox, limit: int) -> list[Operation]:
        """The newest `limit`, oldest first."""
        found = {e.intent.op_id: e for e in self._log.entries(sandbox.id)[-limit:]}
        return [
            sandbox.running.get(op_id) or self._from_log(sandbox.id, entry) for op_id, entry in found.items()
        ]

    def _check(self, sandbox: Sandbox, request: w.AnyRequest, payload: bytes) -> None:
        check_operation_id(request.op_id)
        if len(sandbox.running) >= self._config.max_operations:
            raise TooManyOperations(
                f"{sandbox.id} runs {len(sandbox.running)} operations; wait for some to end"
            )
        if len(payload) > w.MAX_PAYLOAD:
            raise PayloadTooLarge(f"a request of {len(payload)} bytes; at most {w.MAX_PAYLOAD}")
        if isinstance(request, w.Shell):
            check_session_name(request.session)
            if len(request.command) > w.MAX_COMMAND:
                raise PayloadTooLarge(
                    f"a command of {len(request.command)} bytes; at most {w.MAX_COMMAND}: upload a script"
                )
        if isinstance(request, w.Exec) and not request.argv:
            raise InvalidArgument("exec: argv is empty")

    def _intent(self, request: w.AnyRequest, digest: bytes, streamed: bool) -> Intent:
        kind = TAGS[type(request)]
        limit = self._config.content_limit
        if isinstance(request, w.Exec | w.Shell):
            if not 0 <= request.output_limit <= MAX_OUTPUT_LIMIT:
                raise InvalidArgument(f"output_limit: not in 0..{MAX_OUTPUT_LIMIT}")
            limit = request.output_limit
        return Intent(
            request.op_id,
            kind,
            digest,
            getattr(request, "session", ""),
            _head(request),
            time.time(),
            limit,
            streamed and kind in CONTENTS,
            bool(getattr(request, "tty", False)),
        )

    # --- the end ---

    def ended(self, operation: Operation) -> bool:
        """Host of Operation: record the outcome, then let callers have it."""
        sandbox = self._sandbox_of.pop(operation)
        recorded = self._record(operation)
        for out in (operation.stdout, operation.stderr):
            if out is not None:
                out.close()
        sandbox.running.pop(operation.id, None)
        self._keep(operation)
        if operation.state == "ended" and operation.result is not None:
            sandbox.breaches = 0
        self._noticed(sandbox, operation)
        self._touched(sandbox)
        return recorded

    def _record(self, operation: Operation) -> bool:
        try:
            parts = [self._settle(operation, out) for out in (operation.stdout, operation.stderr)]
            (out_size, out_rest), (err_size, err_rest) = parts
            self._log.outcome(
                operation.sandbox_id,
                Outcome(
                    operation.id,
                    "ended" if operation.state == "ended" else "outcome_unknown",
                    operation.pid,
                    _encode(operation.result) if operation.result is not None else b"",
                    error_info(operation.error) if operation.error else None,
                    out_rest,
                    err_rest,
                    out_size,
                    err_size,
                    time.time(),
                ),
            )
            if (out_size or err_size) and not operation.intent.streamed:
                self._spool.settle(operation.sandbox_id, operation.id, out_size + err_size)
        except (DSecError, OSError) as e:
            log.error("outcome of %s in %s is not recorded: %s", operation.id, operation.sandbox_id, e)
            return False
        return True

    def _settle(self, operation: Operation, out: Output | None) -> tuple[int, bytes]:
        """What is in the spool, and what is not and goes into the record."""
        if out is None:
            return 0, b""
        if operation.intent.streamed:
            return out.received, b""
        if out.base and out.held:
            out.spill()  # in one place: it is read back by offset
        return out.base, out.read(out.base, out.held) if out.held else b""

    def _keep(self, operation: Operation) -> None:
        self._kept[(operation.sandbox_id, operation.id)] = operation
        self._kept_bytes += _held(operation)
        while len(self._kept) > self._config.ended_kept or self._kept_bytes > self._config.ended_bytes:
            self._kept_bytes -= _held(self._kept.popitem(last=False)[1])

    def _from_log(self, sandbox_id: str, entry: Entry) -> Operation:
        operation = Operation(self, sandbox_id, entry.intent, b"", self._spool.of(sandbox_id))
        outcome = entry.outcome
        operation.started = True
        if outcome is None:
            # Known only from its intent, and not running: it was lost with its sandbox and never recorded.
            operation.state = "outcome_unknown"
            operation.error = OutcomeUnknown("the operation began and its end was not seen")
            return operation
        operation.state, operation.pid = outcome.state, outcome.pid
        if outcome.result:
            operation.result = RESULTS[entry.intent.kind].decode(outcome.result)
        if outcome.error:
            operation.error = from_code(outcome.error.code, outcome.error.message, **outcome.error.details)
        operation.stdout = self._logged(operation, ".1", outcome.stdout_spooled, outcome.stdout)
        operation.stderr = self._logged(operation, ".2", outcome.stderr_spooled, outcome.stderr)
        return operation

    def _logged(self, operation: Operation, suffix: str, spooled: int, rest: bytes) -> Output:
        out = Output(f"{self._spool.of(operation.sandbox_id)}/{operation.id}{suffix}", spooled)
        if rest:
            out.append(rest)
        out.eof = True
        return out

    def detached(self, sandbox: Sandbox, operation: Operation) -> None:
        """A stream has ended. What nobody reads any more and nobody can read again need not go on."""
        if operation.intent.streamed and operation.running:
            operation.abort(Cancelled("its reader went away"))
            if operation.stdout is not None and operation.connection is not None:
                operation.stdout.drop()
                operation.acknowledge(CONTENT, operation.stdout)
        elif operation.intent.terminal and operation.running and not operation.attached:
            operation.leave(self._config.hang_up_after_s)
        self._touched(sandbox)

    # --- what befalls a sandbox ---

    def disconnected(self, sandbox: Sandbox) -> None:
        for operation in sandbox.running.values():
            operation.lose()
        sandbox.lose_dials(Unavailable(f"the connection with {sandbox.id} was lost"))

    async def reconnected(self, sandbox: Sandbox, connection: AetherConnection) -> None:
        """On a new connection: attach what runs, and let aether forget what is recorded already."""
        if not sandbox.unmatched and not sandbox.operations_total and not sandbox.dials_total:
            return
        known = {k.op_id for k in await connection.list()}
        if sandbox.unmatched:
            self._restore(sandbox, known)
            sandbox.unmatched = False
        for operation in list(sandbox.running.values()):
            if operation.connection is connection:
                continue  # begun while the list was on its way
            if operation.started and operation.id not in known:
                operation.lost(OutcomeUnknown("the sandbox does not know the operation any more"))
            else:
                operation.resume(connection)
        for op_id in known.difference(sandbox.running):
            _Forgetter(op_id).begin(connection)

    def _restore(self, sandbox: Sandbox, known: set[str]) -> None:
        """What the edge before began and did not see the end of."""
        sandbox.operations_total = len(known)
        for intent in self._log.unfinished(sandbox.id):
            if intent.op_id not in known:
                self._log.withdraw(sandbox.id, intent.op_id)  # START never arrived
                continue
            operation = self._adopt(sandbox, intent)
            if intent.streamed:
                operation.lost(OutcomeUnknown("its stream was cut by a restart of the server"))
            else:
                sandbox.running[intent.op_id] = operation

    def _adopt(self, sandbox: Sandbox, intent: Intent) -> Operation:
        operation = Operation(self, sandbox.id, intent, b"", self._spool.of(sandbox.id))
        operation.started = True
        self._sandbox_of[operation] = sandbox
        if intent.kind in COMMANDS or intent.kind in UPLOADS:
            operation.input = Input(adopting=True)
        if intent.kind in COMMANDS or intent.kind in CONTENTS:
            operation.stdout = self._spooled_so_far(operation, ".1")
        if intent.kind in COMMANDS:
            operation.stderr = self._spooled_so_far(operation, ".2")
        return operation

    def _spooled_so_far(self, operation: Operation, suffix: str) -> Output | None:
        path = Path(self._spool.of(operation.sandbox_id), f"{operation.id}{suffix}")
        return Output(str(path), path.stat().st_size) if path.exists() else None

    def lose_all(self, sandbox: Sandbox, error: DSecError) -> None:
        """The sandbox is no more."""
        for operation in list(sandbox.running.values()):
            operation.lost(error)
        if sandbox.unmatched:
            sandbox.unmatched = False
            for intent in self._log.unfinished(sandbox.id):
                self._adopt(sandbox, intent).lost(error)

    def drop(self, sandbox_id: str) -> None:
        """All records and output of a sandbox."""
        self._log.drop(sandbox_id)
        self._spool.drop(sandbox_id)

    def spooled(self, sandbox_id: str) -> int:
        """Bytes of output on disk."""
        return self._spool.size(sandbox_id)

    # --- answers ---

    async def wait(self, operation: Operation, wait_s: float | None) -> None:
        """Until its end, or for so long."""
        if not operation.running or (wait_s is not None and wait_s <= 0):
            return
        future = operation.ended_future()
        if wait_s is None:
            await future
            return
        timer = asyncio.get_running_loop().call_later(wait_s, _give_up, future)
        try:
            await future
        finally:
            timer.cancel()

    def info(self, operation: Operation, stdout_from: int = 0, stderr_from: int = 0) -> OperationInfo:
        intent = operation.intent
        out, err = operation.stdout, operation.stderr
        limit = self._config.inline_limit
        stdout_from, stdout = _kept(operation, out, stdout_from, limit)
        stderr_from, stderr = _kept(operation, err, stderr_from, limit)
        return OperationInfo(
            op_id=intent.op_id,
            sandbox_id=operation.sandbox_id,
            kind=intent.kind,
            state=operation.state,
            session=intent.session,
            command=intent.command,
            started_at=intent.started_at,
            pid=operation.pid,
            result=operation.result,
            error=error_info(operation.error) if operation.error else None,
            stdout=stdout,
            stderr=stderr,
            stdout_from=stdout_from,
            stderr_from=stderr_from,
            stdout_size=out.received if out else 0,
            stderr_size=err.received if err else 0,
        )

    def close(self) -> None:
        for operation in self._sandbox_of:
            operation.joined()
            for out in (operation.stdout, operation.stderr):
                if out is not None:
                    out.close()
        self._log.close()


def _kept(operation: Operation, out: Output | None, offset: int, limit: int) -> tuple[int, bytes]:
    """What is kept from `offset` on, and where that begins: at the end, if it is not kept any more."""
    if offset < 0:
        raise InvalidArgument("an offset below zero")
    if out is None or offset >= out.received:
        return offset, b""
    if operation.intent.streamed:
        return out.received, b""
    try:
        return offset, out.read_all(offset, limit)
    except FileNotFoundError:
        return out.received, b""


def _held(operation: Operation) -> int:
    return sum(out.held for out in (operation.stdout, operation.stderr) if out is not None)


def _same(operation: Operation, digest: bytes) -> Operation:
    theirs = operation.intent.digest
    n = min(len(theirs), len(digest))  # one of them may not have known stdin
    if theirs[:n] != digest[:n]:
        raise OperationConflict(f"operation {operation.id} was begun with a different request")
    return operation


def _takes_input(request: w.AnyRequest) -> bool:
    return TAGS[type(request)] in UPLOADS or bool(getattr(request, "stdin", False))


def _head(request: w.AnyRequest) -> str:
    if isinstance(request, w.Shell):
        return request.command[:COMMAND_HEAD].decode(errors="replace")
    if isinstance(request, w.Exec):
        argv = [a if isinstance(a, str) else a.decode(errors="replace") for a in request.argv[:16]]
        return " ".join(argv)[:COMMAND_HEAD]
    path: bytes = getattr(request, "path", b"")
    return path[:COMMAND_HEAD].decode(errors="replace")


def _give_up(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Forgetter:
    """Lets aether forget an operation whose outcome is recorded, or whose content nobody reads any more.

    START with a known id attaches to it, whatever the request; this one would harm nothing, were it not
    known.
    """

    def __init__(self, op_id: str) -> None:
        self._op_id = op_id
        self._channel = 0
        self._answered = False

    def begin(self, connection: AetherConnection) -> None:
        self._connection = connection
        self._channel = connection.start(self, _encode(w.StatFile(self._op_id, b"/", "", True)))

    def frame(self, type: int, flags: int, payload: bytes) -> None:
        if not self._answered:
            self._answered = True
            self._connection.answered()
            self._connection.send(message(self._channel, w.Type.SIGNAL, w.Signal(9, True)))
        if type in (w.Type.RESULT, w.Type.ERROR):
            self._connection.forget(self._channel)
