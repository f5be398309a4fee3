"""Finds members that exchanged classes, by comparing what members that share classes say of them; no image is needed.

Members' networks are compared by pictures that each of them knows (`pictures`), members' statistics by their class
means. Both give one number for member i, member j and classes a and b: how far i finds j's class a to be a rather than
b, where 1 is as far as its own. Whoever exchanged a and b has the opposite sign for everybody who did not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.fusion.base import UploadSet
from oneflare.fusion.densities import member_densities
from oneflare.fusion.trust.pictures import answers
from oneflare.fusion.trust.sums import IMAGES_PER_DIMENSION, RIDGE, block_sketches
from oneflare.upload.statistics import G_B_N

LEAST_IMAGES = 10
"""of a class, below which a member is neither judged on it nor heard about it"""
DISAGREEMENT = 0.15
"""agreement below minus this is a contradiction. In the 32 honest federations of digits that it was chosen on, the
lowest of 1,314 agreements was -0.01, and 99 of 100 were above 0.12"""
LARGEST_GROUP, LEAST_GROUP = 64, 4
ENTRIES = 2e7
"""numbers in one comparison: the square of members times classes"""


@dataclass(frozen=True)
class Exchange:
    """Two classes that one of these members calls by each other's names."""

    members: tuple[int, ...]
    """rows of the members; more than one where nobody else can say which of them it is"""
    classes: tuple[int, int]
    agreement: float
    """of the first of them with all others, from -1 to 1 as a rule"""
    against: tuple[int, ...]
    """rows of the members that they contradict"""


def picture_views(answered: Tensor) -> Tensor:
    """`(N, N, C, C)` e_ij,ab = (t_a - t_b) / s, with t what i answers to j's pictures of a, and s half of what the same
    difference is for i's own pictures of a and of b together; answered: as `pictures.answers` has them."""
    own = answered.diagonal(dim1=0, dim2=1).permute(2, 0, 1)
    margin = own.diagonal(dim1=1, dim2=2)[:, :, None] - own
    scale = (margin + margin.transpose(1, 2)) / 2
    views = (answered.diagonal(dim1=2, dim2=3)[..., None] - answered) / scale[:, None]
    return torch.where(scale[:, None] > 0, views, torch.nan)


def mean_views(means: Tensor, within: Tensor) -> Tensor:
    """`(N, N, C, C)` e_ij,ab = (m_ja - (m_ia + m_ib)/2)^T S^-1 (m_ia - m_ib) / (|m_ia - m_ib|^2 / 2), squares in S^-1.

    This is 1 for i's own mean of a and -1 for its own mean of b. means: `(N, C, k)`; within: `(k, k)` S
    """
    ridge = RIDGE * within.diagonal().mean().clamp(min=1e-30)
    inverse = torch.linalg.pinv(within + ridge * torch.eye(len(within), dtype=within.dtype), hermitian=True)
    apart = (means[:, :, None] - means[:, None]) @ inverse
    square = (apart * (means[:, :, None] - means[:, None])).sum(3)
    middle = (apart * (means[:, :, None] + means[:, None]) / 2).sum(3)
    views = (torch.einsum("iabk,jak->ijab", apart, means) - middle[:, None]) / (square / 2)[:, None]
    return torch.where(square[:, None] > 0, views, torch.nan)


@dataclass(frozen=True)
class Agreement:
    """Views of members on each other's classes, and what follows from them.

    views: `(N, N, C, C)`, of the asked member on the giver's first class against the second, NaN where there is none.
    judged: `(N, C)` the classes that count.
    """

    views: Tensor
    judged: Tensor

    @classmethod
    def of(cls, views: Tensor, judged: Tensor) -> Agreement:
        """Without a member's views of itself, of classes that it does not have, and of pictures that nobody gave."""
        both = judged[:, :, None] & judged[:, None, :]
        known = both[:, None] & judged[None, :, :, None] & ~torch.eye(len(judged), dtype=torch.bool)[..., None, None]
        return cls(torch.where(known, views, torch.nan), judged)

    def without(self, rows: Sequence[int]) -> Agreement:
        """The same as if some members had sent nothing."""
        views, judged = self.views.clone(), self.judged.clone()
        views[list(rows)] = torch.nan
        views[:, list(rows)] = torch.nan
        judged[list(rows)] = False
        return Agreement(views, judged)

    @property
    def pairs(self) -> Tensor:
        """`(N, N, C, C)` (e_ij,ab + e_ij,ba) / 2: i on both classes of j, where j has both."""
        return (self.views + self.views.transpose(2, 3)) / 2

    @property
    def overall(self) -> Tensor:
        """`(N, C, C)` how far a member agrees with the others on two classes, NaN where that cannot be said.

        The mean of what it says of others, (mean_j e_ij,ab + mean_j e_ij,ba) / 2, and, where others have both classes,
        of what they say of it, mean_j (e_ji,ab + e_ji,ba) / 2.
        """
        said = self.views.nanmean(1)
        said = (said + said.transpose(1, 2)) / 2
        heard = self.pairs.nanmean(0)
        return torch.where(heard.isnan() | said.isnan(), said, (said + heard) / 2)

    def contradicted(self, row: int, first: int, second: int) -> list[int]:
        """Members with whom this one disagrees on two classes, by what each says of the other."""
        seen = torch.stack(
            [
                view[:, a, b]
                for view in (self.views[row], self.views[:, row])
                for a, b in ((first, second), (second, first))
            ]
        ).nanmean(0)
        found: list[int] = (seen < -DISAGREEMENT).nonzero().flatten().tolist()
        return found


