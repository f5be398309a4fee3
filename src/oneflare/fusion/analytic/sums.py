"""Fusions of additive statistics, whose result does not depend on which member holds which image."""

from __future__ import annotations

from typing import Literal

import torch

from oneflare.errors import ConfigError
from oneflare.fusion.analytic.discriminant import solve
from oneflare.fusion.base import FUSIONS, Fusion, UploadSet
from oneflare.fusion.trust.sums import doubtful_sums
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

    def fuse(self, uploads: UploadSet) -> AnalyticModel:
        total = uploads.statistics()
        doubtful = doubtful_sums(uploads)
        what = " and is left out" if self.leave_out else ""
        self.remarks = tuple(f"client {client} is suspect{what}: {reason}" for client, reason in doubtful.items())
        if self.leave_out and doubtful:
            for upload in uploads:
                if upload.client in doubtful:
                    total = total - upload.statistics()
        solved = solve(total, kind=self.solver, ridge=self.ridge)
        return AnalyticModel(uploads.task, uploads.plan.feature_map, uploads.plan.bound, solved.weight, solved.bias)


@FUSIONS.register("flare_analytic")
class FlareAnalytic(Fusion):
    """the analytic posterior, corrected by what each client's network knows among the classes it has seen"""

    needs = frozenset({"weights", "prototypes", "counts", "statistics", "calibration"})

    def fuse(self, uploads: UploadSet) -> AnalyticMemberModel:
        trust = torch.tensor([upload.trust or 0.0 for upload in uploads])
        members = uploads.members(Redistribution.of(uploads.counts, trust, uploads.prototypes))
        sums = Analytic()
        analytic = sums.fuse(uploads)
        self.remarks = sums.remarks
        return AnalyticMemberModel(uploads.task, members.members, members.rule, members.encoder, analytic)
