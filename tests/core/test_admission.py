from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.admission import NodeLimits, Share, admit
from dsec.core.errors import AdmissionRefused

LIMITS = NodeLimits(
    max_sandboxes=3,
    memory_total_mb=1000,
    memory_overcommit=2.0,
    memory_reserve_mb=100,
    pids_total=1000,
    pids_overcommit=2.0,
)


@pytest.mark.parametrize(
    ("used", "asked", "free", "limit"),
    [
        (Share(3, 0, 0), Share(1, 1, 1), 1000, "3 sandboxes"),
        (Share(1, 1999, 0), Share(1, 2, 1), 1000, "2000 MiB"),
        (Share(1, 0, 1990), Share(1, 1, 11), 1000, "process limits"),
        (Share(), Share(1, 1, 1), 99, "99 MiB"),
    ],
)
def test_refusals_name_the_limit(used: Share, asked: Share, free: int, limit: str) -> None:
    with pytest.raises(AdmissionRefused, match=limit):
        admit(LIMITS, used, asked, memory_available_mb=free)


@given(st.lists(st.builds(Share, st.just(1), st.integers(8, 1500), st.integers(4, 1500)), max_size=20))
def test_never_more_than_the_limits(asked: list[Share]) -> None:
    used = Share()
    for share in asked:
        try:
            used = admit(LIMITS, used, share, memory_available_mb=1000)
        except AdmissionRefused:
            continue
        assert used.sandboxes <= 3 and used.memory_mb <= 2000 and used.pids <= 2000
    assert used.minus(used) == Share()
