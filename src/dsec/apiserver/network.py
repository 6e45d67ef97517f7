"""What a sandbox may reach, changed while it runs, and what was seen of it."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec.apiserver.access import Access
from dsec.apiserver.http import Request, answer
from dsec.apiserver.watchdog import WhileConnected
from dsec.wire import api
from dsec.wire import edge as m

MAX_WAIT_S: Final = 60.0
_rules: Final = msgspec.json.Decoder(api.NetworkRulesRequest)


class Network:
    def __init__(self, access: Access) -> None:
        self._access = access

    async def get(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        await answer(r, await self._access.ask(sandbox_id, "network", m.SandboxId(sandbox_id=sandbox_id)))

    async def set_rules(self, r: Request) -> None:
        """Answers when they are in force."""
        sandbox_id, body = await self._access.sandbox(r), await r.json(_rules)
        r.note(services=",".join(sorted(body.network_rules)))
        message = m.SetNetworkRules(sandbox_id=sandbox_id, rules=body.network_rules)
        await answer(r, await self._access.ask(sandbox_id, "set_network_rules", message))

    async def events(self, r: Request) -> None:
        sandbox_id = await self._access.sandbox(r)
        message = m.EventsQuery(
            sandbox_id=sandbox_id,
            after=r.number("after", 0, 0, 1 << 62),
            limit=r.number("limit", 100, 1, 1000),
            wait_s=r.seconds("wait", 0.0, MAX_WAIT_S) or 0.0,
        )
        async with WhileConnected(r):
            page = await self._access.ask(sandbox_id, "events", message)
        await answer(r, page)
