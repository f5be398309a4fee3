"""Fusions that decide which members count for a class: experts by count, and robust prototypes."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.trust.probes import probe_features
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.sums import BoundedFeatureSum
from oneflare.models.rules.votes import ProbabilityMean


def expert_weights(counts: Tensor, share: Literal["class", "client"] = "class") -> Tensor:
    """`(N, C)`, 0 where a client never saw the class.

    class: w_ic = n_ic / sum_j n_jc, the client's share of the class. client: w_ic = [n_ic > 0] n_i / sum_j n_j.
    """
    if share == "class":
        return (counts / counts.sum(0).clamp(min=1e-12)).float()
    return ((counts > 0) * counts.sum(1, keepdim=True) / counts.sum()).float()


@FUSIONS.register("class_experts")
class ClassExperts(Fusion):
    """each client votes only on the classes it has seen, weighted by its share of their images

    score_c = sum_i n_ic/(sum_j n_jc) softmax(z_i P_i^T)_c. A client that alone holds a class, and little else, answers
    it for every image and has its full weight there; share=client weighs by all its images instead.
    """

    needs = frozenset({"weights", "prototypes", "counts"})

    def __init__(self, *, share: Literal["class", "client"] = "class") -> None:
        self.share: Literal["class", "client"] = share

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        return Fused(uploads.members(ProbabilityMean(expert_weights(uploads.counts, self.share), uploads.prototypes)))


def trimmed_mean(values: Tensor, weights: Tensor, trim: float) -> Tensor:
    """Weighted mean of each coordinate without a part `trim` of the weight at either end.

    values `(N, ...)`, weights `(N,)` -> `(...)`. Sorted by value, entry k covers (W_{k-1}, W_k] of the total weight
    and counts with what of it lies in [trim, 1 - trim]. trim = 0: the mean; trim = 1/2: the median (between two
    middle values their mean).
    """
    shape = (-1, *[1] * (values.ndim - 1))
    order = values.argsort(0)
    ordered = values.gather(0, order)
    shares = (weights / weights.sum()).view(shape).expand_as(values).gather(0, order)
    upper = shares.cumsum(0)
    if trim >= 0.5:
        low = (upper < 0.5 - 1e-9).sum(0, keepdim=True).clamp(max=len(values) - 1)
        high = (upper < 0.5 + 1e-9).sum(0, keepdim=True).clamp(max=len(values) - 1)
        return ((ordered.gather(0, low) + ordered.gather(0, high)) / 2).squeeze(0)
    covered = upper.clamp(trim, 1 - trim) - (upper - shares).clamp(trim, 1 - trim)
    return (covered * ordered).sum(0) / covered.sum(0)


def robust_prototypes(prototypes: Tensor, counts: Tensor, trim: float, *, weighted: bool) -> Tensor:
    """Unit rows `(C, d)` from prototypes `(N, C, d)` and counts `(N, C)`.

    Per class: the prototypes of those who saw it (of all where nobody did) brought to length 1, so that length is no
    influence, then `trimmed_mean` per coordinate, then length 1 again.
    """
    unit = F.normalize(prototypes.double(), dim=2)
    rows = []
    for label in range(prototypes.shape[1]):
        seen = counts[:, label] > 0
        who = seen if bool(seen.any()) else torch.ones_like(seen)
        weights = counts[who, label].double() if weighted and bool(seen.any()) else torch.ones(int(who.sum())).double()
        rows.append(trimmed_mean(unit[who, label], weights, trim))
    return F.normalize(torch.stack(rows), dim=1).float()


@FUSIONS.register("median_prototypes")
class MedianPrototypes(Fusion):
    """feature_mean with the coordinate-wise median of the prototypes of those who saw a class

    kind=trimmed: the mean without a part `trim` at either end. weighted: by class counts, which a client states
    itself; without, everybody who saw a class counts the same and no minority moves a coordinate beyond the others.
    Nobody's features are longer than a few times the median member's.
    """

    needs = frozenset({"weights", "prototypes", "counts"})

    def __init__(
        self, *, kind: Literal["median", "trimmed"] = "median", trim: float = 0.2, weighted: bool = False
    ) -> None:
        if not 0 <= trim < 0.5:
            raise ConfigError(f"fusion median_prototypes.trim: must be at least 0 and less than 0.5 (got {trim})")
        self.trim = 0.5 if kind == "median" else trim
        self.weighted = weighted

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        prototypes = robust_prototypes(uploads.prototypes, uploads.counts, self.trim, weighted=self.weighted)
        scale = uploads.prototypes.norm(dim=2).median()
        weights = uploads.size_weights.float()
        probes = probe_features(uploads).projected
        return Fused(uploads.members(BoundedFeatureSum.of(weights, scale * prototypes, probes)))
