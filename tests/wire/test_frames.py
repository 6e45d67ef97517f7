from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import ProtocolError
from dsec.wire import aether as w
from dsec.wire.frames import FrameReader, frame, message

FRAMES = st.lists(
    st.tuples(st.integers(0, 0xFFFFFFFF), st.integers(0, 255), st.integers(0, 255), st.binary(max_size=300)),
    max_size=12,
)


@given(FRAMES, st.lists(st.integers(1, 60), min_size=1))
def test_frames_survive_any_cuts(frames: list[tuple[int, int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frame(c, t, p, f) for c, t, f, p in frames)
    reader, got, at, i = FrameReader(), [], 0, 0
    while at < len(stream):
        n = cuts[i % len(cuts)]
        got += reader.feed(stream[at : at + n])
        at, i = at + n, i + 1
    assert got == frames
    assert reader._part is None, "something is held while idle"


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_a_protocol_error(data: bytes) -> None:
    try:
        for _, _, _, payload in FrameReader().feed(data):
            assert len(payload) <= w.MAX_PAYLOAD
    except ProtocolError:
        pass


def test_too_large() -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed(w.HEADER.pack(w.MAX_PAYLOAD + 1, 0, 1, 0, 0))
    with pytest.raises(ValueError, match="at most"):
        message(0, w.Type.START, b"x" * (w.MAX_PAYLOAD + 1))


def test_reserved_bits() -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed(w.HEADER.pack(0, 0, 1, 0, 1))
