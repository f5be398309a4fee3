"""Sums of products in a few bits each: decorrelated, rounded to a step of the size of chance, and Rice coded.

The scatter S of a client's n images is sent as whole numbers Q with u Q = A S A^T to rounding, where A is a change of
features that all members know (`oneflare.nn.decorrelation`). After it most images have features that hardly correlate,
so that the numbers are small, and the largest of what remains is sent apart (`oneflare.upload.words`). A product of two
such features is known to about sqrt(n) in any case, because the images are a sample; the step u is about `FINENESS` of
that.

Rounding moves a number by at most u/2, so A S A^T by at most D u/2 in the spectral norm; since the errors of so many
numbers are unrelated, it is about u sqrt(D/3) and `_slack` allows for twice that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from oneflare.nn import build_feature_map
from oneflare.nn.decorrelation import Decorrelation
from oneflare.upload.factors import equivalent_step, factor_of, factor_slack
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.rice import rows_bits
from oneflare.upload.symmetric import SLACK, positive, triangle_size, unpack_symmetric, upper_values
from oneflare.upload.words import (
    HEADER,
    PER_OCTAVE,
    STEPS,
    Parsed,
    Rows,
    logarithm_of,
    rows_apart,
    step_of,
    with_rest,
)

SCATTER, SUMS, COUNTS = "scatter", "sums", "counts"
FINENESS = {"coarse": 1 / 2, "fine": 1 / 64}
"""of sqrt(n): the step in which decorrelated products are counted"""
WHOLE = "whole"
"""sums of whole numbers, which are not rounded (`oneflare.upload.whole`)"""
CODED = frozenset({*FINENESS, WHOLE})
BITS = {"coarse": 5.0, "fine": 9.0, WHOLE: 10.8}
"""of a product, for which a map is planned where a limit is given; the step grows where that is not enough"""
WHOLE_BLOCK = 1500
"""features of a block, beyond which whole sums need fewer bits, because more is foretold"""
WHOLE_SAVED = 0.75
"""bits that each doubling of the block saves"""
PRODUCT_BITS = {"float32": 32.0, "int16": 16.0, "int12": 12.0, **BITS}
"""of a product, for each way of sending it"""
SAMPLED = 16
RIDGE = 0.03
"""of the decorrelation"""
FACTOR_ENTRY = 16.0
"""equivalent steps that no entry of the products of a rounded factor is off"""


def coder_of(feature_map: Mapping[str, Any], channels: int, size: int) -> Decorrelation:
    """The change of features under which sums of the features of this map are sent."""
    return _coder(json.dumps(feature_map, sort_keys=True), channels, size)


@lru_cache(maxsize=2)
def _coder(spec: str, channels: int, size: int) -> Decorrelation:
    return Decorrelation.of(build_feature_map(json.loads(spec), channels, size), channels, size, RIDGE)


def planned_bits(dtype: str, block: int) -> float:
    """Of a product in a block of so many features; for whole sums, 0.1 more than 6,490 images of SVHN needed."""
    saved = WHOLE_SAVED * math.log2(max(block / WHOLE_BLOCK, 1.0)) if dtype == WHOLE else 0.0
    return BITS[dtype] - saved


def coded(packed: Mapping[str, Tensor], coder: Decorrelation, dtype: str, room: int | None = None) -> dict[str, Tensor]:
    """Packed statistics in float32, with their scatter in code: the products, or the factor that they hold.

    room: bytes that the code may have; the step is then the finest that fits, from that of `fine` on
    """
    rows = factor_of(packed)
    if rows is not None:
        return {**packed, SCATTER: _coded_factor(coder.changed(rows.float()), packed, dtype, room)}
    images = int(packed[COUNTS].sum())
    words = coded_products(unpack_symmetric(packed[SCATTER], torch.float32), images, coder, dtype, room)
    return {**packed, SCATTER: words}


def coded_products(scatter: Tensor, images: int, coder: Decorrelation, dtype: str, room: int | None = None) -> Tensor:
    """The words of the scatter `(D, D)` of so many images, whose upper triangle counts; the rest as in `coded`."""
    products = coder.decorrelate(scatter)
    chance = math.sqrt(max(images, 1))
    rows = rows_apart(products, chance)
    step = logarithm_of(FINENESS[dtype if room is None else "fine"] * chance)
    if room is not None:
        step = _fitting(rows.left_of(products), step, room - 8 * (HEADER + len(rows.code)))
    while True:
        words = with_rest(rows, products, step)
        if room is None or 8 * len(words) <= room or step == STEPS[-1]:
            return words
        step += 1


def _fitting(left: Tensor, step: int, room: int) -> int:
    """The logarithm of about the finest step from this one on with which the code of what rows leave fits."""
    numbers = triangle_size(len(left))
    while step < STEPS[-1]:
        excess = estimated_bytes(left, step_of(step)) - room
        if excess <= 0:
            break
        step += max(1, math.floor(PER_OCTAVE * 8 * excess / numbers))  # a number has a bit fewer for each octave
    return min(step, STEPS[-1])


def _coded_factor(rows: Tensor, packed: Mapping[str, Tensor], dtype: str, room: int | None) -> Tensor:
    """The words of a factor `(r, D)`, whose step w makes products as certain as the agreed step does."""
    wanted = FINENESS[dtype if room is None else "fine"] * math.sqrt(max(float(packed[COUNTS].sum()), 1.0))
    size = float(rows.square().sum(0).mean())
    step = logarithm_of(wanted / math.sqrt(max(2 * size, 1e-12)))
    while True:
        words = Rows((rows / step_of(step)).round(), step).words()
        if room is None or 8 * len(words) <= room or step == STEPS[-1]:
            return words
        step += 1


def parsed(packed: Mapping[str, Tensor]) -> Parsed:
    """What the words of products say; a ValueError where they are no code."""
    dim, images = packed[SUMS].shape[1], int(packed[COUNTS].sum())
    found = Parsed.of(packed[SCATTER], dim, max(dim // 2, 1))
    if found.step is None and len(found.rows.whole) > max(images - 1, 1):
        raise ValueError(f"a factor has {len(found.rows.whole)} rows")
    return found


def estimated_bytes(products: Tensor, step: float) -> float:
    """About how long the code is, from one row in `SAMPLED`."""
    rows = products[SAMPLED // 2 :: SAMPLED]
    kept = (torch.arange(SAMPLED // 2, len(products), SAMPLED)[:, None] <= torch.arange(len(products))).sum()
    if int(kept) == 0:
        return 0.0
    whole = (rows / step).round_()
    bits = rows_bits([row[place * SAMPLED + SAMPLED // 2 :] for place, row in enumerate(whole)])
    return bits / 8 / int(kept) * triangle_size(len(products))


def plain(packed: Mapping[str, Tensor], coder: Decorrelation) -> dict[str, Tensor]:
    """Packed statistics in float32 of those in code."""
    products, _ = decoded(packed)
    restored = coder.restore(products)
    return {**packed, SCATTER: upper_values(restored)}


def decoded(
    packed: Mapping[str, Tensor], dtype: torch.dtype = torch.float64, into: Tensor | None = None
) -> tuple[Tensor, float]:
    """u Q `(D, D)` and u; a ValueError where the words are no code. float32 is exact below 2^24 steps

    Of a factor alone they are its products, and the u that is as uncertain as its w.
    into: a matrix of this type that may be overwritten, because new memory takes as long as decoding
    """
    dim, found = packed[SUMS].shape[1], parsed(packed)
    products = found.products_into(torch.empty(dim, dim, dtype=dtype) if into is None else into)
    return products, _certainty(found)


def decoded_step(packed: Mapping[str, Tensor]) -> float:
    """u, which the first word says where products follow; the rows need not be read for it"""
    words = packed[SCATTER]
    if len(words) and int(words[0]) in STEPS:
        return step_of(int(words[0]))
    return _certainty(parsed(packed))


def _certainty(found: Parsed) -> float:
    return equivalent_step(found.factor, found.rows.width) if found.step is None else found.step


def rounding_variance(steps: Sequence[float]) -> float:
    """Of each entry of the sum of so many clients' products: u^2/12 for each."""
    return sum(step**2 for step in steps) / 12


