"""Commands: start or join, wait, look, signal, feed, resize."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dsec.apiserver.access import Access
from dsec.apiserver.convert import command_head, command_request, operation, raise_failed
from dsec.apiserver.http import Request, answer
from dsec.apiserver.watchdog import WhileConnected
from dsec.core.ids import check_operation_id, check_session_name, new_operation_id
from dsec.wire import aether as w
from dsec.wire import api
from dsec.wire import edge as m

MAX_OFFSET: Final = 1 << 62
INPUT_LIMIT: Final = 8 << 20
_exec: msgspec.json.Decoder[api.ExecRequest | api.ShellRequest] = msgspec.json.Decoder(api.ExecRequest)
_shell: msgspec.json.Decoder[api.ExecRequest | api.ShellRequest] = msgspec.json.Decoder(api.ShellRequest)
_signal = msgspec.json.Decoder(api.SignalRequest)
_resize = msgspec.json.Decoder(api.ResizeRequest)


class Operations:
    def __init__(self, access: Access) -> None:
        self._access = access

    async def exec(self, r: Request) -> None:
        await self._start(r, await r.json(_exec))

    async def shell(self, r: Request) -> None:
        await self._start(r, await r.json(_shell))

    async def _start(self, r: Request, body: api.ExecRequest | api.ShellRequest) -> None:
        sandbox_id = await self._access.sandbox(r)
        message = m.Operate(
            sandbox_id=sandbox_id,
            request=command_request(body),
            stdin=api.of_blob(body.stdin) if body.stdin is not None else b"",
            open_input=body.open_input,
            wait_s=body.wait_s,
        )
        r.note(operation=message.request.op_id, command=command_head(body))
        async with WhileConnected(r):  # the command goes on; only the wait for it ends
            info = await self._access.ask(sandbox_id, "operate", message)
        await _answer(r, info)

    async def close_session(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        request = w.CloseSession(op_id=_op_id(r), session=check_session_name(r.params[1]))
        await self.run(r, sandbox_id, request)
        await answer(r, api.Done())

    async def run(self, r: Request, sandbox_id: str, request: Any) -> m.OperationInfo:
        """To its end. Raises OperationFailed with its error."""
        async with WhileConnected(r):
            info: m.OperationInfo = await self._access.ask(
                sandbox_id, "operate", m.Operate(sandbox_id=sandbox_id, request=request)
            )
        raise_failed(info)
        return info

    async def get(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        message = m.GetOperation(
            sandbox_id=sandbox_id,
            op_id=check_operation_id(r.params[1]),
            wait_s=r.seconds("wait", 0.0, api.MAX_WAIT_S),
            stdout_from=r.number("stdout_from", 0, 0, MAX_OFFSET),
            stderr_from=r.number("stderr_from", 0, 0, MAX_OFFSET),
        )
        async with WhileConnected(r):
            info = await self._access.ask(sandbox_id, "operation", message)
        await _answer(r, info)

    async def list(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        page: m.OperationPage = await self._access.ask(
            sandbox_id, "operations", m.SandboxId(sandbox_id=sandbox_id)
        )
        await answer(r, api.OperationList(operations=[operation(o) for o in page.operations]))

    async def signal(self, r: Request) -> None:
        sandbox_id, body = await self._access.sandbox(r), await r.json(_signal)
        r.note(operation=r.params[1], signal=body.signal)
        message = m.SignalOperation(
            sandbox_id=sandbox_id,
            op_id=check_operation_id(r.params[1]),
            signal=body.signal,
            tree=body.tree,
        )
        await answer(r, operation(await self._access.ask(sandbox_id, "signal", message)))

    async def input(self, r: Request) -> None:
        """The body is the bytes."""
        sandbox_id = await self._access.sandbox(r)
        message = m.InputOperation(
            sandbox_id=sandbox_id,
            op_id=check_operation_id(r.params[1]),
            data=await r.body(INPUT_LIMIT),
            eof=r.flag("eof"),
            offset=r.number("offset", 0, 0, MAX_OFFSET) if "offset" in r.query else None,
        )
        async with WhileConnected(r):
            info = await self._access.ask(sandbox_id, "input", message)
        await answer(r, operation(info))

    async def resize(self, r: Request) -> None:
        sandbox_id, body = await self._access.sandbox(r), await r.json(_resize)
        message = m.ResizeOperation(
            sandbox_id=sandbox_id,
            op_id=check_operation_id(r.params[1]),
            rows=body.rows,
            columns=body.columns,
        )
        await answer(r, operation(await self._access.ask(sandbox_id, "resize", message)))


def _op_id(r: Request) -> str:
    return check_operation_id(r.text("op_id") or new_operation_id())


async def _answer(r: Request, info: m.OperationInfo) -> None:
    """200 when it has ended, 202 while it runs, its error's status when it failed."""
    raise_failed(info)
    await answer(r, operation(info), 202 if info.state == "running" else 200)
