"""Tests the claims of a study: figures by seed, an interval and a verdict for each.

A verdict is looked for at each number of seeds of the plan, and the clearest of them counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from oneflare.study.cells import Cell, Place
from oneflare.study.declare import Claim, Statement
from oneflare.study.findings import Findings, Finished, Trace, rounded
from oneflare.study.records import ClaimResult, StatementResult
from oneflare.study.verdicts import (
    MARGIN,
    UNDECIDED,
    Difference,
    Judgement,
    SeedsWanted,
    Side,
    difference,
    discoveries,
    joint,
    judge,
    seeds_for_claim,
    seeds_wanted,
)


def end_over_peak(trace: Trace) -> float:
    return trace[-1]["lambda_raw"] / max(row["lambda_raw_max"] for row in trace)


def largest_raw(trace: Trace) -> float:
    return max(row["lambda_raw_max"] for row in trace)


def last_raw(trace: Trace) -> float:
    return trace[-1]["lambda_raw"]


def rise(trace: Trace) -> float:
    """Raw lambda at the end over the middle of training."""
    return trace[-1]["lambda_raw"] / trace[len(trace) // 2]["lambda_raw"]


SMALLEST = 1e-12
"""what a lambda of 0 counts as, where logarithms are compared"""
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


def open_cells(studies: Sequence[Findings]) -> list[Cell]:
    """The cells that open claims need for their next look; none when no claim is open or all have had their last.

    A claim is open while it is undecided, or while its verdict does not stand among all claims of these studies.
    """
    tried = [
        list(_trials(findings, claim))
        for findings in studies
        for claim in findings.plan.declaration.claims
        if not claim.exploratory
    ]
    standing = discoveries([joint(trial.judged[1] for trial in trials).p_value for trials in tried])
    return [
        cell
        for trials, stands in zip(tried, standing, strict=True)
        if not stands
        for trial in _unsettled(trials)
        for cell in trial.next_cells()
    ]


def _claim(findings: Findings, claim: Claim) -> ClaimResult:
    tried = list(_trials(findings, claim))
    whole = joint(trial.judged[1] for trial in tried)
    tests = tuple(_row(trial) for trial in tried)
    wanted = seeds_for_claim([(trial.judged[1], trial.wanted) for trial in tried])
    return ClaimResult(
        claim.id,
        claim.text,
        claim.log,
        whole.verdict,
        rounded(whole.p_value),
        tests,
        claim.exploratory,
        wanted if whole.verdict == "undecided" else None,
    )


@dataclass(frozen=True)
class Trial:
    """One statement at one place; a trend has two."""

    findings: Findings
    test: Statement
    places: tuple[Place, ...]

    @property
    def side(self) -> Side:
        return "above" if self.test.above is not None else "below"

    @property
    def threshold(self) -> float:
        threshold = self.test.above if self.test.above is not None else self.test.below
        assert threshold is not None
        return threshold

    @property
    def by_logarithm(self) -> bool:
        """Lambdas and their ratios spread over decades."""
        return self.test.kind == "quantity" and self.test.quantity != "accuracy_lost"

    @property
    def tested_threshold(self) -> float:
        """In the unit of the samples."""
        return math.log10(self.threshold) if self.by_logarithm else self.threshold

    @property
    def margin(self) -> float | None:
        """Within which a difference from 0 counts as none; None for quantities and other thresholds."""
        return MARGIN if self.test.kind != "quantity" and self.threshold == 0 else None

    @cached_property
    def seen(self) -> list[Difference]:
        """What each look has seen, up to the first that lacks seeds."""
        found: list[Difference] = []
        for look in self.findings.plan.looks:
            sample = self.sample(look)
            if sample is not None:
                found.append(sample)
            if sample is None or len(sample.values) < look:
                break
        return found

    @cached_property
    def judged(self) -> tuple[Difference | None, Judgement]:
        """What the look with the clearest verdict has seen, and that verdict; the last look while none is clear."""
        looks, threshold = self.findings.plan.looks, self.tested_threshold
        clear: list[tuple[float, Difference, Judgement]] = []
        for sample, look in zip(self.seen, looks, strict=False):
            if len(sample.values) < look:
                break
            judgement = judge(sample, threshold, self.side, looks=looks, margin=self.margin)
            if judgement.p_value is not None:
                clear.append((judgement.p_value, sample, judgement))
        if not clear:
            return self.seen[-1] if self.seen else None, UNDECIDED
        _, sample, judgement = min(clear, key=lambda look: look[0])
        return sample, judgement

    @property
    def wanted(self) -> SeedsWanted:
        """How many seeds would decide it, as things look."""
        values = self.seen[-1].values if self.seen else ()
        looks = self.findings.plan.looks
        return seeds_wanted(values, self.tested_threshold, self.side, looks=looks, margin=self.margin)

    def sample(self, first: int) -> Difference | None:
        """The figures of the first seeds: points of accuracy, per cent of another measure, or a quantity."""
        if self.test.kind == "trend":
            return self._trend(first)
        if self.test.kind == "quantity":
            return self._quantities(first)
        (place,) = self.places
        assert self.test.than is not None
        if self.test.measure == "accuracy":
            found = self.findings.difference(place, self.test.arm, self.test.than, first)
            return None if found is None else _in_points(found)
        gaps = []
        for one, other in self.findings.paired(place, self.test.arm, self.test.than, first):
            ours, theirs = one.diagnostic(self.test.measure), other.diagnostic(self.test.measure)
            if ours is not None and theirs is not None:
                gaps.append(100 * (ours / theirs - 1))
        return difference(gaps) if gaps else None

    def _trend(self, first: int) -> Difference | None:
        assert self.test.than is not None
        at_low, at_high = (
            {
                one.seed: one.accuracy - other.accuracy
                for one, other in self.findings.paired(place, self.test.arm, self.test.than, first)
            }
            for place in self.places
        )
        gaps = [100 * (at_low[seed] - at_high[seed]) for seed in at_low if seed in at_high]
        return difference(gaps) if gaps else None

    def _quantities(self, first: int) -> Difference | None:
        (place,) = self.places
        values = [_quantity(self.test, one) for one in self.findings.at(place, self.test.arm, first)]
        if self.by_logarithm:
            values = [math.log10(max(value, SMALLEST)) for value in values]
        return difference(values) if values else None

    def next_cells(self) -> list[Cell]:
        """All cells up to the first look that lacks some."""
        plan, rows = self.findings.plan, self.findings.rows
        arms = [rows[name].arm for name in (self.test.arm, self.test.than) if name is not None]
        seen = len(self.seen[-1].values) if self.seen else 0
        look = next((look for look in plan.looks if look > seen), 0)
        return [plan.cell(place, arm, seed) for place in self.places for arm in arms for seed in plan.seeds[:look]]


def _trials(findings: Findings, claim: Claim) -> Iterator[Trial]:
    """One for each place where a statement applies."""
    for test in claim.tests:
        places = [place for place in findings.plan.places if _applies(test, place)]
        pairs = _ends(places) if test.kind == "trend" else ((place,) for place in places)
        for where in pairs:
            yield Trial(findings, test, where)


def _unsettled(trials: Sequence[Trial]) -> list[Trial]:
    """Those whose clarity decides how clear the claim is: that refute it, else that are undecided, else all."""
    verdicts = [trial.judged[1].verdict for trial in trials]
    for decisive in ("refuted", "undecided"):
        if decisive in verdicts:
            return [trial for trial, verdict in zip(trials, verdicts, strict=True) if verdict == decisive]
    return list(trials)


def _applies(test: Statement, place: Place) -> bool:
    return test.data in (None, place.data) and test.alpha in (None, place.alpha)


def _ends(places: list[Place]) -> Iterator[tuple[Place, ...]]:
    """Smallest and largest alpha of the same data and number of clients."""
    groups: dict[tuple[str, int], list[Place]] = {}
    for place in places:
        groups.setdefault((place.data, place.clients), []).append(place)
    for group in groups.values():
        ordered = sorted(group, key=lambda place: place.alpha)
        if len(ordered) > 1:
            yield ordered[0], ordered[-1]


def _in_points(found: Difference) -> Difference:
    interval = None if found.interval is None else (100 * found.interval[0], 100 * found.interval[1])
    return Difference(tuple(100 * value for value in found.values), interval, found.over_images)


def _quantity(test: Statement, one: Finished) -> float:
    if test.quantity == "accuracy_lost":
        return 100 * (one.peak - one.accuracy)
    assert test.quantity is not None
    values = [OF_TRACES[test.quantity](trace) for _, trace in one.traces()]
    return max(values) if test.over == "max" else min(values)


def _row(trial: Trial) -> StatementResult:
    test, (found, judgement) = trial.test, trial.judged
    row = StatementResult(
        text=test.text or _words(trial),
        kind=test.kind,
        place=" against ".join(place.id for place in trial.places),
        arm=test.arm,
        than=test.than,
        measure=test.quantity or test.measure,
        unit=_unit(test),
        side=trial.side,
        threshold=trial.threshold,
        values=(),
        mean=None,
        interval=None,
        p_value=None,
        verdict=judgement.verdict,
    )
    if found is None:
        return row
    shown = _powers if trial.by_logarithm else _unchanged
    p_value = judgement.p_value if judgement.p_value is not None else found.p_value(trial.tested_threshold, trial.side)
    return replace(
        row,
        values=tuple(rounded([shown(value) for value in found.values])),
        mean=rounded(shown(found.mean)),
        interval=None
        if found.interval is None
        else (rounded(shown(found.interval[0])), rounded(shown(found.interval[1]))),
        p_value=rounded(p_value),
    )


def _powers(value: float) -> float:
    return float(10**value)


def _unchanged(value: float) -> float:
    return value


def _unit(test: Statement) -> str:
    if test.kind == "quantity":
        return "points" if test.quantity == "accuracy_lost" else ""
    return "points" if test.measure == "accuracy" else "%"


def _words(trial: Trial) -> str:
    test, unit = trial.test, _unit(trial.test)
    beyond = f"is {trial.side} {trial.threshold:g}{' ' + unit if unit else ''}"
    if test.kind == "quantity":
        assert test.quantity is not None
        over = "" if test.quantity == "accuracy_lost" else f" ({test.over} over clients)"
        return f"{test.arm}: {WORDS[test.quantity]}{over} {beyond}"
    name = "" if test.measure == "accuracy" else f" in {test.measure}"
    what = f"{test.arm} - {test.than}{name}"
    if test.kind == "trend":
        what = f"({what}), smallest minus largest alpha,"
    return f"{what} {beyond}"
