"""What a measure gives: one shape for all, fixed so that figures can be followed over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`ratios` compare with something measured in the same run; `figures` are this measure's own numbers."""

    measure: str
    value: float
    unit: str
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    samples: int
    host: dict[str, str | int | float] = {}
    absent: dict[str, str] = {}
    """What could not be compared with, and why."""

    def line(self) -> str:
        """One JSON object on one line."""
        return msgspec.json.encode(self).decode()


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    """Four significant digits: more would be noise. What could not be measured (NaN) is left out."""
    return {k: float(f"{v:.4g}") for k, v in numbers.items() if not math.isnan(v)}


def ratio(ours: float, theirs: float) -> float:
    """Ours over theirs; NaN where there is nothing to divide by."""
    return ours / theirs if theirs else math.nan
