"""The density ratio: how much likelier a member's feature is for a class than for an image it knows nothing of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.densities import SHRINKAGE, MemberDensities, member_densities
from oneflare.fusion.trust.influence import capped_say
from oneflare.fusion.trust.probes import probe_features
from oneflare.fusion.trust.suspects import COUNT_CAP, capped, find_suspects
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.density import DensityRatio, StudentDensities

Parts = tuple[Tensor, StudentDensities, StudentDensities, float]


@FUSIONS.register("density_ratio")
class DensityRatioFusion(Fusion):
    """every member speaks about an image as far as its own feature space knows it

    r_ic(x) = log t(u; m_ic, (1 + 1/n_ic) S_i) - log t(u; b_i, B_i) with u the signed root of member i's raw feature, t
    a Student density, m_ic and S_i its class means and covariance, b_i and B_i those of its own images destroyed. The
    answer is the class with the largest mean of r_ic over the members that have it, weighted by sqrt(n_ic).

    Members that do not fit the others are left out and named, as `robust_prototypes` does; so are members whose ratios
    are high for pictures that show nothing. No single ratio counts for more than d, or than three times what is usual
    for members' own images. class_share bounds what one member has to say about one class, and spread_cap how far its
    densities may spread.
    """

    needs = frozenset({"weights", "prototypes", "counts", "density"})
    revision = 1

    def __init__(
        self,
        *,
        shrinkage: float = SHRINKAGE,
        count_cap: float = COUNT_CAP,
        seed: int = 0,
        class_share: float | None = None,
        spread_cap: float | None = None,
    ) -> None:
        """shrinkage: least weight of the identity in the covariances; count_cap: images that a member may claim, times
        the median member's; seed: of the probes by which members are compared; class_share: largest part of a class
        that one member may have where at least three have ten images of it or more; spread_cap: how many times
        as far as the median member's a member's densities may spread, and the reverse; None for no bound"""
        if not 0 <= shrinkage <= 1:
            raise ConfigError(f"fusion density_ratio.shrinkage: must lie between 0 and 1 (got {shrinkage})")
        if not count_cap >= 1:
            raise ConfigError(f"fusion density_ratio.count_cap: must be at least 1 (got {count_cap})")
        if class_share is not None and not 0 < class_share <= 1:
            raise ConfigError(f"fusion density_ratio.class_share: must be above 0 and at most 1 (got {class_share})")
        if spread_cap is not None and not spread_cap >= 1:
            raise ConfigError(f"fusion density_ratio.spread_cap: must be at least 1 (got {spread_cap})")
        self.shrinkage, self.count_cap, self.seed = shrinkage, count_cap, seed
        self.class_share, self.spread_cap = class_share, spread_cap

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        with ThreadPoolExecutor(1) as beside:  # both are long and neither needs the other; torch leaves Python free
            made = beside.submit(member_densities, uploads, self.shrinkage, self.spread_cap)
            features = probe_features(uploads, self.seed)  # here, because networks may be on a device of this thread
            densities = made.result()
        suspects = tuple(find_suspects(uploads, self.seed, self.count_cap, features, densities))
        left_out = {suspect.client for suspect in suspects if suspect.left_out}
        kept = uploads.without(left_out)
        if left_out:
            densities = densities.take(torch.tensor([upload.client not in left_out for upload in uploads]))
        parts = rule_parts(densities, believed_counts(kept, self.count_cap), self.class_share)
        rule = DensityRatio.of(*parts, densities.sharpness)
        return Fused(kept.members(rule), suspects=suspects)


def believed_counts(uploads: UploadSet, count_cap: float) -> Tensor:
    """Class counts `(N, C)` of members, with claims to too many images cut down."""
    claimed = torch.tensor([upload.samples for upload in uploads], dtype=torch.float64)
    counts: Tensor = uploads.counts * (capped(claimed, count_cap)[0] / claimed.clamp(min=1e-12))[:, None]
    return counts


def rule_parts(densities: MemberDensities, counts: Tensor, class_share: float | None = None) -> Parts:
    """What a density rule is made of: weights, classes, background, bound. counts: `(N, C)`, as far as believed"""
    say = capped_say(counts, class_share)
    return say / say.sum(0).clamp(min=1e-12), densities.classes, densities.background, densities.bound