def rounding_eigenvalue(steps: Sequence[float], dim: int) -> float:
    """About the largest eigenvalue of what rounding to these steps adds to the sum of so many clients' products.

    A symmetric matrix of unrelated entries of variance s^2 has eigenvalues up to 2 s sqrt(D) (Wigner 1955).
    """
    return 2 * math.sqrt(dim * rounding_variance(steps))


def changed_sums(
    packed: Mapping[str, Tensor], coder: Decorrelation, into: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """G `(D, D)`, b `(C, D)` and n `(C,)` of z = A phi, float64, of packed statistics in code.

    into: a matrix that may be overwritten for G
    """
    products, _ = decoded(packed, into=into)
    sums, counts = coder.changed(packed[SUMS].double()), packed[COUNTS].double()
    mean = sums.sum(0)
    return products.addr_(mean, mean / max(float(counts.sum()), 1.0)), sums, counts


def code_complaint(packed: Mapping[str, Tensor], limits: FeatureLimits, coder: Decorrelation) -> str | None:
    """What no images could give, in coded sums whose class sums are possible; None if nothing is."""
    dim = packed[SUMS].shape[1]
    try:
        found = parsed(packed)
        products, step = found.products_into(torch.empty(dim, dim)), _certainty(found)
    except ValueError as error:
        return f"scatter is not in the code of sums: {error}"
    counts, sums = packed[COUNTS].double(), packed[SUMS].double()
    n, present = float(counts.sum()), counts > 0
    mean = sums.sum(0) / n
    factored = found.step is None
    variances, moved = _variances(products, FACTOR_ENTRY * step if factored else step, coder)
    most = n * ((limits.high - mean).clamp(min=0) * (mean - limits.low).clamp(min=0))  # Bhatia and Davis 2000
    excess = variances > (1 + SLACK) * most + moved + SLACK * n * (limits.high - limits.low).square()
    if bool(excess.any()):
        worst = int((variances / n).where(excess, torch.zeros(())).argmax())
        return f"scatter has a variance of {float(variances[worst]) / n:.3g}, more than its feature can have"
    offsets = coder.changed((sums[present] / counts[present, None] - mean).float())
    slack = _slack(products.diagonal(), step)
    if factored:
        slack += factor_slack(len(found.rows.whole), products, found.rows.width)
    within = products.sub_(offsets.T @ (counts[present, None].float() * offsets))
    if not positive(within, slack):
        return "scatter and sums contradict each other: no images have these class means and these covariances"
    return None


def _variances(products: Tensor, step: float, coder: Decorrelation) -> tuple[Tensor, Tensor]:
    """S_ii, and how far rounding by half a step can have moved it, both `(D,)`"""
    found, moved, start = [], [], 0
    for back in coder.backward:
        end = start + len(back)
        wide = back.double()
        found.append(((wide @ products[start:end, start:end].double()) * wide).sum(1))
        moved.append(0.5 * step * wide.abs().sum(1).square())
        start = end
    return torch.cat(found), torch.cat(moved)


def _slack(diagonal: Tensor, step: float) -> float:
    """By how much the least eigenvalue may lie below 0 through rounding, here and in single precision."""
    return step * (1 + math.sqrt(4 * len(diagonal) / 3)) + SLACK * max(float(diagonal.max()), 0.0)
