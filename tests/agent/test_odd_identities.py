"""What an image says of users is hostile: names of any length, and shells that are not there."""

from __future__ import annotations

import msgspec
import pytest
from tests.agent.wire import Refused, Wire
from tests.backends.conftest import Rig

from dsec.backends.base import ImageConfig
from dsec.backends.container import policy
from dsec.wire import aether as w

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("length", [127, 128, 4096, 100_000])
async def test_an_image_user_of_any_length_is_refused_and_harms_nothing(rig: Rig, length: int) -> None:
    spec = msgspec.structs.replace(rig.spec(), image=ImageConfig(user="u" * length))
    _, sock = await rig.launch(spec)
    async with Wire(sock) as wire:
        for call in (wire.exec("/bin/true"), wire.shell("true")):
            with pytest.raises(Refused, match="user_not_found"):
                await call.end()
            call.forget()
        ended, out, _ = await wire.run("/bin/echo", "alive", user="0")
        assert (ended.exit_code, out) == (0, b"alive\n")


async def test_sessions_without_a_shell_leave_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "SHELLS", ["/no/shell"])
    _, sock = await rig.launch()
    async with Wire(sock) as wire:
        for i in range(20):
            call = wire.shell("true", session=f"s{i}")
            with pytest.raises(Refused, match="no_shell"):
                await call.end()
            call.forget()
            call = wire.call()
            with pytest.raises(Refused, match="session_not_found"):
                await wire.start(w.CloseSession(op_id=call.op_id, session=f"s{i}")).result()
