"""A sandbox, as its owner sees it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from dsec.client._command import POLL_S, Command, OnOutput, Terminal
from dsec.client._files import Files
from dsec.client._http import Connection, query
from dsec.client._result import CommandResult
from dsec.core.errors import DSecError, InvalidArgument
from dsec.core.ids import new_operation_id
from dsec.core.network import NetworkRules, rules_from
from dsec.wire import api
from dsec.wire.edge import DEFAULT_OUTPUT_LIMIT, EventPage, NetworkInfo, SandboxInfo, SandboxStats
from dsec.wire.layers import Packed

INLINE_STDIN = 1 << 20
"""More input than this is sent after the request, in parts."""


class Session:
    """A shell session: its directory and exported variables stay from one command to the next."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self._sandbox = sandbox
        self.name = name

    async def run(self, command: str | bytes, **options: Any) -> Any:
        """As `Sandbox.run_shell`, in this session."""
        return await self._sandbox.run_shell(command, session=self.name, **options)

    async def close(self) -> None:
        """End its shell and all that runs in it."""
        await self._sandbox.close_session(self.name)


class Sandbox:
    """Holds no connection: any client can have it by its id. `async with` stops it at the end."""

    def __init__(self, connection: Connection, info: SandboxInfo) -> None:
        self._connection = connection
        self._target = f"/v1/sandboxes/{info.id}"
        self.info = info
        """As it was when last asked for."""
        self.files = Files(connection, info.id)

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"Sandbox({self.id!r})"

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # --- commands ---

    @overload
    async def run_shell(
        self,
        command: str | bytes,
        *,
        session: str = ...,
        cwd: str = ...,
        env: dict[str, str] | None = ...,
        user: str = ...,
        stdin: bytes | str | Literal[True] | None = ...,
        timeout: float | None = ...,
        on_stdout: OnOutput | None = ...,
        on_stderr: OnOutput | None = ...,
        background: Literal[False] = ...,
        output_limit: int = ...,
        kill_at_limit: bool = ...,
        op_id: str | None = ...,
    ) -> CommandResult: ...

    @overload
    async def run_shell(
        self,
        command: str | bytes,
        *,
        session: str = ...,
        cwd: str = ...,
        env: dict[str, str] | None = ...,
        user: str = ...,
        stdin: bytes | str | Literal[True] | None = ...,
        timeout: float | None = ...,
        background: Literal[True],
        output_limit: int = ...,
        kill_at_limit: bool = ...,
        op_id: str | None = ...,
    ) -> Command: ...

    async def run_shell(
        self,
        command: str | bytes,
        *,
        session: str = "default",
        cwd: str = "",
        env: dict[str, str] | None = None,
        user: str = "",
        stdin: bytes | str | Literal[True] | None = None,
        timeout: float | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        background: bool = False,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        kill_at_limit: bool = False,
        op_id: str | None = None,
    ) -> CommandResult | Command:
        """Run a command in a shell session, which is begun if there is none of this name.

        `timeout` (seconds) ends the command and what it began; the result's reason is then `timed_out`.
        `stdin`: bytes or text given whole; True (with `background`): sent later through the handle; None: no
        input. `background`: returns a handle at once; the command runs in a shell of its own, which begins
        with the session's directory and environment. `output_limit`: bytes kept per stream; what is beyond
        is counted. Repeating an `op_id` joins the first, and runs nothing twice. What runs inside could
        forge the status that a session's shell reports; `exec` is for verdicts. Raises DSecError.
        """
        first, rest = _stdin(stdin)
        request = api.ShellRequest(
            op_id=op_id or new_operation_id(),
            command=api.to_blob(command) if isinstance(command, bytes) else command,
            session=session,
            background=background,
            cwd=cwd,
            env=env or {},
            user=user,
            stdin=first,
            open_input=rest is not None,
            timeout_s=_seconds(timeout),
            output_limit=output_limit,
            kill_at_limit=kill_at_limit,
            wait_s=0.0 if background or on_stdout or on_stderr or rest is not None else POLL_S,
        )
        return await self._run("/shell", request, rest, background, on_stdout, on_stderr)

    @overload
    async def exec(
        self,
        argv: list[str | bytes] | list[str],
        *,
        cwd: str = ...,
        env: dict[str, str] | None = ...,
        user: str = ...,
        stdin: bytes | str | Literal[True] | None = ...,
        timeout: float | None = ...,
        on_stdout: OnOutput | None = ...,
        on_stderr: OnOutput | None = ...,
        background: Literal[False] = ...,
        output_limit: int = ...,
        kill_at_limit: bool = ...,
        op_id: str | None = ...,
    ) -> CommandResult: ...

    @overload
    async def exec(
        self,
        argv: list[str | bytes] | list[str],
        *,
        cwd: str = ...,
        env: dict[str, str] | None = ...,
        user: str = ...,
        stdin: bytes | str | Literal[True] | None = ...,
        timeout: float | None = ...,
        background: Literal[True],
        output_limit: int = ...,
        kill_at_limit: bool = ...,
        op_id: str | None = ...,
    ) -> Command: ...

    async def exec(
        self,
        argv: list[str | bytes] | list[str],
        *,
        cwd: str = "",
        env: dict[str, str] | None = None,
        user: str = "",
        stdin: bytes | str | Literal[True] | None = None,
        timeout: float | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        background: bool = False,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        kill_at_limit: bool = False,
        op_id: str | None = None,
    ) -> CommandResult | Command:
        """Run one program, with no shell. Its status comes from waitpid and cannot be forged.

        Arguments as for `run_shell`. Raises ProgramNotFound, UserNotFound and other DSecErrors.
        """
        first, rest = _stdin(stdin)
        request = api.ExecRequest(
            op_id=op_id or new_operation_id(),
            argv=[api.to_blob(a) if isinstance(a, bytes) else a for a in argv],
            cwd=cwd,
            env=env or {},
            user=user,
            stdin=first,
            open_input=rest is not None,
            timeout_s=_seconds(timeout),
            output_limit=output_limit,
            kill_at_limit=kill_at_limit,
            wait_s=0.0 if background or on_stdout or on_stderr or rest is not None else POLL_S,
        )
        return await self._run("/exec", request, rest, background, on_stdout, on_stderr)

    async def _run(
        self,
        verb: str,
        request: api.ExecRequest | api.ShellRequest,
        rest: bytes | None,
        background: bool,
        on_stdout: OnOutput | None,
        on_stderr: OnOutput | None,
    ) -> CommandResult | Command:
        command = Command(self._connection, self.id, request.op_id, fresh=True)
        known: api.Operation | None = None
        feeding: asyncio.Task[None] | None = None
        try:
            known = await self._start(verb, request)
            if rest:
                feeding = asyncio.create_task(command._feed(rest))
            if background:
                return await _fed(command, feeding)
            if on_stdout or on_stderr:
                return await command.follow(on_stdout, on_stderr)
            return await command._finish(known, bytearray(), bytearray())
        except DSecError:
            raise
        except BaseException:  # cancelled, or a callback failed
            self._abandon(command)
            raise
        finally:
            if feeding is not None and not background:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    async def _start(self, verb: str, request: api.ExecRequest | api.ShellRequest) -> api.Operation:
        return await self._connection.call(
            api.Operation,
            "POST",
            self._target + verb,
            request,
            outcome=f"operation {request.op_id} in {self.id}",
        )

    def _abandon(self, command: Command) -> None:
        """Whoever gives up on a command does not want it to go on."""
        self._connection.later(command.kill())

    def session(self, name: str) -> Session:
        return Session(self, name)

    async def close_session(self, name: str) -> None:
        """End a session's shell and all that runs in it. Raises SessionNotFound."""
        target = f"{self._target}/sessions/{name}{query(op_id=new_operation_id())}"
        await self._connection.call(api.Done, "DELETE", target)

    async def operation(self, op_id: str) -> Command:
        """The handle of an operation that this or another client began. Raises OperationNotFound."""
        command = Command(self._connection, self.id, op_id)
        await command.status()
        return command

    async def operations(self) -> list[api.Operation]:
        """The newest 1000, oldest first, without their output."""
        found = await self._connection.call(api.OperationList, "GET", self._target + "/operations")
        return found.operations

    async def pty(
        self,
        argv: list[str] | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str = "",
        env: dict[str, str] | None = None,
        user: str = "",
        timeout: float | None = None,
        op_id: str | None = None,
    ) -> Terminal:
        """A program (a shell, when none is named) on a terminal of its own. It gets SIGHUP when its stream
        was open and has been gone for a minute."""
        request = api.ExecRequest(
            op_id=op_id or new_operation_id(),
            argv=list(argv or api.PTY_DEFAULT),
            tty=True,
            rows=rows,
            columns=columns,
            cwd=cwd,
            env=env or {},
            user=user,
            open_input=True,
            timeout_s=_seconds(timeout),
            wait_s=0.0,
        )
        await self._start("/exec", request)
        return Terminal(self._connection, self.id, request.op_id)

    # --- the sandbox itself ---

    async def refresh(self) -> SandboxInfo:
        """Its state now."""
        self.info = await self._connection.call(SandboxInfo, "GET", self._target)
        return self.info

    async def network_rules(self) -> NetworkRules | None:
        """What it may reach; None: loopback alone."""
        path = f"/v1/sandboxes/{self.id}/network_rules"
        return (await self._connection.call(NetworkInfo, "GET", path)).rules

    async def set_network_rules(self, rules: NetworkRules | Mapping[str, Any]) -> None:
        """Replace what it may reach, `{"pypi": True, "allow": [{"domain": "*.example.org"}]}` for instance.

        In force when this returns, for connections that are open as well. Raises InvalidArgument that names
        the rule, WrongState for a sandbox that was created with network_rules=None.
        """
        body = api.NetworkRulesRequest(network_rules=rules_from(rules))
        path = f"/v1/sandboxes/{self.id}/network_rules"
        await self._connection.call(NetworkInfo, "PUT", path, body)

    async def events(self, *, after: int = 0, wait: float = 0.0) -> EventPage:
        """What was seen of it from outside since a position, such as flows that its rules refused.

        wait: seconds to wait for the first one. The page's `next` is the position for the next call; a new
        life of the server begins anew at 1.
        """
        path = f"/v1/sandboxes/{self.id}/events{query(after=after, wait=wait, limit=1000)}"
        return await self._connection.call(EventPage, "GET", path)

    async def stats(self) -> SandboxStats:
        """What it uses. Raises WrongState when it does not run."""
        return await self._connection.call(SandboxStats, "GET", self._target + "/stats")

    async def pack_diff(
        self,
        name: str = "",
        *,
        labels: Mapping[str, str] | None = None,
        scrub: bool = True,
        remove: Sequence[str] = (),
        keep: Sequence[str] = (),
        refuse: bool = True,
        smoke: str = "",
        smoke_timeout: float = 60.0,
    ) -> Packed:
        """Take what it has changed as a layer on those that it stands on; the sandbox goes on.

        Start others from it by `container_image=name`, or by the layer's digest. `scrub`: leave out caches,
        histories, logs and temporary files; `remove`: globs of what to leave out besides, `keep` of what
        stays. `refuse`: a finding such as a key in a file is an error. `smoke`: a shell command that must end
        with 0 in a fresh sandbox of the layer, within `smoke_timeout` seconds, before the layer is named.

        Raises WrongState, InvalidArgument (a finding, a bad glob), Conflict (the smoke command failed),
        DiskFull, Unsupported (a backend without it).
        """
        body = api.PackRequest(
            name=name,
            labels=dict(labels or {}),
            defaults=scrub,
            remove=list(remove),
            keep=list(keep),
            refuse=refuse,
            smoke=smoke,
            smoke_timeout_s=smoke_timeout,
        )
        return await self._connection.call(Packed, "POST", self._target + "/pack_diff", body)

    async def stop(self) -> SandboxInfo:
        """End it; returns when nothing of it is left. A repeat is no error."""
        self.info = await self._connection.call(SandboxInfo, "DELETE", self._target)
        return self.info


async def _fed(command: Command, feeding: asyncio.Task[None] | None) -> Command:
    """A handle in the background has its input at once, or the caller gets the error."""
    if feeding is not None:
        await feeding
    return command


def _seconds(timeout: float | None) -> float | None:
    """JSON has no NaN and no infinity: as null they would mean none."""
    if timeout is not None and not math.isfinite(timeout):
        raise InvalidArgument(f"timeout: {timeout} is no number of seconds")
    return timeout


def _stdin(stdin: bytes | str | Literal[True] | None) -> tuple[api.Blob | None, bytes | None]:
    """What goes with the request, and what is sent afterwards (empty: the caller sends it)."""
    if stdin is None:
        return None, None
    if stdin is True:
        return None, b""
    if len(stdin) > INLINE_STDIN:
        return None, stdin.encode() if isinstance(stdin, str) else stdin
    return (stdin if isinstance(stdin, str) else api.to_blob(stdin)), None
