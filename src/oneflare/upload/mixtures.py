"""Gaussian mixtures of a client's features, one for each class, in an upload.

Class c of a client is sum_k w_ck N(mu_ck, diag(v_ck)). Mixtures do not add up over clients: the server keeps them side
by side, each with the number of images behind it. So what is made of them depends on the split, though not strongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.nn import check_size
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.statistics import COUNTS, SUMS, Plan

WEIGHTS = "mixture.weights"
MEANS = "mixture.means"
VARIANCES = "mixture.variances"
LARGEST = float(torch.finfo(torch.float16).max)
HALF_ROUNDING = 2.0**-10
"""relative, of what is sent as float16, with a factor of two to spare"""
TOLERANCE = 1e-2
"""of a feature's size or spread: how far the mean of a mixture may be from the mean of its images"""


@dataclass(frozen=True)
class Mixtures:
    """The mixtures of one client, float32."""

    weights: Tensor
    """`(C, K)` w_ck, adding up to 1 over k, or all 0 for a class without images"""
    means: Tensor
    """`(C, K, D)` mu_ck"""
    variances: Tensor
    """`(C, K, D)` v_ck"""
    counts: Tensor
    """`(C,)` images of each class"""


def mixture_layout(plan: Plan, classes: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """name -> shape, whether floating"""
    shape = (classes, plan.components, plan.dim)
    check_size(
        f"mixtures of {classes} classes with {plan.components} components of {plan.dim} features each",
        2 * classes * plan.components * plan.dim,
        "choose fewer upload.statistics_components",
    )
    return {WEIGHTS: (shape[:2], True), MEANS: (shape, True), VARIANCES: (shape, True)}


def pack_mixtures(mixtures: Mixtures) -> dict[str, Tensor]:
    """The tensors of an upload: weights in float32, means and variances in float16."""
    return {
        WEIGHTS: mixtures.weights.float(),
        MEANS: mixtures.means.clamp(-LARGEST, LARGEST).half(),
        VARIANCES: mixtures.variances.clamp(0, LARGEST).half(),
    }


def unpack_mixtures(packed: Mapping[str, Tensor]) -> Mixtures:
    """The mixtures of an upload."""
    return Mixtures(packed[WEIGHTS].float(), packed[MEANS].float(), packed[VARIANCES].float(), packed[COUNTS].double())


def mixture_complaint(packed: Mapping[str, Tensor], limits: FeatureLimits) -> str | None:
    """What no images could give, in mixtures whose shapes and types are right; None if nothing is.

    Maximum likelihood makes the mean of a mixture the mean of its images, which the class sums say as well.
    """
    counts = packed[COUNTS].double()
    weights, means, variances = (packed[name].double() for name in (WEIGHTS, MEANS, VARIANCES))
    if bool((weights < 0).any()) or bool((weights > 1 + TOLERANCE).any()):
        return f"{WEIGHTS} has a value outside 0 to 1"
    present = counts > 0
    if bool((weights.sum(1) - present.double()).abs().gt(TOLERANCE).any()):
        return f"{WEIGHTS} must add up to 1 for a class with images and to 0 for one without"
    if bool((variances < 0).any()):
        return f"{VARIANCES} has a negative variance"
    used = (weights > 0)[:, :, None]
    size = torch.maximum(limits.low.abs(), limits.high.abs())
    slack = TOLERANCE * size.clamp(min=TOLERANCE)
    if bool((((means < limits.low - slack) | (means > limits.high + slack)) & used).any()):
        return f"{MEANS} has a value that its feature cannot have"
    most = ((limits.high - limits.low) / 2).square()  # Popoviciu 1935
    if bool(((variances > (1 + TOLERANCE) * most + slack) & used).any()):
        return f"{VARIANCES} has a variance that is more than its feature can have"
    together = (weights[:, :, None] * means).sum(1)[present]
    spread = (weights[:, :, None] * (variances + means.square())).sum(1)[present].sqrt()
    wanted = packed[SUMS].double()[present] / counts[present, None]
    if bool(((together - wanted).abs() > TOLERANCE * spread + TOLERANCE**2).any()):
        return f"{MEANS} and sums contradict each other: the mean of a mixture is not the mean of its class"
    return None
