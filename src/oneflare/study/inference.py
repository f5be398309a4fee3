"""Statistics over seeds: paired differences, their intervals, and the rule for verdicts.

Methods share partitions, so figures are paired by seed. With three seeds a bootstrap over seeds can only reach from
the smallest to the largest of three differences, and three coin tosses agree one time in four; that is why a verdict
also needs Student's paired test, which knows how little three are. All seeds share one test set: where the answers to
each image are kept, images are drawn again as well, crossed with the seeds (Owen 2007, "The pigeonhole bootstrap").
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["confirmed", "refuted", "undecided"]
Interval = tuple[float, float]

LEVEL = 0.95
ERROR = 0.05
FEWEST_SEEDS = 3
RESAMPLES = 4000
CHUNK = 250
RULE = (
    f"A difference is confirmed when two things agree that it is on the claimed side of its threshold: the "
    f"{LEVEL:.0%} bootstrap interval (over seeds; over seeds and test images where answers are kept) and Student's "
    f"paired test over seeds (one-sided, p < {ERROR:g}). It is refuted when both agree on the other side, undecided "
    f"otherwise. A statement about every seed is confirmed when it holds on all of them, refuted when on none. Fewer "
    f"than {FEWEST_SEEDS} seeds decide nothing. A claim is confirmed when all its tests are at all its places, refuted "
    f"when any is refuted. No correction is made for the number of claims."
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

    def p_value(self, threshold: float = 0.0, side: Literal["above", "below"] = "above") -> float | None:
        """One-sided: how likely a mean this far on the claimed side is if the truth were at the threshold."""
        return student_p([value - threshold for value in self.values], side)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "interval": None if self.interval is None else list(self.interval),
            "interval_over": "seeds and images" if self.over_images else "seeds",
            "p_above": self.p_value(0.0, "above"),
        }


def student_p(values: Sequence[float], side: Literal["above", "below"]) -> float | None:
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


def crossed_interval(answers: NDArray[np.float64], seed: int = 0) -> Interval | None:
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


def difference(values: Sequence[float], answers: NDArray[np.float64] | None = None) -> Difference:
    """values: one per seed; answers: `(seeds, images)` with the values as means, where they are kept."""
    if answers is None:
        return Difference(tuple(values), bootstrap_interval(values))
    return Difference(tuple(values), crossed_interval(answers), over_images=True)


def judge(found: Difference, threshold: float, side: Literal["above", "below"]) -> Verdict:
    """RULE for a difference."""
    if len(found.values) < FEWEST_SEEDS or found.interval is None:
        return "undecided"
    low, high = found.interval
    above = low > threshold and _significant(found.p_value(threshold, "above"))
    below = high < threshold and _significant(found.p_value(threshold, "below"))
    if not above and not below:
        return "undecided"
    return "confirmed" if (above if side == "above" else below) else "refuted"


def _significant(p_value: float | None) -> bool:
    return p_value is not None and p_value < ERROR


def judge_every(values: Sequence[float], threshold: float, side: Literal["above", "below"]) -> Verdict:
    """RULE for a statement about every seed."""
    if len(values) < FEWEST_SEEDS:
        return "undecided"
    held = [value > threshold if side == "above" else value < threshold for value in values]
    if all(held):
        return "confirmed"
    return "undecided" if any(held) else "refuted"


def joint(verdicts: Iterable[Verdict]) -> Verdict:
    """RULE for a claim of several tests."""
    found = list(verdicts)
    if "refuted" in found:
        return "refuted"
    return "confirmed" if found and all(verdict == "confirmed" for verdict in found) else "undecided"
