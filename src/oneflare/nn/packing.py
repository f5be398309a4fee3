"""Finds directions that are as far apart as possible (the Tammes problem in d dimensions)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.nn.optimisers import minimise

SHARPNESS = (4.0, 16.0, 64.0, 256.0, 1024.0, 8192.0)
"""the soft maximum hardens by stages; starting hard would stop at the first bad arrangement"""
STEPS = 60
STARTS = 3
MANY = 256
"""points from which on one start is enough, because all starts end alike, and takes seconds"""


def sphere_packing(points: int, dim: int, generator: torch.Generator) -> Tensor:
    """`(points, dim)` float64 unit rows that minimise the largest cosine; the best of a few seeded starts.

    Beyond `MANY` points there is one start, with fewer steps.

    Minimises log sum_{i<j} exp(b cos_ij) / b for growing b, which tends to max_ij cos_ij.
    """
    starts = STARTS if points <= MANY else 1
    found = [_descend(torch.randn(points, dim, dtype=torch.float64, generator=generator)) for _ in range(starts)]
    return min(found, key=lambda rows: float(_cosines(rows).max()))


def _cosines(rows: Tensor) -> Tensor:
    """All pairs once, `(points (points-1)/2,)`; of many points twice and with -inf for each point and itself.

    Picking half a million pairs takes longer than all of them twice, which changes neither the largest nor the place
    of the least soft maximum.
    """
    gram = rows @ rows.T
    if len(rows) > MANY:
        return gram.masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf).flatten()
    first, second = torch.triu_indices(len(rows), len(rows), offset=1)
    return gram[first, second]


def _descend(start: Tensor) -> Tensor:
    rows = F.normalize(start, dim=1)
    for sharpness in SHARPNESS:
        rows = rows.detach().requires_grad_()
        steps = STEPS if len(start) <= MANY else STEPS // 3

        def soft_maximum(rows: Tensor = rows, sharpness: float = sharpness) -> Tensor:
            return torch.logsumexp(sharpness * _cosines(F.normalize(rows, dim=1)), 0) / sharpness

        minimise(soft_maximum, [rows], steps, tolerance_change=1e-14)
        rows = F.normalize(rows.detach(), dim=1)
    return rows
