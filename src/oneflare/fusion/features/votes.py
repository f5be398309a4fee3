"""Fusions that mix the clients' predicted probabilities."""

from __future__ import annotations

from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.votes import ProbabilityMean


@FUSIONS.register("ensemble")
class Ensemble(Fusion):
    """mean of the clients' probabilities, weighted by client size"""

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        return Fused(uploads.members(ProbabilityMean(uploads.size_weights.float(), uploads.prototypes)))
