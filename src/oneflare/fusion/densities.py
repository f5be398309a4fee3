"""The members' densities by class and of the background, made from the evidence in their uploads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.errors import MemberFault
from oneflare.fusion.base import UploadSet
from oneflare.models.rules.density import FREEDOM, Gaussians
from oneflare.nn.network import signed_root
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY, DENSITY_MEANS, WITHIN, unpack_symmetric

SHRINKAGE = 0.5
"""least weight of the multiple of the identity in every covariance; chosen on training images that nobody trained on"""
PRIOR_IMAGES = 1.0
"""images that the background's variance counts for in a member's covariance within classes"""
LEAST_USUAL = 0.05
"""of d: where members' own images have a smaller ratio, networks know too little for a ratio to be called unusual"""
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
    rho = oracle_shrinkage(covariance, images).clamp(min=least)[:, None, None]
    mean = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return (1 - rho) * covariance + rho * mean * torch.eye(covariance.shape[1], dtype=covariance.dtype)


@dataclass(frozen=True)
class MemberDensities:
    """Of N members over C classes, in d dimensions; counts and covariances are as the members claim them."""

    classes: Gaussians
    background: Gaussians
    held: Tensor
    """`(N, C)` whether the member has an image of the class"""
    means: Tensor
    """`(N, C, d)` of u by class"""
    offset: Tensor
    """`(N, C, d)` from the background's mean to the class means"""
    pooled: Tensor
    """`(N, d, d)` covariance within classes, before it is shrunk"""

    def ratios(self, member: int, features: Tensor) -> Tensor:
        """r of one member, without any bound, `(n, d)` raw features -> `(n, C)`"""
        roots = signed_root(features)
        return self.classes.log_densities(member, roots) - self.background.log_densities(member, roots)

    @property
    def own(self) -> Tensor:
        """`(N,)` the ratio of a member's own images, by what it claims of them; the mean over its classes, or 0.

        Around its mean m an image of class c has the covariance S_0 (`pooled`), so E|W(u - m)|^2 = tr(W S_0 W^T) under
        the class's density and E|V(u - b)|^2 = tr(V S_0 V^T) + |V(m - b)|^2 under the background's, V^T V = B^-1. The
        ratio is taken at these squared distances.
        """
        inside, outside = self.classes.whitening.double(), self.background.whitening.double()
        near = (inside @ self.pooled * inside).sum((1, 2))[:, None]
        far = (outside @ self.pooled * outside).sum((1, 2))[:, None]
        far = far + torch.einsum("nij,ncj->nci", outside, self.offset).square().sum(2)
        half = (FREEDOM + inside.shape[1]) / 2
        known = self.classes.level - half * torch.log1p(near / (FREEDOM * self.classes.spread))
        unknown = self.background.level - half * torch.log1p(far / FREEDOM)
        ratios = (known - unknown) * self.held
        own: Tensor = ratios.sum(1) / self.held.sum(1).clamp(min=1)
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


def member_densities(uploads: UploadSet, shrinkage: float = SHRINKAGE) -> MemberDensities:
    """The densities of every member, from its evidence `density`."""
    parts = [upload.evidence(DENSITY) for upload in uploads]
    means, middle = (torch.stack([part[name].double() for part in parts]) for name in (DENSITY_MEANS, BACKGROUND_MEAN))
    within, behind = (torch.stack([unpack_symmetric(part[name]) for part in parts]) for name in (WITHIN, BACKGROUND))
    images, held = uploads.counts.sum(1), uploads.counts > 0
    dim = means.shape[2]
    variance = behind.diagonal(dim1=1, dim2=2).mean(1)
    for upload, usual in zip(uploads, variance.tolist(), strict=True):
        if not usual > 0:
            raise MemberFault(upload.client, f"{upload.path}: its network answers every background image alike")
    degrees = (images - held.sum(1)).clamp(min=0)
    prior = PRIOR_IMAGES * variance[:, None, None] * torch.eye(dim, dtype=torch.float64)
    pooled = (images[:, None, None] * within + prior) / (degrees + PRIOR_IMAGES)[:, None, None]
    spread = 1 + 1 / uploads.counts.clamp(min=1)  # of a new image around a mean of n
    classes = Gaussians.of(means, shrunk(pooled, degrees + PRIOR_IMAGES, shrinkage), spread)
    background = Gaussians.of(middle[:, None], shrunk(behind, images, shrinkage), torch.ones_like(spread[:, :1]))
    return MemberDensities(classes, background, held, means, means - middle[:, None], pooled)
