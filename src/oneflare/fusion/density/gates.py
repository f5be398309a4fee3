"""Other scores of what a member knows, each as a gate over the members' own votes, to compare density ratios with."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.densities import SHRINKAGE, member_densities, projected_means, shrunk
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.density import StudentDensities
from oneflare.models.rules.gates import EnergyGate, LengthGate, RatioGate, VirtualLogitGate
from oneflare.upload.evidence import DENSITY, DENSITY_MEANS, WITHIN
from oneflare.upload.symmetric import unpack_symmetric

Score = Literal["density", "mahalanobis", "virtual_logit", "energy", "length"]
MEASURED = frozenset({"density", "mahalanobis", "virtual_logit"})
"""scores that need the members' densities"""


@FUSIONS.register("gated_votes")
class GatedVotes(Fusion):
    """a score says how well each member knows an image, its own softmax says which of its classes it is

    p(c | x) ~ sum_i exp(s k_i(x)) p_i(c | x), with p_i the softmax of member i over the classes that it has. The scores
    k are published ones for telling known from unknown images: `density` (the ratio of `density_ratio`), `mahalanobis`
    (Ren et al. 2021), `virtual_logit` (ViM, Wang et al. 2022), `energy` (Liu et al. 2020), `length` (of the feature).
    """

    needs = frozenset({"weights", "prototypes", "counts"})

    def __init__(self, *, by: Score = "density", sharpness: Annotated[float, Field(gt=0, le=8)] = 1.0) -> None:
        """by: the score; sharpness: its factor s, so that a large one lets only the member that knows best speak"""
        self.by, self.sharpness = by, sharpness
        if by in MEASURED:
            self.needs = self.needs | {"density"}

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        shared = (uploads.prototypes.float(), (uploads.counts > 0).float(), torch.tensor(self.sharpness))
        if self.by == "energy":
            return Fused(uploads.members(EnergyGate(*shared)))
        if self.by == "length":
            return Fused(uploads.members(LengthGate(*shared)))
        if self.by == "virtual_logit":
            return Fused(uploads.members(VirtualLogitGate(*shared, *residuals(uploads))))
        densities = member_densities(uploads)
        against = densities.background if self.by == "density" else whole(uploads)
        fields = [value for part in (densities.classes, against) for value in vars(part).values()]
        return Fused(uploads.members(RatioGate(*shared, *fields)))


def whole_moments(uploads: UploadSet) -> tuple[Tensor, Tensor]:
    """Mean `(N, d)` and covariance `(N, d, d)` of each member's rooted features, whatever their class."""
    parts = [upload.evidence(DENSITY) for upload in uploads]
    means = torch.stack([part[DENSITY_MEANS].double() for part in parts])
    within = torch.stack([unpack_symmetric(part[WITHIN]) for part in parts])
    shares = uploads.counts / uploads.counts.sum(1, keepdim=True).clamp(min=1)
    middle = torch.einsum("nc,ncd->nd", shares, means)
    apart = means - middle[:, None]
    return middle, within + torch.einsum("nc,ncd,nce->nde", shares, apart, apart)


def whole(uploads: UploadSet) -> StudentDensities:
    """The density of all images of a member."""
    middle, covariance = whole_moments(uploads)
    images = uploads.counts.sum(1)
    floor = 1e-9 * torch.eye(middle.shape[1], dtype=torch.float64)
    return StudentDensities.of(
        middle[:, None], shrunk(covariance + floor, images, SHRINKAGE), torch.ones(len(middle), 1)
    )


def residuals(uploads: UploadSet) -> tuple[Tensor, Tensor]:
    """alpha R `(N, d, d)` and the means `(N, d)` of ViM.

    R projects on the half of the directions in which the features vary least. alpha is the mean largest logit over the
    mean residual; of both the server knows what the class means and the covariance say.
    """
    middle, covariance = whole_moments(uploads)
    values, vectors = torch.linalg.eigh(covariance)
    least = values.shape[1] // 2
    small = vectors[:, :, :least]
    projection = small @ small.transpose(1, 2)
    expected = values[:, :least].clamp(min=1e-12).sum(1).sqrt()
    measured = [upload.evidence(DENSITY)[DENSITY_MEANS].double() for upload in uploads]
    pairs = zip(measured, uploads, strict=True)
    means = torch.stack([projected_means(own, upload, uploads) for own, upload in pairs])
    directions = torch.nn.functional.normalize(means.sign() * means.square(), dim=2)
    logits = torch.einsum("ncd,nkd->nck", directions, uploads.prototypes.double())
    held = uploads.counts > 0
    largest = logits.masked_fill(~held[:, None], -torch.inf).amax(2)
    typical = (largest * uploads.counts).sum(1) / uploads.counts.sum(1).clamp(min=1)
    alpha = (typical / expected).clamp(min=0)
    return (alpha[:, None, None] * projection).float(), middle.float()
