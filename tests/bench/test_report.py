"""The shape of a result, and the page that is written from it."""

from __future__ import annotations

import json
import math

import pytest
from bench.measures import MODULES
from bench.report import AIMS, NO_NOTES, notes_of, number, page
from bench.result import Result, percentile, ratio, rounded

RESULT = Result(
    measure="create",
    value=321.0,
    unit="per second",
    ratios={"kernel_limit": 0.61, "docker": 40.2},
    figures={"p50_ms": 12.5, "p99_ms": 30.0, "failed": 0.0},
    samples=2000,
    host={"kernel": "6.18", "cores": 2},
    absent={"docker_api": "no socket"},
)


def test_line_is_one_json_object_with_the_fixed_keys():
    line = RESULT.line()
    assert "\n" not in line
    found = json.loads(line)
    assert {"measure", "value", "unit", "ratios", "figures", "samples", "host"} <= set(found)


def test_page_shows_what_was_measured_beside_what_was_wanted():
    text = page({"create": RESULT}, {"density": "no root"}, NO_NOTES)
    assert "| create | ... of the limit program's rate | 0.61 | at least 0.5 | yes |" in text
    assert "| create | ... times Docker's | 40.2 | at least 25 | yes |" in text
    assert "density could not be measured: no root" in text
    assert "docker_api is absent: no socket" in text
    assert "kernel 6.18" in text


def test_page_says_no_when_an_aim_is_missed_and_when_nothing_was_measured():
    slow = Result(measure="create", value=9, unit="per second", ratios={"kernel_limit": 0.1}, samples=1)
    text = page({"create": slow}, {}, NO_NOTES)
    assert "| 0.1 | at least 0.5 | **no** |" in text
    assert "| transfer | 1 GiB up, MB/s | - | at least 300 | not measured |" in text


def test_notes_written_by_hand_survive(tmp_path):
    path = tmp_path / "benchmarks.md"
    assert notes_of(path) == NO_NOTES
    notes = "<!-- notes -->\nCreation waits for RCU.\n<!-- /notes -->"
    path.write_text(page({"create": RESULT}, {}, notes))
    assert notes_of(path) == notes
    assert page({"create": RESULT}, {}, notes_of(path)) == path.read_text()


def test_every_aim_names_a_measure():
    assert {aim.measure for aim in AIMS} == set(MODULES)


def test_numbers():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(ratio(1.0, 0.0))
    assert rounded({"a": 1.23456, "b": math.nan}) == {"a": 1.235}


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (1234.5, "1,234"), (0.123456, "0.123"), (5.0, "5")])
def test_numbers_for_people(value, text):
    assert number(value) == text
