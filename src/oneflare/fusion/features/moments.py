"""Fusions by moments of features that clients measured on their own images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.features.sums import counted_prototypes
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.moments import BatchStandardisedSum, NearestMean, RawStandardisedSum, StandardisedSum
from oneflare.nn import build_anchors
from oneflare.upload.evidence import CLASS_MEANS, MEAN, RAW_MEAN, RAW_VARIANCE, VARIANCE

EPSILON = 1e-5
"""added to variances, as batch normalisation does"""
NEVER = 1e4
"""distance of a class without a single image"""


@FUSIONS.register("standardised")
class Standardised(Fusion):
    """features z-scored with moments the client uploads, sqrt(n)-weighted sum, nearest anchor (the FedSRA idea)

    The moments come from the client, not from the images to be classified, so a prediction does not depend on what
    else is in the batch. Without anchors: nearest mean prototype. Anchors are as long as prototypes are on average.
    """

    needs = frozenset({"weights", "prototypes", "moments"})

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        moments = [upload.evidence("moments.") for upload in uploads]
        rule = StandardisedSum(root_weights(uploads), *_stacked(moments, MEAN, VARIANCE), directions(uploads))
        return Fused(uploads.members(rule))


@FUSIONS.register("standardised_raw")
class StandardisedRaw(Fusion):
    """FedSRA's server: raw features z-scored with moments the client uploads, sqrt(n)-weighted sum, nearest anchor

    As `standardised`, with raw features, whose length tells how sure a member is. This is the variant that FedSRA calls
    calibration-free.
    """

    needs = frozenset({"weights", "prototypes", "raw_moments"})

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        moments = [upload.evidence("raw_moments.") for upload in uploads]
        rule = RawStandardisedSum(
            root_weights(uploads), *_stacked(moments, RAW_MEAN, RAW_VARIANCE), directions(uploads)
        )
        return Fused(uploads.members(rule))


@FUSIONS.register("standardised_batch")
class StandardisedBatch(Fusion):
    """FedSRA's server with moments of the images that are asked about: transductive, needs many images at a time

    As `standardised_raw`, with mean and deviation of each member's features over all images of one call, which is how
    FedSRA's main results are measured. An answer then depends on the other images of the call, and a single image
    has none: do not use it to serve single images or images sorted by class.
    """

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        return Fused(uploads.members(BatchStandardisedSum(root_weights(uploads), directions(uploads))))


def root_weights(uploads: UploadSet) -> Tensor:
    """`(N,)` shares in proportion to sqrt(n)"""
    weights = uploads.size_weights.sqrt()
    return (weights / weights.sum()).float()


def directions(uploads: UploadSet) -> Tensor:
    """`(C, d)`: the federation's anchors, or its mean prototypes, as long as prototypes are on average."""
    targets = build_anchors(uploads.contract.anchors, len(uploads.contract.classes), uploads.contract.dim)
    if targets is None or not bool(targets.any()):
        targets = uploads.prototypes.mean(0)
    length: Tensor = uploads.prototypes.norm(dim=2).mean()
    return length * F.normalize(targets, dim=1)


def _stacked(moments: Sequence[Mapping[str, Tensor]], mean: str, variance: str) -> tuple[Tensor, Tensor]:
    """Means and deviations of all members, each `(N, d)`."""
    return torch.stack([one[mean] for one in moments]), torch.stack(
        [(one[variance] + EPSILON).sqrt() for one in moments]
    )


@FUSIONS.register("fedproto")
class FedProto(Fusion):
    """nearest class mean: means of features over all images of a class, distances averaged over clients

    M_c = sum_i n_ic M_ic / sum_i n_ic with M_ic client i's mean unit feature of class c (Tan et al. 2022). Each
    client's encoder measures the squared distance of its own feature to every M_c; clients count by size. A class that
    nobody has is never the answer.
    """

    needs = frozenset({"weights", "prototypes", "class_means", "counts"})

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        means = torch.stack([upload.evidence(CLASS_MEANS)[CLASS_MEANS] for upload in uploads])
        counts = uploads.counts
        fused = counted_prototypes(means, counts)
        squares = torch.where(counts.sum(0) > 0, fused.square().sum(1), NEVER)
        return Fused(uploads.members(NearestMean(uploads.size_weights.float(), fused, squares.float())))
