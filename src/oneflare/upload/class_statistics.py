"""The covariances of every class in an upload, which add up over clients like the other statistics.

Of class c a client sends S_c = sum (phi - m_c)(phi - m_c)^T over its own images of c, around its own mean m_c. With
n_c and b_c it gives G_c = S_c + n_c m_c m_c^T, which is summed over clients; G is the sum of all G_c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.nn import check_size
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.statistics import COUNTS, INT16_STEPS, SUMS, Plan, Statistics
from oneflare.upload.symmetric import (
    ROUNDING,
    SLACK,
    correlations,
    positive,
    products_complaint,
    triangle,
    triangle_size,
    unpack_symmetric,
)

CLASS_SCATTER = "class_scatter"
CLASS_SCALE = "class_scatter#scale"


@dataclass(frozen=True)
class ClassStatistics:
    """Additive sums of each class, float64."""

    grams: Tensor
    """`(C, D (D + 1) / 2)` upper triangles of G_c"""
    sums: Tensor
    """`(C, D)` rows b_c"""
    counts: Tensor
    """`(C,)` n_c"""

    def __add__(self, other: ClassStatistics) -> ClassStatistics:
        return ClassStatistics(self.grams + other.grams, self.sums + other.sums, self.counts + other.counts)

    def __sub__(self, other: ClassStatistics) -> ClassStatistics:
        return ClassStatistics(self.grams - other.grams, self.sums - other.sums, self.counts - other.counts)

    def scatter(self, label: int) -> Tensor:
        """S_c `(D, D)`"""
        total = self.sums[label]
        return unpack_symmetric(self.grams[label]) - torch.outer(total, total / max(float(self.counts[label]), 1.0))

    def pooled(self) -> Statistics:
        """G, b and n of all classes together."""
        return Statistics(unpack_symmetric(self.grams.sum(0)), self.sums, self.counts)


def class_layout(plan: Plan, classes: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """name -> shape, whether floating"""
    size = triangle_size(plan.dim)
    check_size(
        f"statistics of {classes} classes with {plan.dim} features each",
        classes * size,
        "choose a map with fewer features, or a fusion that does without class_covariances",
    )
    layout: dict[str, tuple[tuple[int, ...], bool]] = {CLASS_SCATTER: ((classes, size), plan.dtype == "float32")}
    return layout | ({CLASS_SCALE: ((classes, plan.dim), True)} if plan.dtype == "int16" else {})


def pack_classes(phi: Tensor, labels: Tensor, classes: int, dtype: str = "float32") -> dict[str, Tensor]:
    """The tensors of an upload, one class in memory at a time. phi: features `(n, D)`, labels `(n,)`

    float32: S_c itself. int16: correlations within the class, as `oneflare.upload.statistics.pack` does for all.
    """
    dim = phi.shape[1]
    whole = dtype == "int16"
    values = torch.zeros(classes, triangle_size(dim), dtype=torch.int16 if whole else torch.float32)
    scales = torch.zeros(classes, dim)
    mask = triangle(dim)
    for label in labels.unique().tolist():
        own = phi[labels == label].double()
        own = own - own.mean(0)
        scatter = own.T @ own
        if whole:
            scale = scatter.diagonal().sqrt().float()
            inverse = torch.where(scale > 0, 1 / scale.double(), torch.zeros(()))
            scatter = (scatter * inverse[:, None] * inverse * INT16_STEPS).round().clamp(-INT16_STEPS, INT16_STEPS)
            scales[label] = scale
        values[label] = scatter.masked_select(mask).to(values.dtype)
    return {CLASS_SCATTER: values} | ({CLASS_SCALE: scales} if whole else {})


def unpack_classes(packed: Mapping[str, Tensor]) -> ClassStatistics:
    """The statistics of an upload; add them up over clients."""
    sums, counts = packed[SUMS].double(), packed[COUNTS].double()
    dim, mask = sums.shape[1], triangle(sums.shape[1])
    grams = torch.zeros(len(sums), triangle_size(dim), dtype=torch.float64)
    for label in (counts > 0).nonzero().flatten().tolist():
        mean_part = torch.outer(sums[label], sums[label] / counts[label])
        grams[label] = (_class_scatter(packed, label) + mean_part).masked_select(mask)
    return ClassStatistics(grams, sums, counts)


def _class_scatter(packed: Mapping[str, Tensor], label: int) -> Tensor:
    scatter = unpack_symmetric(packed[CLASS_SCATTER][label])
    if CLASS_SCALE in packed:
        scale = packed[CLASS_SCALE][label].double()
        scatter *= scale[:, None] * scale / INT16_STEPS
    return scatter


def class_complaint(packed: Mapping[str, Tensor], limits: FeatureLimits) -> str | None:
    """What no images could give, in covariances whose shapes and types are right; None if nothing is.

    Sums and counts have been checked before (`oneflare.upload.statistics.complaint`).
    """
    counts, sums = packed[COUNTS].double(), packed[SUMS].double()
    if CLASS_SCALE in packed and bool((packed[CLASS_SCALE] < 0).any()):
        return f"{CLASS_SCALE} has a negative deviation"
    for label, count in enumerate(counts.tolist()):
        if count == 0:
            held = (packed[name][label] for name in (CLASS_SCATTER, CLASS_SCALE) if name in packed)
            reason = "covariances of a class without images" if any(bool(t.any()) for t in held) else None
        else:
            scatter, mean = _class_scatter(packed, label), sums[label] / count
            reason = _one_class(scatter, mean, count, limits, entry=2.0**-15 if CLASS_SCALE in packed else ROUNDING)
        if reason is not None:
            return f"{CLASS_SCATTER} has {reason} (class number {label})"
    return None


def _one_class(scatter: Tensor, mean: Tensor, count: float, limits: FeatureLimits, entry: float) -> str | None:
    """entry: what rounding moves a correlation by at most"""
    impossible = products_complaint(scatter)
    if impossible is not None:
        return impossible
    width = limits.high - limits.low
    most = count * ((limits.high - mean).clamp(min=0) * (mean - limits.low).clamp(min=0))  # Bhatia and Davis 2000
    if bool((scatter.diagonal() > (1 + SLACK) * most + SLACK * count * width.square()).any()):
        return "a variance that is more than its feature can have"
    related = correlations(scatter)
    if not positive(related, 2 * (SLACK + len(related) * entry)):
        return "covariances that are not positive semidefinite"
    return None
