"""From probabilities to one answer: thresholds of classes, and "none of the known classes".

A coordinator chooses both on the scores that members send back (`oneflare server thresholds`) and signs them in a file
beside the model, `model.thresholds.json`. The model's own file stays as it is, and with it the digest that members
measured; its signature says which thresholds belong to it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oneflare.core.files import digest_of, read_regular, write_json
from oneflare.core.records import parse_record, read_record, record_to_dict
from oneflare.core.strict import strict_json
from oneflare.errors import RunError
from oneflare.models.base import Answers, GlobalModel
from oneflare.models.sealing import WITHOUT, check_seal, stated_thresholds

NONE = -1
"""label of an image that shows none of the known classes"""
KIND = "thresholds"
SUFFIX = ".thresholds.json"
STEP = 1e4
"""farther apart than any two log(p / t)"""
SIZE_LIMIT = 1 << 24
REMEDY = "ask the coordinator for the file again"


@dataclass(frozen=True)
class Decision:
    """How the probabilities of one model become one answer.

    A class that has a threshold t is the answer where its probability reaches t; of several, the one with the largest
    p / t. Where none reaches its threshold, the answer is the most likely class without a threshold, or if all classes
    have one, the class with the largest p / t. A single class with a threshold therefore has exactly the sensitivity
    and the specificity that members measured at t (`metrics.figures.ThresholdRates`), whatever the other classes do. An
    image whose familiarity is below `floor` shows none of the known classes.
    """

    model: str
    """SHA-256 of the model's file"""
    classes: tuple[str, ...]
    thresholds: tuple[float | None, ...]
    """t of every class, above 0 and below 1, or None"""
    floor: float | None
    """least familiarity of a known image; None: every image gets a class"""
    keeps: float | None
    """the part of known images that the floor was chosen to keep"""
    aim: str
    """what the thresholds were chosen for, in words"""
    members: tuple[str, ...]
    """whose scores they were chosen on"""
    images: int
    chosen: str
    """when, UTC"""

    @property
    def rule(self) -> str:
        """Digest of the rule itself: of the model, its thresholds and its floor."""
        return digest_of([self.model, list(self.thresholds), self.floor])

    @property
    def words(self) -> str:
        """`thresholds for a sensitivity of 0.95 for melanoma, and none of the known classes below ...`"""
        parts = [f"thresholds for {self.aim}"] if self.aim else []
        parts += [] if self.floor is None else [f"'none of the known classes' below a familiarity of {self.floor:.3g}"]
        return " and ".join(parts)

    def scores(self, logits: Tensor) -> Tensor:
        """Numbers `(n, C)` by which classes are ordered, the answer first: log(p / t), in three steps."""
        shares = logits.log_softmax(1).double()
        has = torch.tensor([threshold is not None for threshold in self.thresholds])
        limits = torch.tensor([1.0 if one is None else one for one in self.thresholds], dtype=torch.float64).log()
        ratios = shares - limits
        return ratios + STEP * torch.where(has, 2.0 * (ratios >= 0), 1.0)

    def unknown(self, familiarity: Tensor | None, images: int) -> Tensor:
        """`(n,)` whether an image shows none of the known classes"""
        if self.floor is None or familiarity is None:
            return torch.zeros(images, dtype=torch.bool)
        return familiarity < self.floor

    def labels(self, answers: Answers) -> Tensor:
        """`(n,)` the class of every image, or `NONE`"""
        best = self.scores(answers.logits).argmax(1)
        if self.floor is None or answers.familiarity is None:
            return best  # an exported graph must not hold a mask of the batch size that it was made with
        return torch.where(self.unknown(answers.familiarity, len(best)), NONE, best)

    def write(self, path: Path) -> None:
        write_json(path, record_to_dict(self))


def decision_path(model: Path) -> Path:
    """The file with the thresholds of a model's file."""
    return model.with_suffix(SUFFIX)


def is_for(path: Path, sha256: str) -> bool:
    """Whether the thresholds in a file are for the model with this digest; of a damaged file they are for none."""
    try:
        return read_record(Decision, path, REMEDY).model == sha256
    except RunError:
        return False


def decision_of(
    file: Path, model: GlobalModel, sha256: str, key: str | None = None, federation: str | None = None
) -> Decision | None:
    """The decision beside a model's file, if one belongs to it; the model's signature says whether and which.

    sha256: of the model's file; key, federation: as `load_model` has them
    """
    path, stated = decision_path(file), stated_thresholds(file)
    if not path.exists():
        if stated in ("", WITHOUT):
            return None
        raise RunError(
            f"{file}: the coordinator chose thresholds for this model, and {path.name} is not beside it; {REMEDY}"
        )
    content = read_regular(path, SIZE_LIMIT)
    if key is not None and stated and hashlib.sha256(content).hexdigest() != stated:
        raise RunError(f"{path}: these are not the thresholds that the coordinator signed with this model; {REMEDY}")
    return read_decision(path, content, model, sha256, key, federation)


def read_decision(
    path: Path,
    content: bytes,
    model: GlobalModel,
    sha256: str,
    key: str | None = None,
    federation: str | None = None,
) -> Decision:
    """The decision in a file, checked against the model that it is for, and against the coordinator's key if known.

    content: of the file; sha256: of the model's file
    """
    if key is not None:
        check_seal(path, content, key, KIND, federation)
    try:
        decision = parse_record(Decision, strict_json(content), str(path), REMEDY)
    except ValueError:
        raise RunError(f"{path} is damaged; {REMEDY}") from None
    wrong = _misfit(decision, model, sha256)
    if wrong is not None:
        raise RunError(f"{path}: {wrong}; {REMEDY}")
    return decision


def _misfit(decision: Decision, model: GlobalModel, sha256: str) -> str | None:
    """Why a decision cannot be this model's."""
    if decision.model != sha256:
        return "its thresholds were chosen for another model"
    if decision.classes != model.task.classes:
        return "its classes are not the model's"
    given = [threshold for threshold in decision.thresholds if threshold is not None]
    if len(decision.thresholds) != len(decision.classes) or not all(0 < threshold < 1 for threshold in given):
        return "it does not have, for each class, a threshold between 0 and 1 or none"
    if decision.floor is not None and model.familiarity_bound is None:
        return "this model cannot tell unknown images"
    if decision.floor is not None and not math.isfinite(decision.floor):
        return "its floor is not a finite number"
    return None
