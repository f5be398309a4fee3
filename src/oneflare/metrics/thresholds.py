"""Chooses the threshold of a class and the least familiarity of a known image, on what members tell of their tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.metrics.figures import ClassFigures, ThresholdRates

LEVELS = 201
"""of familiarity, spread evenly from -bound to bound, at which members tell what is kept"""
Rate = Literal["sensitivity", "specificity"]


def levels(bound: float) -> Tensor:
    """`(LEVELS,)`; bound: of the model's familiarity"""
    return torch.linspace(-bound, bound, LEVELS, dtype=torch.float64)


def kept_shares(familiarity: Tensor, bound: float, smallest_group: int = 1) -> tuple[float, ...]:
    """Of test images `(n,)`, the share whose familiarity is at least each level.

    familiarity: how far any member knows an image (the largest log density ratio). Where fewer than `smallest_group`
    images are kept, the share is given as 0, and where fewer are not, as 1: nobody learns of single images.
    """
    number = len(familiarity)
    kept = (familiarity.double()[None] >= levels(bound)[:, None]).sum(1)
    kept = torch.where(kept < smallest_group, 0, torch.where(number - kept < smallest_group, number, kept))
    return tuple((kept.double() / number).tolist())


def least_familiarity(kept: Sequence[float], bound: float, keep: float) -> float:
    """The highest level at which at least the share `keep` of known images is kept."""
    return max(float(level) for level, share in zip(levels(bound).tolist(), kept, strict=True) if share >= keep)


def threshold_for(one: ClassFigures, rate: Rate, least: float) -> ThresholdRates:
    """The threshold that gives a class at least this sensitivity and the best specificity, or the other way round.

    Only thresholds at which members tell their rates are looked at; of equally good ones, that nearest to 0.5 is taken.
    """
    if not one.curve:
        raise ConfigError(f"class '{one.name}': no member tells its rates, so no threshold can be chosen for it")
    fitting = [rates for rates in one.curve if getattr(rates, rate) >= least]
    other = "specificity" if rate == "sensitivity" else "sensitivity"
    if not fitting:
        best = max(one.curve, key=lambda rates: float(getattr(rates, rate)))
        raise ConfigError(
            f"class '{one.name}': no threshold has a {rate} of {least:g}; the highest is {getattr(best, rate):.3f}, at "
            f"{best.threshold:g} with a {other} of {getattr(best, other):.3f}"
        )
    return max(fitting, key=lambda rates: (float(getattr(rates, other)), -abs(rates.threshold - 0.5)))
