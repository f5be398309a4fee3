"""Fusions that mix the clients' predicted probabilities."""

from __future__ import annotations

import torch

from oneflare.errors import ConfigError
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.votes import OpenSetVotes, ProbabilityMean
from oneflare.upload.evidence import UNKNOWN


@FUSIONS.register("ensemble")
class Ensemble(Fusion):
    """mean of the clients' probabilities, weighted by client size"""

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        return Fused(uploads.members(ProbabilityMean(uploads.size_weights.float(), uploads.prototypes)))


@FUSIONS.register("open_set_votes")
class OpenSetVoting(Fusion):
    """members vote on an image as far as they do not take it for unknown; the surest ones decide (FedOV)

    Each member has C+1 classes, the last one for images unlike its own. The probabilities of its C classes are its
    vote, so that it counts 1 - p(unknown); the votes of the `experts` members with the smallest p(unknown) are added.
    """

    needs = frozenset({"weights", "prototypes", UNKNOWN})

    def __init__(self, *, experts: int = 2) -> None:
        """experts: members whose votes count for an image; FedOV's released code tries every number on test images and
        names none, so that the default is ours"""
        if experts < 1:
            raise ConfigError(f"fusion open_set_votes.experts: must be at least 1 (got {experts})")
        self.experts = experts

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        unknown = torch.stack([upload.evidence(UNKNOWN)[UNKNOWN] for upload in uploads])
        experts = torch.tensor(min(self.experts, len(uploads)))
        return Fused(uploads.members(OpenSetVotes(uploads.prototypes, unknown, experts)))
