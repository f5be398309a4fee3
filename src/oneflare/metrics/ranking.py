"""How well a score separates a class from the others: area under the ROC curve, average precision."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def auroc(scores: Array, positive: Array) -> float:
    """P(score of a positive > score of a negative) + P(equal) / 2, over all pairs (Mann and Whitney 1947)."""
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    m, n = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - m * (m + 1) / 2) / (m * n))


def average_precision(scores: Array, positive: Array) -> float:
    """sum over distinct scores, from the highest, of (recall gained there) (precision down to there)"""
    values, place = np.unique(-scores, return_inverse=True)
    hits = np.bincount(place, weights=positive, minlength=len(values))
    taken = np.cumsum(np.bincount(place, minlength=len(values)))
    return float((hits * np.cumsum(hits) / taken).sum() / positive.sum())
