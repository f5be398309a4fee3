"""Fusions that sum the clients' features and look for the nearest global prototype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.data import prepare
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.sums import FeatureSum, InformativeSum

NOISE_IMAGES = 64


def counted_prototypes(prototypes: Tensor, counts: Tensor) -> Tensor:
    """P_c = sum_i n_ic P_ic / sum_i n_ic: who never saw a class has no say on it.

    prototypes `(N, C, d)`, counts `(N, C)` -> `(C, d)`; a class nobody saw keeps the plain mean.
    """
    total = counts.sum(0)
    shares = torch.where(total > 0, counts / total.clamp(min=1e-12), torch.full_like(counts, 1 / len(counts)))
    return torch.einsum("nc,ncd->cd", shares, prototypes.to(shares.dtype)).float()


def noise_features(uploads: UploadSet, seed: int) -> Tensor:
    """`(N, d)`: each client's mean raw feature of the same seeded noise images."""
    image = uploads.contract.image
    shape = (NOISE_IMAGES, image.channels, image.size, image.size)
    pixels = prepare(torch.rand(shape, generator=torch_generator(seed, "noise images")), image)
    return torch.stack([features.projected.mean(0) for features in uploads.features(pixels)])


@FUSIONS.register("feature_mean")
class FeatureMean(Fusion):
    """size-weighted sum of raw features, nearest mean prototype (what FAFI's released code runs)

    Training sees unit features, so the length of a raw one is free, and encoders answer images of classes that they
    were trained on with longer features: the sum weighs members by how sure they are.
    """

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        return Fused(uploads.members(FeatureSum(uploads.size_weights.float(), uploads.prototypes.mean(0))))


@FUSIONS.register("count_prototypes")
class CountPrototypes(Fusion):
    """feature_mean with prototypes averaged by class counts, then brought to one length"""

    needs = frozenset({"weights", "prototypes", "counts"})

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        prototypes = F.normalize(counted_prototypes(uploads.prototypes, uploads.counts), dim=1)
        scale = uploads.prototypes.norm(dim=2).mean()
        return Fused(uploads.members(FeatureSum(uploads.size_weights.float(), scale * prototypes)))


@FUSIONS.register("iffi")
class InformativeFusion(Fusion):
    """FAFI's informative feature fusion as the paper means it: weight 1 - cos(f_i(x), f_i(noise))"""

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        return Fused(uploads.members(InformativeSum(noise_features(uploads, self.seed), uploads.prototypes.mean(0))))


@FUSIONS.register("iffi_released")
class InformativeFusionReleased(Fusion):
    """the released code averages that weight over clients, which leaves an unweighted sum of raw features"""

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        weights = torch.full((len(uploads),), 1 / len(uploads))
        return Fused(uploads.members(FeatureSum(weights, uploads.prototypes.mean(0))))
