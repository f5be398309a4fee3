"""Accuracy and calibration of one model, from its logits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Bin:
    """The test images whose confidence lies in one interval."""

    count: int
    confidence: float
    """their mean"""
    accuracy: float


@dataclass(frozen=True)
class Scores:
    """All in [0, 1]."""

    accuracy: float
    balanced_accuracy: float
    worst_class: float
    calibration_error: float
    per_class: list[float | None]
    """None for a class without test samples"""
    reliability: list[Bin]
    """the bins of confidence that hold samples"""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def score(logits: Tensor, labels: Tensor) -> Scores:
    """logits `(n, C)`, labels `(n,)`"""
    predicted = logits.argmax(1)
    hit = predicted == labels
    per_class = recall_per_class(hit, labels, logits.shape[1])
    present = [value for value in per_class if value is not None]
    return Scores(
        accuracy=float(hit.double().mean()),
        balanced_accuracy=sum(present) / len(present),
        worst_class=min(present),
        calibration_error=expected_calibration_error(logits.softmax(1), labels),
        per_class=per_class,
        reliability=reliability(logits.softmax(1), labels),
    )


def recall_per_class(hit: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    total = torch.bincount(labels, minlength=classes)
    right = torch.bincount(labels[hit], minlength=classes)
    return [int(r) / int(t) if t else None for r, t in zip(right, total, strict=True)]


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """sum over equal-width bins of (share of samples) |accuracy - mean confidence| (Naeini et al. 2015)"""
    confidence, hit, index = _binned(probabilities, labels, bins)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, hit - confidence)
    return float(gaps.abs().sum() / len(labels))


def reliability(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> list[Bin]:
    """The bins of the expected calibration error: it is the sum of count |accuracy - confidence| over them, over n."""
    confidence, hit, index = _binned(probabilities, labels, bins)
    rows = []
    for number in index.unique().tolist():
        inside = index == number
        rows.append(Bin(int(inside.sum()), float(confidence[inside].mean()), float(hit[inside].mean())))
    return rows


def _binned(probabilities: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence, whether right (0 or 1) and number of the equal-width bin, per sample."""
    confidence, predicted = probabilities.double().max(1)
    hit = (predicted == labels).double()
    return confidence, hit, (confidence * bins).ceil().long().clamp(1, bins) - 1
