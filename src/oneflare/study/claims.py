"""Tests the claims of a study: figures by seed, an interval and a verdict for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from oneflare.study.cells import Place
from oneflare.study.declare import Claim, Statement
from oneflare.study.findings import Findings, Finished, Trace, rounded
from oneflare.study.inference import Difference, difference, joint, judge, judge_every
from oneflare.study.records import ClaimResult, StatementResult

Side = Literal["above", "below"]


def end_over_peak(trace: Trace) -> float:
    return trace[-1]["lambda_raw"] / max(row["lambda_raw_max"] for row in trace)


def largest_raw(trace: Trace) -> float:
    return max(row["lambda_raw_max"] for row in trace)


def last_raw(trace: Trace) -> float:
    return trace[-1]["lambda_raw"]


def rise(trace: Trace) -> float:
    """Raw lambda at the end over the middle of training."""
    return trace[-1]["lambda_raw"] / trace[len(trace) // 2]["lambda_raw"]


OF_TRACES: dict[str, Callable[[Trace], float]] = {
    "end_over_peak": end_over_peak,
    "largest_raw": largest_raw,
    "last_raw": last_raw,
    "rise": rise,
}
WORDS = {
    "end_over_peak": "last raw lambda over its peak",
    "largest_raw": "largest raw lambda",
    "last_raw": "last raw lambda",
    "rise": "raw lambda at the end over the middle",
    "accuracy_lost": "peak over checkpoints minus final accuracy",
}


def judge_claims(findings: Findings) -> tuple[ClaimResult, ...]:
    """Every claim of the study, tested on the runs that are there."""
    return tuple(_claim(findings, claim) for claim in findings.plan.declaration.claims)


def _claim(findings: Findings, claim: Claim) -> ClaimResult:
    tests = tuple(row for test in claim.tests for row in _test(findings, test))
    return ClaimResult(claim.id, claim.text, claim.log, joint(row.verdict for row in tests), tests)


def _test(findings: Findings, test: Statement) -> Iterator[StatementResult]:
    """One row per place where the test applies."""
    side: Side = "above" if test.above is not None else "below"
    threshold = test.above if test.above is not None else test.below
    assert threshold is not None
    places = [place for place in findings.plan.places if _applies(test, place)]
    if test.kind == "trend":
        for low, high in _ends(places):
            yield _judged(test, f"{low.id} against {high.id}", _trend(findings, test, low, high), side, threshold)
        return
    for place in places:
        if test.kind == "every":
            yield _every(findings, test, place, side, threshold)
        else:
            yield _judged(test, place.id, _difference(findings, test, place), side, threshold)


def _applies(test: Statement, place: Place) -> bool:
    return test.data in (None, place.data) and test.alpha in (None, place.alpha)


def _ends(places: list[Place]) -> Iterator[tuple[Place, Place]]:
    """Smallest and largest alpha of the same data and number of clients."""
    groups: dict[tuple[str, int], list[Place]] = {}
    for place in places:
        groups.setdefault((place.data, place.clients), []).append(place)
    for group in groups.values():
        ordered = sorted(group, key=lambda place: place.alpha)
        if len(ordered) > 1:
            yield ordered[0], ordered[-1]


def _difference(findings: Findings, test: Statement, place: Place) -> Difference | None:
    """Accuracy in points; other measures in per cent of the other arm's."""
    assert test.than is not None
    if test.measure == "accuracy":
        found = findings.difference(place, test.arm, test.than)
        return None if found is None else _in_points(found)
    gaps = []
    for one, other in findings.paired(place, test.arm, test.than):
        ours, theirs = one.diagnostic(test.measure), other.diagnostic(test.measure)
        if ours is not None and theirs is not None:
            gaps.append(100 * (ours / theirs - 1))
    return difference(gaps) if gaps else None


def _in_points(found: Difference) -> Difference:
    interval = None if found.interval is None else (100 * found.interval[0], 100 * found.interval[1])
    return Difference(tuple(100 * value for value in found.values), interval, found.over_images)


def _trend(findings: Findings, test: Statement, low: Place, high: Place) -> Difference | None:
    assert test.than is not None
    at_low, at_high = (
        {one.seed: one.accuracy - other.accuracy for one, other in findings.paired(place, test.arm, test.than)}
        for place in (low, high)
    )
    gaps = [100 * (at_low[seed] - at_high[seed]) for seed in at_low if seed in at_high]
    return difference(gaps) if gaps else None


def _judged(test: Statement, place: str, found: Difference | None, side: Side, threshold: float) -> StatementResult:
    unit = "points" if test.measure == "accuracy" else "%"
    name = "" if test.measure == "accuracy" else f" in {test.measure}"
    what = f"{test.arm} - {test.than}{name}"
    if test.kind == "trend":
        what = f"({what}), smallest minus largest alpha,"
    row = _row(test, place, unit, side, threshold, f"{what} is {side} {threshold:g} {unit}")
    if found is None:
        return row
    return replace(
        row,
        values=tuple(rounded(found.values)),
        mean=rounded(found.mean),
        interval=None if found.interval is None else (rounded(found.interval[0]), rounded(found.interval[1])),
        p_value=rounded(found.p_value(threshold, side)),
        verdict=judge(found, threshold, side),
    )


def _every(findings: Findings, test: Statement, place: Place, side: Side, threshold: float) -> StatementResult:
    assert test.quantity is not None
    unit = "points" if test.quantity == "accuracy_lost" else ""
    over = "" if test.quantity == "accuracy_lost" else f" ({test.over} over clients)"
    what = f"{test.arm}: {WORDS[test.quantity]}{over} is {side} {threshold:g}{' ' + unit if unit else ''} on every seed"
    row = _row(test, place.id, unit, side, threshold, what)
    values = [_quantity(test, one) for one in findings.at(place, test.arm)]
    if not values:
        return row
    mean = sum(values) / len(values)
    return replace(row, values=tuple(rounded(values)), mean=rounded(mean), verdict=judge_every(values, threshold, side))


def _quantity(test: Statement, one: Finished) -> float:
    if test.quantity == "accuracy_lost":
        return 100 * (one.peak - one.accuracy)
    assert test.quantity is not None
    values = [OF_TRACES[test.quantity](trace) for _, trace in one.traces()]
    return max(values) if test.over == "max" else min(values)


def _row(test: Statement, place: str, unit: str, side: Side, threshold: float, text: str) -> StatementResult:
    """A test without figures: undecided."""
    return StatementResult(
        text=test.text or text,
        kind=test.kind,
        place=place,
        arm=test.arm,
        than=test.than,
        measure=test.quantity or test.measure,
        unit=unit,
        side=side,
        threshold=threshold,
        values=(),
        mean=None,
        interval=None,
        p_value=None,
        verdict="undecided",
    )
