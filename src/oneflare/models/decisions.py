"""From probabilities to one answer: thresholds of classes, and "none of the known classes".

A coordinator chooses both on the scores that members send back (`oneflare server thresholds`) and signs them in a file
beside the model, `model.thresholds.json`. The model's own file stays as it is, and with it the digest that members
measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oneflare.core.files import read_regular, write_json
from oneflare.core.records import parse_record, record_to_dict
from oneflare.core.strict import strict_json
from oneflare.errors import RunError
from oneflare.models.base import Answers, GlobalModel
from oneflare.models.sealing import check_seal

NONE = -1
"""label of an image that shows none of the known classes"""
KIND = "thresholds"
SUFFIX = ".thresholds.json"
SIZE_LIMIT = 1 << 24
REMEDY = "ask the coordinator for the file again, or remove it: the model then answers with its most likely class"


@dataclass(frozen=True)
class Decision:
    """How the probabilities of one model become one answer.

    The answer is the class with the largest p_c / t_c: equal thresholds t leave the most likely class, and with two
    classes whose thresholds sum to 1 the first is chosen if p_1 > t_1. An image whose familiarity is below `floor`
    shows none of the known classes.
    """

    model: str
    """SHA-256 of the model's file"""
    classes: tuple[str, ...]
    thresholds: tuple[float, ...] | None
    """t_c of every class, above 0 and below 1; None: the most likely class"""
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

    def scores(self, logits: Tensor) -> Tensor:
        """log(p_c / t_c), `(n, C)`"""
        scores = logits.log_softmax(1)
        return scores if self.thresholds is None else scores - torch.tensor(self.thresholds).log().to(scores)

    def unknown(self, familiarity: Tensor | None, images: int) -> Tensor:
        """`(n,)` whether an image shows none of the known classes"""
        if self.floor is None or familiarity is None:
            return torch.zeros(images, dtype=torch.bool)
        return familiarity < self.floor

    def labels(self, answers: Answers) -> Tensor:
        """`(n,)` the class of every image, or `NONE`"""
        best = self.scores(answers.logits).argmax(1)
        return torch.where(self.unknown(answers.familiarity, len(best)), NONE, best)

    def write(self, path: Path) -> None:
        write_json(path, record_to_dict(self))


def decision_path(model: Path) -> Path:
    """The file with the thresholds of a model's file."""
    return model.with_suffix(SUFFIX)


def read_decision(
    path: Path, model: GlobalModel, sha256: str, key: str | None = None, federation: str | None = None
) -> Decision:
    """The decision in a file, checked against the model that it is for, and against the coordinator's key if known.

    sha256: of the model's file
    """
    content = read_regular(path, SIZE_LIMIT)
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
    thresholds = decision.thresholds
    if thresholds is not None and (
        len(thresholds) != len(decision.classes) or not all(0 < value < 1 for value in thresholds)
    ):
        return "it does not have one threshold between 0 and 1 for each class"
    if decision.floor is not None and model.familiarity_bound is None:
        return "this model cannot tell unknown images"
    if decision.floor is not None and not math.isfinite(decision.floor):
        return "its floor is not a finite number"
    return None
