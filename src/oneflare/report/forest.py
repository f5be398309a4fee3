"""Draws the tests of a claim on one line: mean, interval, threshold, and the side that the claim is on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oneflare.report.story import Test

WIDE = 100.0
"""length of the line; the page stretches it"""
FLAT = 3.0
"""times as wide as the narrowest: from there on claims have scales of their own"""


@dataclass(frozen=True)
class Mark:
    """Positions from 0 to WIDE; None where there is nothing to draw."""

    mean: float | None
    low: float | None
    high: float | None
    seeds: list[float]
    """single seeds, drawn where there is no interval"""
    threshold: float
    start: float
    end: float
    """where the claim says that the value lies"""


def forest(claims: Sequence[Sequence[Test]]) -> list[list[Mark]]:
    """Per claim, per test. What has one unit shares a scale, so that bars can be compared: over all claims, unless
    the widest would press the others flat."""
    return [[_mark(test, *_range(_peers(test, tests, claims))) for test in tests] for tests in claims]


def _peers(test: Test, tests: Sequence[Test], claims: Sequence[Sequence[Test]]) -> list[Test]:
    own = [other for other in tests if other.unit == test.unit]
    groups = [found for claim in claims if (found := [other for other in claim if other.unit == test.unit])]
    widths = [high - low for low, high in map(_range, groups)]
    return own if max(widths) > FLAT * min(widths) else [other for group in groups for other in group]


def _range(tests: Sequence[Test]) -> tuple[float, float]:
    values = [value for test in tests for value in (*_spread(test), test.threshold)]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 1.0
    return low - margin, high + margin


def _spread(test: Test) -> list[float]:
    inside = [] if test.mean is None else [test.mean]
    return inside + (test.values if test.low is None or test.high is None else [test.low, test.high])


def _mark(test: Test, low: float, high: float) -> Mark:
    def at(value: float) -> float:
        return round(WIDE * (value - low) / (high - low), 2)

    threshold = at(test.threshold)
    return Mark(
        None if test.mean is None else at(test.mean),
        None if test.low is None else at(test.low),
        None if test.high is None else at(test.high),
        [at(value) for value in test.values] if test.low is None else [],
        threshold,
        *((threshold, WIDE) if test.side == "above" else (0.0, threshold)),
    )
