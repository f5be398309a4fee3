"""Statistics over seeds: paired differences, their intervals, and the rule for verdicts.

Methods share partitions, so figures are paired by seed. With three seeds a bootstrap over seeds can only reach from
the smallest to the largest of three differences, and three coin tosses agree one time in four; that is why a verdict
also needs Student's paired test, which knows how little three are. All seeds share one test set: where the answers to
each image are kept, images are drawn again as well, crossed with the seeds (Owen 2007, "The pigeonhole bootstrap").
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["confirmed", "refuted", "no difference", "undecided"]
Side = Literal["above", "below"]
Interval = tuple[float, float]

LEVEL = 0.95
ERROR = 0.05
FEWEST_SEEDS = 3
MARGIN = 1.0
"""points of accuracy (per cent of another measure) below which a difference counts as none"""
RESAMPLES = 4000
CHUNK = 250
SIMULATED = 400_000
"""rows behind `smallest_of_looks`"""
SIMULATED_TAIL = 400
"""rows below which their number says too little"""
MOST_SEEDS = 1000
"""more than these are not counted in `seeds_wanted`"""
RULE = (
    f"A difference is confirmed when two things agree that it is on the claimed side of its threshold: the "
    f"{LEVEL:.0%} bootstrap interval (over seeds; over seeds and test images where answers are kept) and Student's "
    f"paired test over seeds (one-sided, {ERROR:.0%}). It is refuted when both agree on the other side. Where the "
    f"threshold is 0 and neither holds, there is no difference of {MARGIN:g} or more when both agree, by two one-sided "
    f"tests, that it lies between -{MARGIN:g} and {MARGIN:g}. Otherwise it is undecided. A statement about one method "
    f"alone is tested in the same way on a quantity of each seed, lambdas by their logarithm. Fewer than "
    f"{FEWEST_SEEDS} seeds decide nothing. Where seeds are added until a verdict is clear, it is looked for at fixed "
    f"numbers of seeds and the clearest verdict counts; its p value becomes the chance that the smallest of all looks' "
    f"is as small, which is less than as many times as there are looks (Bonferroni), for they share seeds. A "
    f"claim is confirmed when all its tests are at all places, refuted when any is refuted, and shows no difference "
    f"when the tests that are not confirmed show none. The summary over all claims keeps the verdicts that stand at a "
    f"false discovery rate of {ERROR:.0%} (Benjamini and Hochberg 1995)."
)


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: one value for each."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Deviation over seeds; None with one seed, which says nothing about others."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        return {"values": list(self.values), "mean": self.mean, "std": self.std}


@dataclass(frozen=True)
class Difference(Spread):
    """Paired values, one per seed, and what they show about their mean."""

    interval: Interval | None
    """of the mean; None with one seed"""
    over_images: bool = False

    def p_value(self, threshold: float = 0.0, side: Side = "above") -> float | None:
        """One-sided: how likely a mean this far on the claimed side is if the truth were at the threshold."""
        return student_p([value - threshold for value in self.values], side)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "interval": None if self.interval is None else list(self.interval),
            "interval_over": "seeds and images" if self.over_images else "seeds",
            "p_above": self.p_value(0.0, "above"),
        }


def student_p(values: Sequence[float], side: Side) -> float | None:
    """Student's one-sample test of mean > 0 (or < 0), one-sided; None with one value."""
    if len(values) < 2:
        return None
    sign = 1.0 if side == "above" else -1.0
    mean, spread = sign * statistics.fmean(values), statistics.stdev(values)
    if spread == 0:
        return 0.0 if mean > 0 else 1.0
    from scipy.stats import t

    return float(t.sf(mean / (spread / math.sqrt(len(values))), len(values) - 1))


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """Percentile interval of the mean over seeds."""
    if len(values) < 2:
        return None
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    return _percentiles(np.asarray(values)[draws].mean(1))


def crossed_interval(answers: NDArray[np.floating[Any]], seed: int = 0) -> Interval | None:
    """Percentile interval of the mean of `(seeds, images)`, seeds and images drawn again independently."""
    seeds, images = answers.shape
    if seeds < 2:
        return None
    generator = np.random.default_rng(seed)
    means: list[NDArray[np.float64]] = []
    for _ in range(RESAMPLES // CHUNK):
        by_seed = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=CHUNK) / seeds
        drawn = generator.integers(images, size=(CHUNK, images), dtype=np.int32)
        by_image = np.stack([row[drawn].mean(1) for row in answers], axis=1)
        means.append(np.einsum("rs,rs->r", by_seed, by_image))
    return _percentiles(np.concatenate(means))


