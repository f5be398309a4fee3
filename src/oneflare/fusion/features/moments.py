"""Fusions by moments of features that clients measured on their own images."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.features.sums import counted_prototypes
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.moments import NearestMean, StandardisedSum
from oneflare.nn import build_anchors
from oneflare.upload.evidence import CLASS_MEANS, MEAN, VARIANCE

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
        weights = uploads.size_weights.sqrt()
        targets = build_anchors(uploads.contract.anchors, len(uploads.contract.classes), uploads.contract.dim)
        if targets is None or not bool(targets.any()):
            targets = uploads.prototypes.mean(0)
        scale = uploads.prototypes.norm(dim=2).mean()
        rule = StandardisedSum(
            (weights / weights.sum()).float(),
            torch.stack([one[MEAN] for one in moments]),
            torch.stack([(one[VARIANCE] + EPSILON).sqrt() for one in moments]),
            scale * F.normalize(targets, dim=1),
        )
        return Fused(uploads.members(rule))


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
