"""The members' densities by class and of the background, made from the evidence in their uploads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.errors import MemberFault
from oneflare.fusion.base import UploadSet
from oneflare.fusion.spreads import claimed_spreads, spreads_of
from oneflare.models.rules.density import FREEDOM, StudentDensities, room_like
from oneflare.nn.encoders import widened
from oneflare.nn.network import signed_root
from oneflare.upload import Upload
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY, DENSITY_MEANS, WITHIN
from oneflare.upload.symmetric import packed_diagonal, unpack_symmetric

SHRINKAGE = 0.5
"""least weight of the multiple of the identity in every covariance; chosen on training images that nobody trained on"""
PRIOR_IMAGES = 1.0
"""images that the background's variance counts for in a member's covariance within classes"""
LEAST_USUAL = 0.05
"""of d: where members' own images have a smaller ratio, networks know too little for a ratio to be called unusual"""
SHARPNESS, FALL = 2.2, 0.375
"""factor and power of `MemberDensities.sharpness`; chosen on training images of CIFAR-10 and SVHN that nobody trained
on"""
LEAST_TYPICAL = 0.05
"""expected ratio / sqrt(d) below which answers get no surer"""
LEAST_VARIANCE = 1e-30
"""of a background's rooted features, below which the network has answered all of it alike; numbers so small are not
factored alike by all processors"""
FIRM_SHRINKAGE = 0.1
"""least weight of the identity at which a covariance is sure to be factored well in single precision: its condition
number is then at most 10 d"""
BLOCK = 128
"""rows of a triangular matrix that are multiplied at once"""
BOUND = 3.0
"""a ratio counts for at most so many times what is usual for members' own images"""


def oracle_shrinkage(covariance: Tensor, images: Tensor) -> Tensor:
    """OAS (Chen et al. 2010): the weight of the identity that is best for a Gaussian sample of this size.

    rho = (tr S^2 + tr^2 S) / ((n + 1)(tr S^2 - tr^2 S / d)), at most 1: the form for large d, as in scikit-learn.
    `(N, d, d)`, `(N,)` -> `(N,)`
    """
    trace, square = covariance.diagonal(dim1=1, dim2=2).sum(1), covariance.square().sum((1, 2))
    scatter = (square - trace.square() / covariance.shape[1]).clamp(min=1e-30)
    return ((square + trace.square()) / ((images + 1) * scatter)).clamp(0, 1)


def shrunk(covariance: Tensor, images: Tensor, least: float) -> Tensor:
    """(1 - rho) S + rho tr(S)/d I, with the OAS weight but no less than `least`; `(N, d, d)`"""
    rho = oracle_shrinkage(covariance, images).clamp(min=least)[:, None, None].to(covariance.dtype)
    mean = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return (1 - rho) * covariance + rho * mean * torch.eye(covariance.shape[1], dtype=covariance.dtype)


@dataclass(frozen=True)
class MemberDensities:
    """Of N members over C classes, in d dimensions; counts and covariances are as the members claim them."""

    classes: StudentDensities
    background: StudentDensities
    held: Tensor
    """`(N, C)` whether the member has an image of the class"""
    means: Tensor
    """`(N, C, d)` of u by class"""
    expected: Tensor
    """`(N, C)` the ratio of a member's own images of each class, by what it claims of them (`expected_ratios`)"""
    spreads: Tensor
    """`(N, 2)` how far its background and its classes spread, as it claims (`claimed_spreads`)"""

    def take(self, rows: Tensor) -> MemberDensities:
        """Those of some members. rows: `(N,)` whether each is among them"""
        if bool(rows.all()):
            return self
        parts = (self.classes.take(rows), self.background.take(rows))
        return MemberDensities(*parts, self.held[rows], self.means[rows], self.expected[rows], self.spreads[rows])

    def room(self, members: int) -> MemberDensities:
        """Room for so many members like this one, to be filled by `put`."""
        rest = (room_like(value, members) for value in (self.held, self.means, self.expected, self.spreads))
        return MemberDensities(self.classes.room(members), self.background.room(members), *rest)

    def put(self, row: int, one: MemberDensities) -> None:
        """Writes a single member's into a row."""
        self.classes.put(row, one.classes)
        self.background.put(row, one.background)
        for name in ("held", "means", "expected", "spreads"):
            getattr(self, name)[row] = getattr(one, name)[0]

    def ratios(self, member: int, features: Tensor) -> Tensor:
        """r of one member, without any bound, `(n, d)` raw features -> `(n, C)`"""
        roots = signed_root(features)
        return self.classes.log_densities(member, roots) - self.background.log_densities(member, roots)

    @property
    def own(self) -> Tensor:
        """`(N,)` the expected ratio of a member's own images, the mean over its classes, or 0."""
        own: Tensor = (self.expected * self.held).sum(1) / self.held.sum(1).clamp(min=1)
        return own

    @property
    def usual(self) -> float | None:
        """What is usual for members' own images: the median of `own`; None where the networks know too little."""
        median = float(self.own.quantile(0.5))
        return median if math.isfinite(median) and median >= LEAST_USUAL * self.means.shape[2] else None

    @property
    def bound(self) -> float:
        """For how much a ratio counts at most: d, or less where members' own images have far smaller ratios."""
        dim = float(self.means.shape[2])
        return dim if self.usual is None else min(dim, BOUND * self.usual)

    @property
    def sharpness(self) -> float:
        """beta = 2.2 R^(-3/8), with R the median over members and their classes of the expected ratio / sqrt(d).

        An empirical law: the larger the ratios that members expect on their own images, the more of them is owed to
        features that were fitted to these very images, and the less they mean on others.
        """
        if not bool(self.held.any()):
            return 1.0
        typical = float(self.expected[self.held].quantile(0.5)) / self.means.shape[2] ** 0.5
        return float(SHARPNESS * max(typical, LEAST_TYPICAL) ** -FALL)