def exchanges(agreement: Agreement) -> Iterator[Exchange]:
    """Contradictions, the worst first; after each, the rest is judged as if those in it had sent nothing.

    Of the members that disagree on two classes, the one that contradicts the most others is named. Where several
    contradict as many, nobody knows which of them it is, and all of them are.
    """
    while True:
        overall = agreement.overall
        known = torch.ones(overall.shape[1:], dtype=torch.bool).triu(1) & ~overall.isnan()
        overall = torch.where(known, overall, torch.inf)
        worst = overall.flatten(1).argmin(1)
        row = int(overall.flatten(1).gather(1, worst[:, None]).argmin())
        first, second = divmod(int(worst[row]), overall.shape[2])
        if not float(overall[row, first, second]) < -DISAGREEMENT:
            return
        rows = (overall[:, first, second] < -DISAGREEMENT).nonzero().flatten().tolist()
        against = {one: agreement.contradicted(one, first, second) for one in rows}
        most = max(len(others) for others in against.values())
        named = sorted(
            (one for one in rows if len(against[one]) == most), key=lambda one: float(overall[one, first, second])
        )
        others = sorted({other for one in named for other in against[one]} - set(named))
        yield Exchange(tuple(named), (first, second), float(overall[named[0], first, second]), tuple(others))
        agreement = agreement.without(named)


def agreements(uploads: UploadSet) -> Iterator[Agreement]:
    """How far members agree by their statistics and by their networks, as far as their uploads hold these."""
    contract, plan = uploads.contract, uploads.contract.statistics
    if plan is not None and plan.privacy is None and G_B_N in uploads.offered and not contract.masked:
        for sketches in block_sketches(uploads):
            counts = torch.stack([sketch.counts for sketch in sketches])
            dims = min(sketches[0].means.shape[1], int(counts.sum()) // IMAGES_PER_DIMENSION)
            if dims:
                means = torch.stack([sketch.means[:, :dims] for sketch in sketches])
                within = torch.stack([sketch.within[:dims, :dims] for sketch in sketches]).mean(0)
                yield Agreement.of(mean_views(means, within), counts >= LEAST_IMAGES)
    if contract.deep and contract.image.backbone is None and {"density", "counts"} <= uploads.offered:
        judged = uploads.counts >= LEAST_IMAGES
        yield Agreement.of(picture_views(answers(uploads, member_densities(uploads), judged)), judged)


def comparable(uploads: UploadSet) -> bool:
    """Whether these uploads hold what members can be compared by."""
    plan = uploads.contract.statistics
    sums = plan is not None and plan.privacy is None and G_B_N in uploads.offered and not uploads.contract.masked
    pictures = uploads.contract.deep and uploads.contract.image.backbone is None
    return len(uploads) > 1 and (sums or (pictures and {"density", "counts"} <= uploads.offered))


def groups(uploads: UploadSet) -> Iterator[UploadSet]:
    """The members in groups that are compared with each other: all of them, unless they and their classes are many."""
    size = max(LEAST_GROUP, min(LARGEST_GROUP, int(ENTRIES**0.5) // len(uploads.contract.classes)))
    number = -(-len(uploads) // size)
    for group in range(number):
        yield dataclasses.replace(uploads, uploads=uploads.uploads[group::number])


def find_exchanges(uploads: UploadSet) -> Iterator[tuple[UploadSet, Exchange]]:
    """Classes that members call by each other's names, and the group of members that each was found in."""
    for group in groups(uploads):
        seen = set()
        for agreement in agreements(group):
            for exchange in exchanges(agreement):
                if exchange.members not in seen:
                    seen.add(exchange.members)
                    yield group, exchange


def alone(counts: Tensor) -> dict[int, list[int]]:
    """Row of a member -> its classes of which nobody else has enough images, so that nobody can contradict it.

    counts: `(N, C)`
    """
    judged = counts >= LEAST_IMAGES
    only = judged & (judged.sum(0) == 1)
    return {row: labels.nonzero().flatten().tolist() for row, labels in enumerate(only) if bool(labels.any())}
