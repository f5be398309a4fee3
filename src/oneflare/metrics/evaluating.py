"""Fusing and measuring in one place: what each of several fusions makes of the same uploads, and how good that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oneflare.data import Split
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion import QUIET, Fused, GlobalModel, UploadSet, Workspace, build_fusion, logits_of_all, made_by
from oneflare.fusion.trust.probes import probe_images
from oneflare.metrics.classification import Scores, score
from oneflare.metrics.retention import Retention, retention
from oneflare.models.members import MemberModel

PROBES = 8
"""pictures on which a fused network must give finite answers"""
Spec = Mapping[str, Any]
"""name and options of a fusion"""


@dataclass(frozen=True)
class TimedFusion:
    """What one fusion made of some uploads, and how long that took."""

    spec: Spec
    fused: Fused
    seconds: float
    """by the clock, including attempts that were interrupted and resumed"""
    origin: Mapping[str, Any]
    """`options` and `code` of the fusion when the work began: what its figures depend on beside the uploads"""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def model(self) -> GlobalModel:
        return self.fused.model


@dataclass(frozen=True)
class Evaluation:
    """One fusion with the scores of its model on the test images."""

    made: TimedFusion
    scores: Scores
    right: Tensor
    """`(n,)` which test images the model classifies correctly"""
    retention: Retention | None
    """against the fusion it learned from; None where it learned from none"""

    @property
    def name(self) -> str:
        return self.made.name

    @property
    def model(self) -> GlobalModel:
        return self.made.model

    def to_dict(self) -> dict[str, Any]:
        """The fields of `metrics.json`."""
        fused, cost = self.made.fused, self.model.cost
        content = self.scores.to_dict() | {
            "parameters": cost.parameters,
            "forward_passes": cost.forward_passes,
            "fuse_seconds": self.made.seconds,
            **self.made.origin,
        }
        if fused.notes:
            content["training"] = dict(fused.notes)
        if fused.suspects:
            content["suspects"] = [str(suspect) for suspect in fused.suspects]
        if self.retention is not None:
            content["teacher"] = self.retention.to_dict()
        return content


def fuse_timed(spec: Spec, uploads: UploadSet, workspace: Workspace = QUIET) -> TimedFusion:
    """Build the fusion that `spec` names, fuse the uploads, and take the time."""
    fusion, origin = build_fusion(spec), made_by(spec)
    started = time.monotonic()
    fused = fusion.fuse(uploads, workspace)
    seconds = time.monotonic() - started
    if not isinstance(fused, Fused):
        raise ConfigError(f"fusion {spec['name']}: fuse() returned a {type(fused).__name__}; return Fused(model)")
    fused.model.to(uploads.device)
    _check_finite(str(spec["name"]), fused)
    return TimedFusion(spec, fused, fused.seconds_before + seconds, origin)


def _check_finite(name: str, fused: Fused) -> None:
    """Refuse a model without finite answers: weights that are finite one by one can overflow together."""
    model = fused.model
    if isinstance(model, MemberModel):  # leaves a member that overflows out of every single answer
        return
    if bool(torch.isfinite(model.logits(probe_images(model.task.image, PROBES))).all()):
        return
    suspects = "; ".join(str(suspect) for suspect in fused.suspects)
    raise UploadError(
        f"fusion {name}: the fused model gives no finite answer, because of the weights of some member"
        + (f" ({suspects})" if suspects else "")
        + "; leave that member out, or use a fusion that asks every member, such as density_ratio"
    )


def evaluate(
    specs: Sequence[Spec],
    uploads: UploadSet,
    test: Split,
    fuse: Callable[[Spec, UploadSet], TimedFusion] = fuse_timed,
) -> list[Evaluation]:
    """Fuse the uploads in each of these ways and score every model on the test images; one evaluation per spec.

    fuse: how one of them is fused, where a caller has a workspace for it. Raises what `Fusion.fuse` raises;
    `without_faulty` around this function goes on without a member that is at fault.
    """
    return score_all([fuse(spec, uploads) for spec in specs], uploads, test)


def score_all(made: Sequence[TimedFusion], uploads: UploadSet, test: Split) -> list[Evaluation]:
    """Score models that are there already; those that ask every member's encoder share one pass of each.

    uploads: those the models were made of, from which the teachers of distilled models are fused again.
    """
    answers = logits_of_all({str(index): one.model for index, one in enumerate(made)}, test.images)
    return [
        Evaluation(
            one, score(logits, test.labels), logits.argmax(1) == test.labels, _retention(one, logits, uploads, test)
        )
        for one, logits in zip(made, (answers[str(index)] for index in range(len(made))), strict=True)
    ]


def _retention(made: TimedFusion, logits: Tensor, uploads: UploadSet, test: Split) -> Retention | None:
    """logits `(n, C)` of the student"""
    teacher = build_fusion(made.spec).teacher
    if teacher is None:
        return None
    model = build_fusion(teacher).fuse(uploads).model.to(uploads.device)
    own, theirs = made.model.cost, model.cost
    return retention(str(teacher["name"]), logits, model.logits(test.images), test.labels, own, theirs)
