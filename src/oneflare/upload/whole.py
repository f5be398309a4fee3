"""Sums that are the same to the last bit for every split, because what is added up are whole numbers.

Each image's features are decorrelated and rounded on their own, q = [A phi / w], with the change A that all members
know (`oneflare.nn.decorrelation`) and the width w of `WIDTH`. A member sends

    G = sum q q^T,    b_c = sum of q over class c,    n_c = images of class c,

which are whole numbers and add up without rounding, in any order and however images are split over members. Rounding an
image moves each of its features by at most w/2, with variance w^2/12; unlike rounding a member's sums
(`oneflare.upload.coding`), it does not depend on who holds the image.

Of G the words of `oneflare.upload.words` are sent, with a step of 1, so that nothing is lost: what is coded is
G - [t t^T / n], with t the sum of all b_c. Products and quotients of whole numbers below 2^53 are rounded alike on
every processor, so the reader adds exactly what was taken off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.nn import FeatureMap
from oneflare.nn.decorrelation import Decorrelation
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.statistics import COUNTS, SCATTER, SUMS, Statistics
from oneflare.upload.symmetric import SLACK, mirrored_, positive, upper_values
from oneflare.upload.words import EXACT, Parsed, rows_apart, with_rest

WIDTH = 0.6
"""of the deviation that a decorrelated feature has over synthetic pictures: the step w"""
LARGEST = 90
"""steps, beyond which a feature is cut: 2048 products of such numbers are exact in single precision"""
ROUNDING = 1 / 12
"""the variance that rounding adds to a feature, in steps"""
AT_A_TIME = 64
"""images whose features are computed together: always so many, because rounding may depend on how many there are"""


@dataclass(frozen=True)
class WholeFeatures:
    """Images to q, which depends on the image alone."""

    features: FeatureMap
    coder: Decorrelation

    def __call__(self, images: Tensor) -> Tensor:
        """`(n, D)` float32"""
        return torch.cat([self._of(part) for part in images.split(AT_A_TIME)])

    def _of(self, images: Tensor) -> Tensor:
        missing = AT_A_TIME - len(images)
        full = images if missing == 0 else torch.cat([images, images[-1:].expand(missing, *images.shape[1:])])
        return whole(self.coder.changed(self.features(full)))[: len(images)]


def whole(z: Tensor) -> Tensor:
    """[z / w], cut at `LARGEST`"""
    return (z / WIDTH).round_().clamp_(-LARGEST, LARGEST)


def pack_whole(found: Statistics) -> dict[str, Tensor]:
    """The packed sums of q, of whose G the upper triangle counts; a ValueError where they are too large."""
    images, total = max(float(found.counts.sum()), 1.0), found.sums.double().sum(0)
    left = mirrored_(found.gram.double()).sub_(_mean_part(total, images))
    if float(left.abs().max()) >= EXACT or float(found.sums.abs().max()) >= EXACT:
        raise ValueError(f"sums over {images:.0f} images are too large to be sent in whole numbers")
    products = left.float()
    rows = rows_apart(products, math.sqrt(images) / WIDTH**2)
    words = with_rest(rows, products, 0)
    return {SUMS: found.sums.float(), COUNTS: found.counts.long(), SCATTER: words}


def whole_sums(packed: Mapping[str, Tensor], into: Tensor | None = None) -> Statistics:
    """The sums of q that were packed, float64; a ValueError where they are no code of such.

    into: a matrix that may be overwritten for G
    """
    sums, counts = packed[SUMS].double(), packed[COUNTS].double()
    dim = sums.shape[1]
    products = _parsed(packed).products_into(torch.empty(dim, dim, dtype=torch.float64) if into is None else into)
    return Statistics(products.add_(_mean_part(sums.sum(0), max(float(counts.sum()), 1.0))), sums, counts)


def _mean_part(total: Tensor, images: float) -> Tensor:
    """[t t^T / n] `(D, D)`"""
    return torch.outer(total, total).div_(images).round_()


def _parsed(packed: Mapping[str, Tensor]) -> Parsed:
    dim = packed[SUMS].shape[1]
    found = Parsed.of(packed[SCATTER], dim, max(dim // 2, 1))
    if found.step != 1.0:
        raise ValueError("its numbers are not whole")
    return found


def plain_whole(packed: Mapping[str, Tensor], coder: Decorrelation) -> dict[str, Tensor]:
    """Packed statistics of phi in float32, as far as q tells them."""
    found = whole_sums(packed)
    left = found.gram - torch.outer(total := found.sums.sum(0), total / max(found.samples, 1.0))
    scatter = coder.restore((WIDTH**2 * left).float())
    return {SUMS: plain_sums(packed, coder), COUNTS: packed[COUNTS], SCATTER: upper_values(scatter)}


def plain_sums(packed: Mapping[str, Tensor], coder: Decorrelation) -> Tensor:
    """b_c of phi `(C, D)` float32"""
    return coder.original(WIDTH * packed[SUMS].double()).float()


def whole_limits(limits: FeatureLimits, coder: Decorrelation) -> FeatureLimits:
    """Between which numbers q of any image lies."""
    low, high = coder.range(limits.low, limits.high)
    return FeatureLimits(*((bound / WIDTH).clamp(-LARGEST, LARGEST) + sign for bound, sign in ((low, -1), (high, 1))))


def whole_complaint(packed: Mapping[str, Tensor], limits: FeatureLimits) -> str | None:
    """What no images could give, in sums of q whose class means are possible; None if nothing is.

    limits: of q
    """
    if bool((packed[SUMS] != packed[SUMS].round()).any()):
        return "sums is not in whole numbers"
    try:
        found = whole_sums(packed)
    except ValueError as error:
        return f"scatter is not in the code of sums: {error}"
    n, present = found.samples, found.counts > 0
    mean = found.sums.sum(0) / n
    variances = found.gram.diagonal() / n - mean.square()
    most = (limits.high - mean).clamp(min=0) * (mean - limits.low).clamp(min=0)  # Bhatia and Davis 2000
    excess = variances > (1 + SLACK) * most + SLACK * (limits.high - limits.low).square()
    if bool(excess.any()):
        worst = int(variances.where(excess, torch.zeros((), dtype=torch.float64)).argmax())
        return f"scatter has a variance of {float(variances[worst]):.3g}, more than its feature can have"
    means = found.sums[present] / found.counts[present, None]
    within = (found.gram - means.T @ found.sums[present]).float()
    if not positive(within, SLACK * max(float(found.gram.diagonal().max()), 1.0)):
        return "scatter and sums contradict each other: no images have these class means and these covariances"
    return None
