"""Fusions by moments of features that clients measured on their own images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.evidence import CLASS_MEANS, MEAN, VARIANCE
from oneflare.fusion.base import FUSIONS, Fusion, UploadSet
from oneflare.fusion.features import counted_prototypes
from oneflare.fusion.model import MemberModel, rule
from oneflare.nn import build_anchors

EPSILON = 1e-5
"""added to variances, as batch normalisation does"""
NEVER = 1e4
"""distance of a class without a single image"""


@rule
@dataclass(frozen=True)
class StandardisedSum:
    """z = unit(sum_i w_i (z_i - m_i)/s_i), logits z A^T, with unit features z_i and client i's own mean m_i and
    deviation s_i of them"""

    weights: Tensor
    means: Tensor
    """`(N, d)`"""
    deviations: Tensor
    """`(N, d)`"""
    anchors: Tensor
    """`(C, d)`"""

    def start(self, images: int) -> Tensor:
        return torch.zeros(images, self.anchors.shape[1])

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        centred = F.normalize(features, dim=1) - self.means[member]
        state[rows] += self.weights[member] * centred / self.deviations[member]

    def finish(self, state: Tensor) -> Tensor:
        return F.normalize(state, dim=1) @ self.anchors.T


@FUSIONS.register("standardised")
class Standardised(Fusion):
    """features z-scored with moments the client uploads, sqrt(n)-weighted sum, nearest anchor (the FedSRA idea)

    The moments come from the client, not from the images to be classified, so a prediction does not depend on what
    else is in the batch. Without anchors: nearest mean prototype. Anchors are as long as prototypes are on average.
    """

    needs = frozenset({"weights", "prototypes", "moments"})

    def fuse(self, uploads: UploadSet) -> MemberModel:
        moments = [upload.evidence("moments.") for upload in uploads]
        weights = uploads.size_weights.sqrt()
        targets = build_anchors(uploads.contract.anchors, len(uploads.contract.classes), uploads.contract.dim)
        if targets is None or not bool(targets.any()):
            targets = uploads.prototypes.mean(0)
        scale = uploads.prototypes.norm(dim=2).mean()
        return uploads.members(
            StandardisedSum(
                (weights / weights.sum()).float(),
                torch.stack([one[MEAN] for one in moments]),
                torch.stack([(one[VARIANCE] + EPSILON).sqrt() for one in moments]),
                scale * F.normalize(targets, dim=1),
            )
        )


@rule
@dataclass(frozen=True)
class NearestMean:
    """logits_c = -sum_i w_i |z_i - M_c|^2 = 2 (sum_i w_i z_i) M_c - |M_c|^2 - 1 with unit features z_i"""

    weights: Tensor
    means: Tensor
    """`(C, d)` M"""
    squares: Tensor
    """`(C,)` |M_c|^2"""

    def start(self, images: int) -> Tensor:
        return torch.zeros(images, self.means.shape[1])

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        state[rows] += self.weights[member] * F.normalize(features, dim=1)

    def finish(self, state: Tensor) -> Tensor:
        return 2 * state @ self.means.T - self.squares - 1


@FUSIONS.register("fedproto")
class FedProto(Fusion):
    """nearest class mean: means of features over all images of a class, distances averaged over clients

    M_c = sum_i n_ic M_ic / sum_i n_ic with M_ic client i's mean unit feature of class c (Tan et al. 2022). Each
    client's encoder measures the squared distance of its own feature to every M_c; clients count by size. A class that
    nobody has is never the answer.
    """

    needs = frozenset({"weights", "prototypes", "class_means", "counts"})

    def fuse(self, uploads: UploadSet) -> MemberModel:
        means = torch.stack([upload.evidence(CLASS_MEANS)[CLASS_MEANS] for upload in uploads])
        counts = uploads.counts
        fused = counted_prototypes(means, counts)
        squares = torch.where(counts.sum(0) > 0, fused.square().sum(1), NEVER)
        return uploads.members(NearestMean(uploads.size_weights.float(), fused, squares.float()))