def _percentiles(means: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def difference(values: Sequence[float], answers: NDArray[np.floating[Any]] | None = None) -> Difference:
    """values: one per seed; answers: `(seeds, images)` with the values as means, where they are kept."""
    if answers is None:
        return Difference(tuple(values), bootstrap_interval(values))
    return Difference(tuple(values), crossed_interval(answers), over_images=True)


@dataclass(frozen=True)
class Judgement:
    """A verdict, and how likely one as clear is by chance."""

    verdict: Verdict
    p_value: float | None
    """of the test behind the verdict, over all looks (`smallest_of_looks`); None while undecided"""


UNDECIDED = Judgement("undecided", None)


def smallest_of_looks(p_value: float, looks: tuple[int, ...]) -> float:
    """How likely the smallest p value of Student's tests is so small, if the mean is at the threshold.

    Each test takes the first values of a row, so many as its look has, and the values are Gaussian. From a simulation;
    where that has met too few rows, and in any case at most the p value times the number of looks.
    """
    if len(looks) < 2:
        return p_value
    simulated = _smallest_p_values(looks)
    below = max(SIMULATED_TAIL, int(np.searchsorted(simulated, p_value, side="right")))
    return min(1.0, len(looks) * p_value, below / len(simulated))


@functools.lru_cache(maxsize=4)
def _smallest_p_values(looks: tuple[int, ...]) -> NDArray[np.float64]:
    """Sorted, of `SIMULATED` rows of values whose mean is 0."""
    from scipy.stats import t

    rows = np.random.default_rng(0).standard_normal((SIMULATED, max(looks)))
    smallest = np.ones(SIMULATED)
    for look in looks:
        seen = rows[:, :look]
        statistic = seen.mean(1) / (seen.std(1, ddof=1) / math.sqrt(look))
        np.minimum(smallest, t.sf(statistic, look - 1), out=smallest)
    return np.sort(smallest)


def judge(
    found: Difference, threshold: float, side: Side, *, looks: tuple[int, ...] = (), margin: float | None = None
) -> Judgement:
    """RULE for a difference.

    looks: at which numbers of seeds a verdict is looked for, where it is at several. margin: below it a difference
    counts as none; None where "no difference" makes no sense.
    """
    if len(found.values) < FEWEST_SEEDS or found.interval is None:
        return UNDECIDED
    low, high = found.interval
    above = _Evidence(low > threshold, found.p_value(threshold, "above"))
    below = _Evidence(high < threshold, found.p_value(threshold, "below"))
    claimed, opposite = (above, below) if side == "above" else (below, above)
    between = _Evidence(False, None)
    if margin is not None:
        between = _Evidence(low > -margin and high < margin, equivalence_p(found.values, margin))
    verdicts: tuple[tuple[Verdict, _Evidence], ...] = (
        ("confirmed", claimed),
        ("refuted", opposite),
        ("no difference", between),
    )
    for verdict, evidence in verdicts:
        if not evidence.interval_agrees or evidence.p_value is None:
            continue
        p_value = smallest_of_looks(evidence.p_value, looks)
        if p_value < ERROR:
            return Judgement(verdict, p_value)
    return UNDECIDED


@dataclass(frozen=True)
class _Evidence:
    interval_agrees: bool
    p_value: float | None


def equivalence_p(values: Sequence[float], margin: float) -> float | None:
    """Two one-sided tests (Schuirmann 1987): how likely values like these are if the mean were `margin` or more off."""
    above = student_p([value + margin for value in values], "above")
    below = student_p([value - margin for value in values], "below")
    return None if above is None or below is None else max(above, below)


@dataclass(frozen=True)
class SeedsWanted:
    """With how many seeds a test would decide, if mean and deviation stayed as they are; infinity beyond MOST_SEEDS."""

    to_hold: float
    """to confirm it or to show no difference"""
    to_refute: float


def seeds_wanted(
    values: Sequence[float], threshold: float, side: Side, *, looks: tuple[int, ...] = (), margin: float | None = None
) -> SeedsWanted:
    """From Student's tests alone; the threshold, the side, the looks and the margin are those of `judge`.

    More than there are, because the interval may leave open what Student's test finds clear.
    """
    if len(values) < FEWEST_SEEDS:
        return SeedsWanted(math.inf, math.inf)
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    beyond = mean - threshold if side == "above" else threshold - mean
    inside = -math.inf if margin is None else margin - abs(mean)
    more = len(values) + 1
    return SeedsWanted(_seeds_for(max(beyond, inside), spread, looks, more), _seeds_for(-beyond, spread, looks, more))


def _seeds_for(distance: float, spread: float, looks: tuple[int, ...], fewest: int) -> float:
    """Fewest seeds with which a mean this far on the right side of a threshold is clear."""
    from scipy.stats import t

    if distance <= 0:
        return math.inf
    numbers = np.arange(fewest, MOST_SEEDS + 1)
    clear = t.isf(_clear_p(looks), numbers - 1) * spread < distance * np.sqrt(numbers)
    return float(numbers[clear.argmax()]) if clear.any() else math.inf


def _clear_p(looks: tuple[int, ...]) -> float:
    """The p value of one look below which a verdict is clear."""
    return ERROR if len(looks) < 2 else float(np.quantile(_smallest_p_values(looks), ERROR))


def seeds_for_claim(tests: Sequence[tuple[Judgement, SeedsWanted]]) -> int | None:
    """Of a claim of several tests, by the rule of `joint`; None where MOST_SEEDS would not decide it."""
    open_tests = [wanted.to_hold for judged, wanted in tests if judged.verdict == "undecided"]
    fewest = min(max(open_tests, default=0.0), min((wanted.to_refute for _, wanted in tests), default=math.inf))
    return None if math.isinf(fewest) else int(fewest)


def joint(tests: Iterable[Judgement]) -> Judgement:
    """RULE for a claim of several tests.

    All must hold for a confirmation, so the least clear decides; any may refute, so the clearest counts as often as
    there were tests.
    """
    found = list(tests)
    refuted = [test.p_value for test in found if test.verdict == "refuted" and test.p_value is not None]
    if refuted:
        return Judgement("refuted", min(1.0, len(found) * min(refuted)))
    if not found or any(test.verdict == "undecided" for test in found):
        return UNDECIDED
    verdict: Verdict = "confirmed" if all(test.verdict == "confirmed" for test in found) else "no difference"
    return Judgement(verdict, max(test.p_value or 0.0 for test in found))


def discoveries(p_values: Sequence[float | None]) -> list[bool]:
    """Which of several verdicts stand at a false discovery rate of ERROR (Benjamini and Hochberg 1995).

    Every entry counts as a test that was made, also those without a verdict (None).
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    last = max((rank for rank, (p, _) in enumerate(known, 1) if p <= ERROR * rank / len(p_values)), default=0)
    kept = {index for _, index in known[:last]}
    return [index in kept for index in range(len(p_values))]
