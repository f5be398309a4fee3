"""Fusions of additive statistics: what they give does not depend on who holds what."""

from __future__ import annotations

from typing import Literal

import torch

from oneflare.errors import ConfigError
from oneflare.fusion.analytic.discriminant import solve
from oneflare.fusion.base import FUSIONS, Fused, Fusion, Suspect, Treatment, UploadSet
from oneflare.fusion.trust.sums import doubtful_sums
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.analytic import AnalyticMemberModel, AnalyticModel
from oneflare.models.rules.redistribution import Redistribution


@FUSIONS.register("analytic")
class Analytic(Fusion):
    """the statistics of all clients added up and solved: the same answer for every split"""

    needs = frozenset({"statistics"})

    def __init__(
        self, *, solver: Literal["lda", "ridge"] = "lda", ridge: float | None = None, leave_out: bool = False
    ) -> None:
        """ridge: strength; default: chosen from the statistics. leave_out: members whose class means are others'"""
        if ridge is not None and not ridge > 0:
            raise ConfigError(f"fusion analytic.ridge: must be greater than 0 (got {ridge})")
        self.solver = solver
        self.ridge = ridge
        self.leave_out = leave_out

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        model, suspects = self.solved(uploads)
        return Fused(model, suspects=suspects)

    def solved(self, uploads: UploadSet) -> tuple[AnalyticModel, tuple[Suspect, ...]]:
        """The model, and the members whose class means are others'."""
        total = uploads.statistics()
        doubtful = doubtful_sums(uploads)
        if self.leave_out:
            for upload in uploads:
                if upload.client in doubtful:
                    total = total - upload.statistics()
        found = solve(total, kind=self.solver, ridge=self.ridge)
        model = AnalyticModel(uploads.task, uploads.plan.feature_map, uploads.plan.bound, found.weight, found.bias)
        treatment: Treatment = "left out" if self.leave_out else "kept"
        return model, tuple(Suspect(client, reason, treatment) for client, reason in doubtful.items())


@FUSIONS.register("flare_analytic")
class FlareAnalytic(Fusion):
    """the analytic posterior, corrected by what each client's network knows among the classes it has seen"""

    needs = frozenset({"weights", "prototypes", "counts", "statistics", "calibration"})

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        trust = torch.tensor([upload.trust or 0.0 for upload in uploads])
        members = uploads.members(Redistribution.of(uploads.counts, trust, uploads.prototypes))
        analytic, suspects = Analytic().solved(uploads)
        model = AnalyticMemberModel(uploads.task, members.members, members.rule, members.encoder, analytic)
        return Fused(model, suspects=suspects)
