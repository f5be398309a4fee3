"""The density ratio: how much likelier a member's feature is for a class than for an image it knows nothing of."""

from __future__ import annotations

import torch
from torch import Tensor

from oneflare.errors import ConfigError, MemberFault
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.trust.suspects import COUNT_CAP, capped, find_suspects
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.density import FREEDOM, DensityRatio, Gaussians
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY, DENSITY_MEANS, WITHIN, unpack_symmetric

SHRINKAGE = 0.5
"""least weight of the multiple of the identity in every covariance; chosen on training images that nobody trained on"""
SHARPNESS, FALL = 2.2, 0.375
"""factor and power of `sharpness`; chosen on training images of CIFAR-10 and SVHN that nobody trained on"""
PRIOR_IMAGES = 1.0
"""images that the background's variance counts for in a member's covariance within classes"""


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


@FUSIONS.register("density_ratio")
class DensityRatioFusion(Fusion):
    """every member speaks about an image as far as its own feature space knows it

    r_ic(x) = log t(u; m_ic, (1 + 1/n_ic) S_i) - log t(u; b_i, B_i) with u the signed root of member i's raw feature, t
    a Student density, m_ic and S_i its class means and covariance, b_i and B_i those of its own images destroyed. The
    answer is the class with the largest mean of r_ic over the members that have it, weighted by sqrt(n_ic).

    Members that do not fit the others are left out and named, as `robust_prototypes` does; no single ratio counts for
    more than d.
    """

    needs = frozenset({"weights", "prototypes", "counts", "density"})

    def __init__(self, *, shrinkage: float = SHRINKAGE, count_cap: float = COUNT_CAP, seed: int = 0) -> None:
        """shrinkage: least weight of the identity in the covariances; count_cap: images that a member may claim, times
        the median member's; seed: of the probes by which members are compared"""
        if not 0 <= shrinkage <= 1:
            raise ConfigError(f"fusion density_ratio.shrinkage: must lie between 0 and 1 (got {shrinkage})")
        if not count_cap >= 1:
            raise ConfigError(f"fusion density_ratio.count_cap: must be at least 1 (got {count_cap})")
        self.shrinkage, self.count_cap, self.seed = shrinkage, count_cap, seed

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        suspects = tuple(find_suspects(uploads, self.seed, self.count_cap))
        kept = uploads.without({suspect.client for suspect in suspects if suspect.left_out})
        parts = densities(kept, believed_counts(kept, self.count_cap), self.shrinkage)
        rule = DensityRatio.of(*parts, sharpness(expected_ratios(kept, *parts[1:3]), kept.counts > 0))
        return Fused(kept.members(rule), suspects=suspects)


def believed_counts(uploads: UploadSet, count_cap: float) -> Tensor:
    """Class counts `(N, C)` of members, with claims to too many images cut down."""
    claimed = torch.tensor([upload.samples for upload in uploads], dtype=torch.float64)
    counts: Tensor = uploads.counts * (capped(claimed, count_cap)[0] / claimed.clamp(min=1e-12))[:, None]
    return counts


def densities(
    uploads: UploadSet, counts: Tensor, shrinkage: float = SHRINKAGE
) -> tuple[Tensor, Gaussians, Gaussians, float]:
    """What a density rule is made of, from the members' evidence: weights, classes, background, bound.

    counts: `(N, C)`, as far as they are believed.
    """
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
    say = counts.sqrt()
    return say / say.sum(0).clamp(min=1e-12), classes, background, float(dim)


def expected_ratios(uploads: UploadSet, classes: Gaussians, background: Gaussians) -> Tensor:
    """What r_ic / sqrt(d) is for member i's own images of class c, from its moments alone; `(N, C)`.

    Both densities are taken at their mean squared distance: tr(S^-1 W) from the class and tr(B^-1 W) + |m - b|^2_B from
    the background, with W the measured covariance within classes.
    """
    within = torch.stack([unpack_symmetric(upload.evidence(DENSITY)[WITHIN]) for upload in uploads])
    means = torch.stack([upload.evidence(DENSITY)[DENSITY_MEANS].double() for upload in uploads])

    def scatter(whitening: Tensor) -> Tensor:
        return torch.einsum("nij,njk,nik->n", whitening.double(), within, whitening.double())[:, None]

    def level(densities: Gaussians, squares: Tensor) -> Tensor:
        half = (FREEDOM + means.shape[2]) / 2
        return densities.level.double() - half * torch.log1p(squares / FREEDOM)

    away = torch.einsum("nij,ncj->nci", background.whitening.double(), means) - background.centres.double()
    own = level(classes, scatter(classes.whitening) / classes.spread.double())
    other = level(background, scatter(background.whitening) + away.square().sum(2))
    ratios: Tensor = (own - other) / means.shape[2] ** 0.5
    return ratios


def sharpness(expected: Tensor, held: Tensor) -> float:
    """beta = 2.2 R^(-3/8), with R the median over members and their classes of the expected ratio.

    An empirical law: the larger the ratios that members expect on their own images, the more of them is owed to
    features that were fitted to these very images, and the less they mean on others. `(N, C)`, `(N, C)`
    """
    typical = float(expected[held].median().clamp(min=0.05)) if bool(held.any()) else 1.0
    return float(SHARPNESS * typical**-FALL)
