from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.core.errors import AdmissionRefused
from dsec.core.sandbox_state import Failure, State
from dsec.core.specs import SandboxSpec
from dsec.edge.oplog import OPEN_FILES, FileOperationLog, Intent, Outcome
from dsec.edge.records import Record, RecordStore, Slots


def intent(op_id: str) -> Intent:
    return Intent(op_id, "shell", b"d" * 16, "default", "true", 1.0, 100, False)


def outcome(op_id: str, stdout: bytes = b"") -> Outcome:
    return Outcome(op_id, "ended", 1, b"", None, stdout, b"", 0, 0, 2.0)


def test_find_and_unfinished(tmp_path: Path) -> None:
    log = FileOperationLog(tmp_path)
    for op_id in "abc":
        log.intent("s", intent(op_id))
    log.outcome("s", outcome("b", b"out"))
    log.withdraw("s", "c")
    for again in (log, FileOperationLog(tmp_path)):
        found = again.find("s", "b")
        assert found is not None and found.outcome == outcome("b", b"out")
        assert again.find("s", "c") is None and again.find("s", "nothing") is None
        assert [i.op_id for i in again.unfinished("s")] == ["a"]
        assert [e.intent.op_id for e in again.entries("s")] == ["a", "b"]
    assert log.entries("other") == [] and log.find("other", "a") is None
    log.drop("s")
    assert log.find("s", "b") is None


@given(cut=st.integers(0, 400), flip=st.integers(0, 400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
def test_torn_tail_is_ignored_and_written_over(tmp_path: Path, cut: int, flip: int) -> None:
    log = FileOperationLog(tmp_path)
    log.drop("s")
    ends = []
    for i in range(4):
        log.intent("s", intent(f"op{i}"))
        ends.append((tmp_path / "s.log").stat().st_size)
    log.close()
    path = tmp_path / "s.log"
    data = bytearray(path.read_bytes())
    damage = min(cut, len(data))
    if flip < damage:
        data[flip] ^= 0xFF
        damage = flip
    path.write_bytes(data[: max(cut, damage)])
    again = FileOperationLog(tmp_path)
    whole = sum(end <= damage for end in ends)
    assert [e.intent.op_id for e in again.entries("s")] == [f"op{i}" for i in range(whole)]
    again.intent("s", intent("new"))
    again.close()
    names = [e.intent.op_id for e in FileOperationLog(tmp_path).entries("s")]
    assert names == [*(f"op{i}" for i in range(whole)), "new"]


def test_few_files_are_held_open(tmp_path: Path) -> None:
    log = FileOperationLog(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(OPEN_FILES + 50):
        log.intent(f"s{i}", intent("a"))
    assert len(os.listdir("/proc/self/fd")) - before <= OPEN_FILES
    assert log.find("s0", "a") is not None
    log.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_index_of_many(tmp_path: Path) -> None:
    log = FileOperationLog(tmp_path)
    for i in range(2000):
        log.intent("s", intent(f"op{i}"))
        log.outcome("s", outcome(f"op{i}", str(i).encode()))
    for i in range(0, 2000, 97):
        found = log.find("s", f"op{i}")
        assert found is not None and found.outcome is not None and found.outcome.stdout == str(i).encode()


def test_records_survive(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.db")
    record = Record(
        id="s",
        slot=3,
        spec=SandboxSpec(image="base", labels={"a": "b"}),
        digest=b"d",
        state=State.FAILED,
        failure=Failure("launch_failed", "no"),
    )
    store.save(record)
    store.save(Record(id="t", slot=4, spec=SandboxSpec(image="base"), digest=b""))
    store.drop("t")
    again = RecordStore(tmp_path / "r.db")  # the first was never closed
    assert list(again.load()) == [record]
    store.close()
    again.close()


def test_slots() -> None:
    slots = Slots(100)
    slots.restore({0, 2})
    taken = [slots.take() for _ in range(98)]
    assert len({*taken, 0, 2}) == 100
    with pytest.raises(AdmissionRefused):
        slots.take()
    slots.release(2)
    assert slots.take() == 2
    with pytest.raises(KeyError):
        slots.release(101)
