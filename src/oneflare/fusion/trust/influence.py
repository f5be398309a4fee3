"""A bound on the influence of one member on one class."""

from __future__ import annotations

import torch
from torch import Tensor

HALVINGS = 60
MANY_IMAGES = 10
"""of a class, from which on a member counts among those that bound each other"""
LEAST_HOLDERS = 3
"""members with many images of a class, below which nobody is bound: of two, neither outvotes the other"""


def capped_influence(counts: Tensor, share: float) -> Tensor:
    """Claims `(N, C)` of images with no member above `share` of a class's sum, where several hold it.

    The largest claims of a class are cut to the common height h at which h = share * sum_i min(n_i, h), found by
    bisection. With k holders no share below 1/k is possible: then all count the same. Whoever holds a class alone
    keeps it.
    """
    claims = counts.double()
    holders = (claims > 0).sum(0)
    allowed = torch.maximum(torch.full_like(claims[0], share), 1 / holders.clamp(min=1))
    low = claims.where(claims > 0, torch.inf).amin(0)
    high = claims.amax(0)
    low = torch.minimum(low, high)  # a class that nobody holds
    fits = high <= allowed * claims.sum(0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = middle <= allowed * torch.minimum(claims, middle).sum(0)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.where(fits, claims, torch.minimum(claims, low))


def capped_say(counts: Tensor, share: float | None) -> Tensor:
    """sqrt(n_ic) `(N, C)`, with no member of `MANY_IMAGES` above `share` of what all such members have together.

    Members with fewer images are neither cut nor counted: a member that alone has many images of a class would
    otherwise be cut down to those that have one or two. Classes that fewer than `LEAST_HOLDERS` have many images of
    stay as they are. share: None for no bound.
    """
    say = counts.sqrt()
    if share is None:
        return say
    many = counts >= MANY_IMAGES
    many = many & (many.sum(0) >= LEAST_HOLDERS)
    return torch.where(many, capped_influence(say * many, share).to(say.dtype), say)
