"""Fusions that mix the clients' predicted probabilities."""

from __future__ import annotations

from oneflare.fusion.base import FUSIONS, Fusion, UploadSet
from oneflare.models.members import MemberModel
from oneflare.models.rules.votes import ProbabilityMean


@FUSIONS.register("ensemble")
class Ensemble(Fusion):
    """mean of the clients' probabilities, weighted by client size"""

    def fuse(self, uploads: UploadSet) -> MemberModel:
        return uploads.members(ProbabilityMean(uploads.size_weights.float(), uploads.prototypes))
