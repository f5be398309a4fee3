"""Finds false densities: members whose ratios win on images that show nothing, or that contradict their own networks.

A density ratio compares a class with a member's own background, and a member states both itself. Whoever moves its
background away, or makes it very wide or very narrow, is louder than everybody about every image. The server knows
images of which nobody knows anything (`probes`): there, an honest member's ratio is far below what it is on its own
images.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.fusion.base import UploadSet
from oneflare.fusion.densities import MemberDensities, member_densities, projected_means
from oneflare.fusion.spreads import compared

LEAST_MEMBERS = 3
"""with fewer there is no majority that could be right"""
KNOWN = 1.25
"""how many times the ratio that is usual for members' own images a picture that shows nothing may have: honest members
of few classes, whose networks take most blobs for one of them, were seen at 0.8, and lies that do harm from 1.6 on"""
FIT = 2 / 3
"""least agreement of a member's class means with its own prototypes, as a part of the median member's"""
LOOSE_FIT = 0.4
"""the same for a member that agrees well enough on the classes that it knows well: honest members that have a few
images of several other classes were seen at 0.6"""
ENOUGH = 10
"""images of a class that is known well: the mean of fewer says little, and its prototype is hardly trained"""
FAR = 20.0
"""how many times the median member's a member's spread may be, and the reverse (`oneflare.fusion.spreads`): of honest
members with 20 images or more it was between 1/7 and 7.4. Whoever says more denies its classes wherever others see
them, or has them everywhere"""
LEAST_FIT = 0.5
"""of the median member, below which nobody is judged: the networks are hardly trained"""


def knows_nothing(densities: MemberDensities, features: Tensor) -> Tensor:
    """`(N,)` each member's median over the probes of its largest ratio; features `(N, probes, d)`."""
    found = []
    for member, held in enumerate(densities.held):
        ratios = densities.ratios(member, features[member])[:, held]
        found.append(ratios.amax(1).median() if bool(held.any()) else torch.tensor(-torch.inf))
    return torch.stack(found)


def fit(means: Tensor, prototypes: Tensor) -> float | None:
    """How well class means of u agree with the prototypes of the same network, in [-1, 1]; None for a single class.

    means, prototypes: `(K, d)` of the classes that the member has. With L the cosines of u|u| and the prototypes, its
    rows' and columns' means removed: tr L / (|L| sqrt(K - 1)), which is 1 where L is a multiple of the centring matrix.
    """
    if len(means) < 2:
        return None
    cosines = F.normalize(means * means.abs(), dim=1).double() @ F.normalize(prototypes.double(), dim=1).T
    centred = cosines - cosines.mean(0) - cosines.mean(1, keepdim=True) + cosines.mean()
    return float(centred.trace() / (centred.norm() * (len(means) - 1) ** 0.5).clamp(min=1e-12))


def false_densities(uploads: UploadSet, features: Tensor, densities: MemberDensities | None = None) -> dict[int, str]:
    """Client -> why its densities cannot be those of an honest member; nobody where half or more would be named.

    features: `(N, probes, d)` of the probes, finite, and before a projection that widens them, where densities are
    measured; densities: of the same members, if they are known already.
    """
    if not {"density", "counts"} <= uploads.offered or len(uploads) < LEAST_MEMBERS:
        return {}
    densities = member_densities(uploads) if densities is None else densities
    found = {**_implausible(uploads, densities), **_contradicting(uploads, densities), **_too_sure(densities, features)}
    if 2 * len(found) >= len(uploads):
        return {}
    return {uploads.uploads[row].client: reason for row, reason in found.items()}


def _too_sure(densities: MemberDensities, features: Tensor) -> dict[int, str]:
    usual = densities.usual
    if usual is None:
        return {}
    parts = (knows_nothing(densities, features) / usual).tolist()
    return {
        row: f"its density ratio of pictures that show nothing is {part:.2g} times the usual one of members' own images"
        for row, part in enumerate(parts)
        if not part <= KNOWN
    }


def _implausible(uploads: UploadSet, densities: MemberDensities) -> dict[int, str]:
    images = [upload.samples for upload in uploads]
    spreads = compared(densities.spreads, images, densities.held.sum(1).tolist())
    what = {"its images of one class are": spreads.within, "its background pictures are": spreads.background}
    return {
        row: f"{words} said to differ {float(parts[row]):.2g} times as much as usual"
        for words, parts in what.items()
        for row in range(len(uploads))
        if not 1 / FAR <= float(parts[row]) <= FAR
    }


def _contradicting(uploads: UploadSet, densities: MemberDensities) -> dict[int, str]:
    """Judged over all classes that a member has, and more loosely if it agrees on those that it knows well."""
    fits: dict[int, float | None] = {}
    of_known: dict[int, float | None] = {}
    enough = uploads.counts >= ENOUGH
    for row, (upload, held) in enumerate(zip(uploads, densities.held, strict=True)):
        if upload.prototypes is not None:
            means, prototypes = projected_means(densities.means[row, held], upload, uploads), upload.prototypes[held]
            well = enough[row, held]
            fits[row] = fit(means, prototypes)
            of_known[row] = fit(means[well], prototypes[well]) if int(well.sum()) >= 2 else fits[row]
    median, usual = _median(fits), _median(of_known)
    if median < LEAST_FIT:
        return {}
    agreeing = {row for row, value in of_known.items() if value is not None and value >= FIT * usual}
    return {
        row: f"its class means agree with its own prototypes by {value:.2f} where {median:.2f} is usual"
        for row, value in fits.items()
        if value is not None and not value >= (LOOSE_FIT if row in agreeing else FIT) * median
    }


def _median(fits: Mapping[int, float | None]) -> float:
    """0 where there are too few members to have a usual value"""
    known = [value for value in fits.values() if value is not None]
    return float(torch.tensor(known).median()) if len(known) >= LEAST_MEMBERS else 0.0
