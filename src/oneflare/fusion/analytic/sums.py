"""Fusions of additive statistics, whose result does not depend on which member holds which image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from oneflare.core.threads import in_threads
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion.analytic.committee import committee
from oneflare.fusion.analytic.solver import LinearClassifier, solve
from oneflare.fusion.base import FUSIONS, Fused, Fusion, Suspect, Treatment, UploadSet
from oneflare.fusion.densities import MemberDensities, member_densities
from oneflare.fusion.density.ratio import believed_counts, rule_parts
from oneflare.fusion.trust.influence import MANY_IMAGES
from oneflare.fusion.trust.sums import Sketch, doubtful_sums
from oneflare.fusion.trust.suspects import COUNT_CAP
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.analytic import AnalyticMemberModel, AnalyticModel
from oneflare.models.members import Rule
from oneflare.models.rules.density import Corroboration
from oneflare.models.rules.redistribution import Redistribution
from oneflare.nn.decorrelation import Decorrelation
from oneflare.upload.coding import coder_of, rounding_eigenvalue, rounding_variance
from oneflare.upload.statistics import Statistics
from oneflare.upload.whole import ROUNDING, WIDTH

ABOVE_ROUNDING = 1.25
"""least ridge, in units of the largest eigenvalue that rounding adds; chosen on held-out training images"""

SAME_FEATURES = 0.2
"""weight of the networks' opinion where a backbone's features are all that it rests on, as the statistics do; chosen on
training images of CIFAR-10 that nobody trained on"""

KNOWING = 2.5
"""ratio / sqrt(d) that members must expect on their own images for the networks to count in full; chosen, like OVERLAP,
on training images of SVHN, CIFAR-10 and CIFAR-100 that nobody trained on"""
SEVERAL = 1.6
"""members that know a class, up to which they count as one opinion; chosen in the same way, on SVHN"""
OVERLAP = 0.25
"""how much less sure two opinions are together because they are about one image, at t = 1; it grows with t^2"""


BLOCK_WEIGHTS = "block_weights"
"""what the fusion notes where features are in blocks: how much each of them counts"""


def added_up(uploads: UploadSet) -> tuple[list[Statistics], list[list[Sketch]]]:
    """The total of each block's `solved_statistics`, and for each block the sketches of all uploads.

    Each upload is read once. Masked sums have no sketch.
    """
    if uploads.total is not None or uploads.contract.masked:
        return [uploads.statistics()], []
    totals = [Statistics.zeros(size, len(uploads.contract.classes)) for size in uploads.plan.blocks]
    sketches: list[list[Sketch]] = [[] for _ in totals]

    def add(own: Statistics, total: Statistics, known: list[Sketch]) -> None:
        for mine, whole in ((own.gram, total.gram), (own.sums, total.sums), (own.counts, total.counts)):
            whole.add_(mine)
        known.append(Sketch.of(own))

    into = [torch.empty_like(total.gram) for total in totals]
    for upload in uploads:
        in_threads(add, upload.solved_statistics(into), totals, sketches)
    return totals, sketches


@FUSIONS.register("analytic")
class Analytic(Fusion):
    """the statistics of all clients added up and solved: the same answer for every split"""

    needs = frozenset({"statistics"})

    def __init__(
        self,
        *,
        solver: Literal["lda", "ridge"] = "lda",
        ridge: float | None = None,
        leave_out: bool = False,
        moved: int | None = None,
    ) -> None:
        """ridge: strength; default: chosen from the statistics. leave_out: members whose class means are others'

        moved: the model answers by the mean over the image and two copies of it that are moved by so many pixels, at
        three times the time; for analytic=paired. Default: by the image alone
        """
        if ridge is not None and not ridge > 0:
            raise ConfigError(f"fusion analytic.ridge: must be greater than 0 (got {ridge})")
        self.solver = solver
        self.ridge = ridge
        self.leave_out = leave_out
        self.moved = moved

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        model, suspects, notes = self.solved(uploads)
        return Fused(model, notes, suspects)

    def solved(self, uploads: UploadSet) -> tuple[AnalyticModel, tuple[Suspect, ...], dict[str, Any]]:
        """The model, the members whose class means are others', and the weights of blocks where there are several."""
        totals, sketches = added_up(uploads)
        if self.leave_out and uploads.total is not None:
            raise UploadError("fusion analytic.leave_out: members cannot be left out of masked sums; set it to false")
        doubtful = doubtful_sums(uploads, sketches)
        if self.leave_out:
            for upload in uploads:
                if upload.client in doubtful:
                    left = zip(totals, upload.solved_statistics(), strict=True)
                    totals = [total - own for total, own in left]
        found = self._classifier(totals, uploads)
        spec = self._asked_features(uploads.plan.feature_map)
        model = AnalyticModel(uploads.task, spec, uploads.plan.bound, found.weight, found.bias)
        treatment: Treatment = "left out" if self.leave_out else "kept"
        suspects = tuple(Suspect(client, reason, treatment) for client, reason in doubtful.items())
        return model, suspects, {BLOCK_WEIGHTS: [round(share, 4) for share in found.shares]} if found.shares else {}

    def _asked_features(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The map that the model asks: that of the sums, of moved copies as well where that is wanted.

        Scores are linear in the features, so those of mean features are the mean of the scores.
        """
        if self.moved is None:
            return spec
        if spec["name"] != "paired":
            raise ConfigError(f"fusion analytic.moved: is for analytic=paired, not for {spec['name']}; leave it out")
        return {**spec, "moved": self.moved}

    def _classifier(self, totals: Sequence[Statistics], uploads: UploadSet) -> LinearClassifier:
        """The classifier of the totals of `solved_statistics`, the weighed mean of those of the blocks.

        Sums that were rounded after a change of features z = A phi are solved for z: phi.(A^T W) = z.W. There the
        rounding is the same in all directions. The closed-form criterion takes account of it, and the ridge exceeds
        the largest eigenvalue that rounding adds; with K blocks, one K-th of that (`shared_ridge`). Where features
        were rounded for each image, the sums are exact, and the criterion knows that the model asks features that are
        not rounded.
        """
        blocks = len(totals)
        if not uploads.plan.coded:
            return committee(
                in_threads(lambda total: solve(total, kind=self.solver, ridge=self.ridge, blocks=blocks), totals)
            )
        image = uploads.contract.image
        coders = coder_of(uploads.plan.feature_map, image.channels, image.size).apart(uploads.plan.blocks)

        if uploads.plan.whole:

            def of_whole(total: Statistics, coder: Decorrelation) -> LinearClassifier:
                own = solve(total, kind=self.solver, ridge=self.ridge, blocks=blocks, blurred=ROUNDING)
                return replace(own, weight=coder.weights(own.weight) / WIDTH)

            return committee(in_threads(of_whole, totals, coders))

        def solved(total: Statistics, coder: Decorrelation, steps: Sequence[float]) -> LinearClassifier:
            least = ABOVE_ROUNDING * rounding_eigenvalue(steps, len(total.gram)) / max(total.samples, 1.0)
            noise = {"least": least, "rounding": rounding_variance(steps)}
            own = solve(total, kind=self.solver, ridge=self.ridge, blocks=blocks, **noise)
            return replace(own, weight=coder.weights(own.weight))

        rounded = zip(*(upload.steps() for upload in uploads), strict=True)
        return committee(in_threads(solved, totals, coders, rounded))


@FUSIONS.register("flare_analytic")
class FlareAnalytic(Fusion):
    """the analytic posterior, corroborated by every client's network as far as it knows an image

    networks=density: (log p_c + t score_c) / (1 + t^2/4), with the scores of `density_ratio` before they are sharpened.
    t is larger where several members know each class, and smaller where members expect small ratios on their own images
    (`networks_say`). On a backbone it is a fifth of b: networks and statistics then see the same features, and what all
    of them say counts once.
    networks=redistribution: a client moves probability only among the classes it has seen, as far as images that it
    kept back say that it may be trusted (train.holdout).
    """

    needs = frozenset({"weights", "prototypes", "counts", "statistics"})
    revision = 2

    def __init__(self, *, networks: Literal["density", "redistribution"] = "density") -> None:
        self.networks = networks
        self.needs = self.needs | {"density" if networks == "density" else "calibration"}

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        analytic, suspects, notes = Analytic().solved(uploads)
        members = uploads.members(self._rule(uploads))
        model = AnalyticMemberModel(uploads.task, members.members, members.rule, members.encoder, analytic)
        return Fused(model, notes, suspects)

    def _rule(self, uploads: UploadSet) -> Rule:
        if self.networks == "density":
            densities, counts = member_densities(uploads), believed_counts(uploads, COUNT_CAP)
            known = networks_know(densities, counts)
            t = networks_say(known, counts) if uploads.contract.image.backbone is None else SAME_FEATURES * known
            rule = Corroboration.of(*rule_parts(densities, counts), t)
            return replace(rule, overlap=torch.tensor(OVERLAP * t))
        trust = torch.tensor([upload.trust or 0.0 for upload in uploads])
        return Redistribution.of(uploads.counts, trust, uploads.prototypes)


def networks_know(densities: MemberDensities, counts: Tensor) -> float:
    """b = min(1, (R / 2.5)^2), with R = sum_ic n_ic e_ic / sum_ic n_ic / sqrt(d) and 0 where R is negative.

    e_ic is the ratio that member i expects on its own images of class c (`expected_ratios`), so R is that of the mean
    image. An empirical law: networks that hardly tell their own images from destroyed ones err on other images where
    the statistics err, and more often. counts: `(N, C)` n, as far as believed
    """
    total = (densities.expected * counts).sum() / counts.sum().clamp(min=1e-12)
    known = max(float(total) / math.sqrt(densities.means.shape[2]), 0.0) / KNOWING
    return min(1.0, known * known)


def networks_say(known: float, counts: Tensor) -> float:
    """t = b max(1, K / 1.6)^b, with K the number of members that know the class of an image, its harmonic mean over all
    images (`knowers`).

    The score of a class is the mean of its members' ratios. K opinions without an error in common would count K times,
    K opinions with the same errors once; members that know their images well are between the two, and others share
    their errors. The harmonic mean is near 1 where some classes have a single owner, whose opinion stays one.
    known: b of `networks_know`; counts: `(N, C)` n, as far as believed
    """
    of_class = counts.sum(0)
    several = float(of_class.sum() / (of_class / knowers(counts)).sum().clamp(min=1e-12))
    return float(known * max(several / SEVERAL, 1.0) ** known)


def knowers(counts: Tensor) -> Tensor:
    """`(C,)` how many members know each class: 1 / sum_i w_ic^2, with w_ic proportional to sqrt(n_ic), over the members
    that have at least `MANY_IMAGES` images of the class; 1 where nobody has. counts: `(N, C)`"""
    many = torch.where(counts >= MANY_IMAGES, counts, 0.0)
    return (many.sqrt().sum(0).square() / many.sum(0).clamp(min=1e-12)).clamp(min=1)
