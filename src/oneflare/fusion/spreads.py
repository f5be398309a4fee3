"""How far members' densities spread, compared with the other members': what is plausible, and how the rest is bounded.

A member states the covariances of its classes and of its background itself. Both have a natural scale: the background
spreads about as far as the class means are from it, and images of one class spread less than the background. How much
less depends on the network, so a member is compared with the median member. A network that was shown a single class
answers everything almost as it answers that class, so how near its background lies to the class mean says nothing:
only that its background is too narrow can be held against such a member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.fusion.base import UploadSet
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY, DENSITY_MEANS, WITHIN
from oneflare.upload.symmetric import packed_diagonal

LEAST_IMAGES = 20
"""with fewer, a covariance says little: such members are neither judged nor part of the median"""
LEAST_MEMBERS = 3


@dataclass(frozen=True)
class Spreads:
    """Of N members, `(N,)` each, as multiples of the median member's; 1 for members that are not judged."""

    background: Tensor
    """tr B over the mean of |m_c - b|^2 over the member's classes"""
    within: Tensor
    """tr S over tr B"""

    def bounded(self, cap: float) -> tuple[Tensor, Tensor]:
        """Factors by which B and S are multiplied so that both lie between 1/cap and cap times the median member's."""
        background = self.background.clamp(1 / cap, cap) / self.background
        within = self.within / background
        return background, within.clamp(1 / cap, cap) / within


def compared(claims: Tensor, images: Sequence[int], classes: Sequence[int]) -> Spreads:
    """What members claim of their spreads beside the median member's.

    claims: `(N, 2)` as `claimed_spreads` has them; images, classes: how many each member says it has
    """
    found = claims.clamp(min=1e-30)
    judged = torch.tensor([number >= LEAST_IMAGES for number in images])
    if int(judged.sum()) < LEAST_MEMBERS:
        judged = torch.zeros_like(judged)
    usual = found[judged].median(0).values if bool(judged.any()) else torch.ones(2, dtype=torch.float64)
    background, within = torch.where(judged[:, None], found / usual, 1.0).T
    single = torch.tensor([number < 2 for number in classes])
    return Spreads(torch.where(single, background.clamp(max=1.0), background), within)


def spreads_of(uploads: UploadSet) -> Spreads:
    """Of all members, read from their uploads."""
    claims = [claimed_spreads(upload.evidence(DENSITY), upload.counts) for upload in uploads]
    classes = (uploads.counts > 0).sum(1).tolist()
    return compared(torch.stack(claims), [upload.samples for upload in uploads], classes)


def claimed_spreads(part: Mapping[str, Tensor], counts: Tensor | None) -> Tensor:
    """`(2,)` tr B over the mean of |m_c - b|^2 over the classes that a member has, and tr S over tr B.

    part: a member's evidence `density`
    """
    behind, inside = (packed_diagonal(part[name]).double().sum() for name in (BACKGROUND, WITHIN))
    held = torch.ones(len(part[DENSITY_MEANS]), dtype=torch.bool) if counts is None else counts > 0
    apart = (part[DENSITY_MEANS][held] - part[BACKGROUND_MEAN]).double().square().sum(1).mean()
    return torch.stack((behind / apart.clamp(min=1e-30), inside / behind.clamp(min=1e-30)))
