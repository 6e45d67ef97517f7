"""The record on disk: positions, chain, torn ends, full disks, segments, questions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.audit.log import AuditLog, entries, verify
from dsec.core.errors import AuditDamaged, InvalidArgument
from dsec.wire.audit import AuditEntry, AuditQuery, short


def entry(what: str = "operations.exec", **fields: object) -> AuditEntry:
    return msgspec.convert({"kind": "action", "what": what, **fields}, AuditEntry)


def filled(directory: Path, count: int, **options: int) -> AuditLog:
    log = AuditLog(directory, **options)
    for i in range(count):
        log.record(entry(sandbox=f"e-{i % 3}", who="tok-1", project="p" if i % 2 else "q"))
    return log


def test_positions_have_no_gap_and_go_on_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path, 5).close()
    filled(tmp_path, 5).close()
    assert [e.position for e in entries(tmp_path)] == list(range(1, 11))
    assert verify(tmp_path)[0] == 10


def test_verify_names_what_was_changed(tmp_path: Path) -> None:
    filled(tmp_path, 6).close()
    (path,) = tmp_path.glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"sandbox":"e-1"', b'"sandbox":"e-2"', 1))
    with pytest.raises(AuditDamaged, match="entry 2 was changed"):
        verify(tmp_path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(AuditDamaged, match="entry 3 is missing"):
        verify(tmp_path)
    path.write_bytes(whole.replace(b"tok-1", b"tok-2", 1))
    with pytest.raises(AuditDamaged, match="entry 1 was changed"):
        verify(tmp_path)


def test_a_torn_end_is_cut_off_and_told(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    log = filled(tmp_path, 1)
    log.close()
    found = list(entries(tmp_path))
    assert [e.position for e in found] == [1, 2, 3, 4]
    assert found[2].what == "recovered" and int(found[2].detail["bytes_cut_off"] or 0) > 0
    assert verify(tmp_path)[0] == 4


@given(cut=st.integers(0, 2000))
def test_wherever_it_was_cut_the_rest_is_whole(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    directory = tmp_path_factory.mktemp("audit")
    filled(directory, 4).close()
    (path,) = directory.glob("*.jsonl")
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data))])
    filled(directory, 2).close()
    count, _ = verify(directory)
    assert count >= 2
    assert [e.position for e in entries(directory)] == list(range(1, count + 1))


def test_old_segments_go_and_the_chain_still_holds(tmp_path: Path) -> None:
    log = filled(tmp_path, 200, segment_bytes=2000, segments=3)
    log.close()
    assert 3 <= len(list(tmp_path.glob("*.jsonl"))) <= 4
    found = [e.position for e in entries(tmp_path)]
    assert found == list(range(found[0], 201)) and found[0] > 1
    verify(tmp_path)


def test_questions(tmp_path: Path) -> None:
    log = filled(tmp_path, 30, segment_bytes=3000)
    page = log.query(AuditQuery(sandbox="e-1", limit=4))
    assert [e.position for e in page.entries] == [2, 5, 8, 11]
    rest = log.query(AuditQuery(sandbox="e-1", after=page.next))
    assert [e.position for e in rest.entries] == [14, 17, 20, 23, 26, 29] and rest.next == 30
    assert not log.query(AuditQuery(sandbox="e-1", after=rest.next)).entries
    assert len(log.query(AuditQuery(project="p")).entries) == 15
    assert len(log.query(AuditQuery(what="operations.")).entries) == 30
    assert not log.query(AuditQuery(what="operations")).entries
    assert not log.query(AuditQuery(since=4e9)).entries
    with pytest.raises(InvalidArgument):
        log.query(AuditQuery(limit=0))
    log.close()


def test_a_full_disk_leaves_no_half_line_and_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 2)
    write, full = os.write, [True]
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10] if full[0] else data))
    log.record(entry())
    log.record(entry())
    full[0] = False
    log.record(entry("after"))
    log.close()
    found = list(entries(tmp_path))
    assert [(e.what, e.detail) for e in found[2:]] == [("lost", {"entries": 2}), ("after", {})]
    verify(tmp_path)


def test_a_killed_writer_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    """It says each position once `record` has returned."""
    program = (
        "import sys; from pathlib import Path; from dsec.audit.log import AuditLog;"
        "from dsec.wire.audit import AuditEntry; log = AuditLog(Path(sys.argv[1]))\n"
        "while True: log.record(AuditEntry(kind='action', what='x')); print(log.position, flush=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = [int(child.stdout.readline()) for _ in range(200)]
    child.send_signal(signal.SIGKILL)
    said += [int(line) for line in child.stdout.read().splitlines() if line.strip()]
    child.wait()
    child.stdout.close()
    AuditLog(tmp_path).close()
    assert {e.position for e in entries(tmp_path)} >= set(said)
    verify(tmp_path)


def test_texts_from_inside_are_short_and_printable() -> None:
    assert short("a\x1b[31m\n" + "b" * 10_000).startswith("a\ufffd[31m\ufffdbbb")
    assert len(short("x" * 10_000)) == 512
