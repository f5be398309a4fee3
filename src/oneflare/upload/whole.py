"""Sums that are the same to the last bit for every split, because what is added up are whole numbers.

Each image's features are decorrelated and rounded on their own, q = [A phi / w], with the change A that all members
know (`oneflare.nn.decorrelation`) and the width w of `WIDTH`. A member sends

    G = sum q q^T,    b_c = sum of q over class c,    n_c = images of class c,

which are whole numbers and add up without rounding, in any order and however images are split over members. Rounding an
image moves each of its features by at most w/2, with variance w^2/12; unlike rounding a member's sums
(`oneflare.upload.coding`), it does not depend on who holds the image.

Of G is sent by how much it misses what its earlier rows foretell (`oneflare.upload.foretold`), so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.nn import FeatureMap
from oneflare.nn.decorrelation import Decorrelation
from oneflare.upload.foretold import decode_foretold, encode_foretold
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.statistics import COUNTS, SCATTER, SUMS, Statistics
from oneflare.upload.symmetric import SLACK, mirrored_, upper_values

EXACT = 1 << 24
"""below which whole numbers are exact in single precision"""
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
    if float(found.sums.abs().max()) >= EXACT:
        raise ValueError(f"sums over {float(found.counts.sum()):.0f} images are too large to be sent in whole numbers")
    words = encode_foretold(mirrored_(found.gram.double()), _class_rows(found.sums, found.counts))
    return {SUMS: found.sums.float(), COUNTS: found.counts.long(), SCATTER: words}


def whole_sums(packed: Mapping[str, Tensor], into: Tensor | None = None) -> Statistics:
    """The sums of q that were packed, float64; a ValueError where they are no code of such.

    into: a matrix that may be overwritten for G
    """
    sums, counts = packed[SUMS].double(), packed[COUNTS].double()
    dim = sums.shape[1]
    memory = torch.empty(dim, dim, dtype=torch.float64) if into is None else into
    return Statistics(decode_foretold(packed[SCATTER], _class_rows(sums, counts), memory), sums, counts)


def _class_rows(sums: Tensor, counts: Tensor) -> Tensor:
    """b_c / sqrt(n_c) of the classes that have images, whose products are what class means give of G"""
    present = counts > 0
    return sums[present] / counts[present, None].sqrt()


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

    Products that contradict each other or the class means have no code (`Foretold.learn`). limits: of q
    """
    if bool((packed[SUMS] != packed[SUMS].round()).any()):
        return "sums is not in whole numbers"
    try:
        found = whole_sums(packed)
    except ValueError as error:
        return f"scatter is not in the code of sums: {error}"
    n = found.samples
    mean = found.sums.sum(0) / n
    variances = found.gram.diagonal() / n - mean.square()
    most = (limits.high - mean).clamp(min=0) * (mean - limits.low).clamp(min=0)  # Bhatia and Davis 2000
    excess = variances > (1 + SLACK) * most + SLACK * (limits.high - limits.low).square()
    if bool(excess.any()):
        worst = int(variances.where(excess, torch.zeros((), dtype=torch.float64)).argmax())
        return f"scatter has a variance of {float(variances[worst]):.3g}, more than its feature can have"
    return None
