"""Confidence intervals of 95 % that hold for few images and for figures of exactly 0 or 1.

Every function takes numbers of independent observations. Images of one patient are not independent; callers who know
the patients give the number of patients, which makes the interval wide enough however alike a patient's images are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

Z = 1.959963984540054
"""the normal distribution's quantile at 0.975"""


@dataclass(frozen=True)
class Measured:
    """A figure with its confidence interval of 95 %."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not -1.0 <= self.low <= self.value <= self.high <= 1.0:
            raise ValueError("a figure lies in its interval, and both between -1 and 1")


def wilson(rate: float, number: float) -> Measured:
    """Wilson's (1927) interval of a proportion `rate` of `number` observations.

    centre = (rate + z^2 / 2n) / (1 + z^2 / n), half width = z sqrt(rate (1 - rate) / n + z^2 / 4n^2) / (1 + z^2 / n)
    """
    scale = 1 + Z**2 / number
    centre = (rate + Z**2 / (2 * number)) / scale
    half = Z * sqrt(rate * (1 - rate) / number + Z**2 / (4 * number**2)) / scale
    return _around(rate, centre - half, centre + half)


def mean_of(parts: Sequence[Measured]) -> Measured:
    """The mean of independent figures, with the interval of Zou and Donner (2008).

    With mean m of the values v: low = m - sqrt(sum (v - low_v)^2) / C, high = m + sqrt(sum (high_v - v)^2) / C.
    """
    count = len(parts)
    mean = sum(part.value for part in parts) / count
    below = sqrt(sum((part.value - part.low) ** 2 for part in parts)) / count
    above = sqrt(sum((part.high - part.value) ** 2 for part in parts)) / count
    return _around(mean, mean - below, mean + above)


def rank_interval(auroc: float, positives: float, negatives: float) -> Measured:
    """The interval of an area under the ROC curve: all areas that the one found does not contradict (Newcombe 2006).

    These are the A with |auroc - A| <= z SE(A), where (Hanley and McNeil 1982)
    SE(A)^2 = (A (1 - A) + (m - 1) (A / (2 - A) - A^2) + (n - 1) (2 A^2 / (1 + A) - A^2)) / (m n).
    """

    def error(area: float) -> float:
        spread = area * (1 - area)
        spread += (positives - 1) * (area / (2 - area) - area**2)
        spread += (negatives - 1) * (2 * area**2 / (1 + area) - area**2)
        return Z * sqrt(max(spread, 0.0) / (positives * negatives))

    low = _boundary(lambda area: auroc - area <= error(area), auroc, 0.0)
    high = _boundary(lambda area: area - auroc <= error(area), auroc, 1.0)
    return _around(auroc, low, high)


def paired_gain(better: int, worse: int, images: int, number: float) -> Measured:
    """The difference of two accuracies on the same images, with the interval of Bonett and Price (2012).

    better: images that only the second model answers right; worse: only the first. With b, w scaled from `images` to
    `number` independent observations, p = (b + 1) / (n + 2), q = (w + 1) / (n + 2):
    p - q +- z sqrt((p + q - (p - q)^2) / (n + 2)).
    """
    scale = number / images
    p, q = (better * scale + 1) / (number + 2), (worse * scale + 1) / (number + 2)
    half = Z * sqrt((p + q - (p - q) ** 2) / (number + 2))
    value = (better - worse) / images
    return Measured(value, max(min(p - q - half, value), -1.0), min(max(p - q + half, value), 1.0))


def _around(value: float, low: float, high: float) -> Measured:
    """Rounding errors must not put a limit on the wrong side of the value, or outside 0 and 1."""
    value = min(max(value, 0.0), 1.0)
    return Measured(value, max(min(low, value), 0.0), min(max(high, value), 1.0))


def _boundary(inside: Callable[[float], bool], start: float, end: float) -> float:
    """The farthest point from `start`, which is inside, toward `end`, by halving."""
    if inside(end):
        return end
    near, far = start, end
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if inside(middle) else (near, middle)
    return near