def expected_ratios(classes: StudentDensities, background: StudentDensities, means: Tensor, within: Tensor) -> Tensor:
    """`(C,)` the ratio of one member's own images of each class, from their moments alone.

    Around its mean m an image of class c has the covariance S_0 (`within`), so E|W(u - m)|^2 = tr(W S_0 W^T) under the
    class's density and E|V(u - b)|^2 = tr(V S_0 V^T) + |V m - V b|^2 under the background's, V^T V = B^-1. The ratio is
    taken at these squared distances. means: `(C, d)`
    """
    inside, outside = classes.whitening[0], background.whitening[0]
    within = within.float()
    near = whitened_trace(inside, within) / classes.spread[0].double()
    apart = means.float() @ outside.T - background.centres[0]
    far = whitened_trace(outside, within) + apart.square().sum(1).double()
    half = (FREEDOM + inside.shape[1]) / 2
    known = classes.level[0].double() - half * torch.log1p(near / FREEDOM)
    ratios: Tensor = known - (background.level[0].double() - half * torch.log1p(far / FREEDOM))
    return ratios


def whitened_trace(whitening: Tensor, covariance: Tensor) -> Tensor:
    """tr(W S W^T) of a lower triangular W, `(d, d)` each; what W has above its diagonal is not multiplied."""
    dim, total = len(whitening), torch.zeros((), dtype=torch.float64)
    for start in range(0, dim, BLOCK):
        end = min(start + BLOCK, dim)
        rows = whitening[start:end, :end]
        total += (rows @ covariance[:end, :end] * rows).sum().double()
    return total


def member_densities(
    uploads: UploadSet, shrinkage: float = SHRINKAGE, spread_cap: float | None = None
) -> MemberDensities:
    """The densities of every member, from its evidence `density`; one member's covariances in memory at a time.

    spread_cap: how many times the median member's spread a member's may be, and the reverse; None for no bound.
    """
    plain = torch.ones(len(uploads), dtype=torch.float64)
    factors = torch.stack(
        (plain, plain) if spread_cap is None else spreads_of(uploads).bounded(spread_cap), dim=1
    ).tolist()
    counts = uploads.counts
    found: MemberDensities | None = None
    for row, upload in enumerate(uploads):
        with upload.blamed():
            one = _one_member(upload, counts[row], shrinkage, factors[row])
        found = one.room(len(uploads)) if found is None else found
        found.put(row, one)
    assert found is not None
    return found


def _one_member(upload: Upload, counts: Tensor, shrinkage: float, factors: Sequence[float]) -> MemberDensities:
    """Those of a single member; factors: of the background's covariance, and of that within classes."""
    part = upload.evidence(DENSITY)
    means, middle = part[DENSITY_MEANS].double(), part[BACKGROUND_MEAN].double()
    dtype = torch.float32 if shrinkage >= FIRM_SHRINKAGE else torch.float64
    behind, within = (
        factor * unpack_symmetric(part[name], dtype)[None]
        for name, factor in zip((BACKGROUND, WITHIN), factors, strict=True)
    )
    variance = factors[0] * float(packed_diagonal(part[BACKGROUND]).double().mean())
    if not variance > LEAST_VARIANCE:
        raise MemberFault(upload.client, f"{upload.path}: its network answers every background image alike")
    images = counts.sum()
    degrees = (images - (counts > 0).sum()).clamp(min=0) + PRIOR_IMAGES
    prior = PRIOR_IMAGES * variance * torch.eye(means.shape[1], dtype=dtype)
    pooled = (images * within + prior) / degrees
    spread = 1 + 1 / counts.clamp(min=1)[None]  # of a new image around a mean of n
    classes = StudentDensities.of(means[None], shrunk(pooled, degrees[None], shrinkage), spread)
    behind = shrunk(behind, images[None], shrinkage)
    background = StudentDensities.of(middle[None, None], behind, torch.ones(1, 1, dtype=torch.float64))
    expected = expected_ratios(classes, background, means, pooled[0])
    spreads = claimed_spreads(part, counts)
    return MemberDensities(classes, background, counts[None] > 0, means[None], expected[None], spreads[None])


def projected_means(means: Tensor, upload: Upload, uploads: UploadSet) -> Tensor:
    """Class means of u `(K, own d)` where the prototypes are, `(K, d)`: after the member's own widening projection."""
    if widened(uploads.template.encoder) is None:
        return means
    state = upload.weights()
    features = (means * means.abs()).double() @ state["project.weight"].double().T + state["project.bias"].double()
    return signed_root(features)
