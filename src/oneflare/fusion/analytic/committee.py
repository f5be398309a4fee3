"""Classifiers of different features of the same images, weighed by what the sums say of each and averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oneflare.fusion.analytic.solver import LinearClassifier

ALIKE = 0.5
"""the correlation of the errors of two members, chosen on held-out training images (docs/analytic.md)"""


def shares(cosines: Sequence[float]) -> Tensor:
    """The weights `(K,)` of members, which add up to 1.

    cosines: between each member's scores of left-out images and the labels

    Scores of unit length are g_k = c_k y + s_k e_k with s_k = sqrt(1 - c_k^2). Errors e_k of two members are about the
    same images and therefore related, with a correlation rho that the sums of separate blocks do not tell; it is taken
    as `ALIKE`. The weights of the best linear combination are then diag(1/s) (rho + (1 - rho) I)^-1 (c/s), here without
    negative ones: a member that is much worse than the others has nothing to add, one that is as good counts as much.
    """
    c = torch.tensor([min(max(cosine, 1e-6), 1 - 1e-6) for cosine in cosines], dtype=torch.float64)
    s = (1 - c * c).sqrt()
    related = ALIKE + (1 - ALIKE) * torch.eye(len(c), dtype=torch.float64)
    weights = (torch.linalg.solve(related, c / s) / s).clamp(min=0)
    found: Tensor = weights / weights.sum()
    return found


def committee(members: Sequence[LinearClassifier]) -> LinearClassifier:
    """The weighed mean of the scores of classifiers of different features, as one classifier of all of them in a row.

    `shares` are those of scores of one length, so each member's are brought to the length that they have on average.
    """
    if len(members) == 1:
        return members[0]
    weights = shares([member.cosine for member in members])
    lengths = torch.tensor([max(member.spread, 1e-12) for member in members], dtype=torch.float64)
    factors = (weights * (weights @ lengths) / lengths).float()
    weight = torch.cat([factor * member.weight for factor, member in zip(factors, members, strict=True)])
    bias = torch.stack([factor * member.bias for factor, member in zip(factors, members, strict=True)]).sum(0)
    ridge = max(member.ridge for member in members)
    return LinearClassifier(weight, bias, ridge, shares=tuple(weights.tolist()))
