"""A rehearsal at a member: cross-validation of the terms on its own images, by patient, before anything is sent."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from oneflare.client.files import ClientFiles
from oneflare.client.observer import Observer
from oneflare.client.training import train_client
from oneflare.data import ClientData
from oneflare.data.patients import patient_folds
from oneflare.errors import DataError, TrainingError
from oneflare.federation.charter import Charter
from oneflare.fusion.single_upload import model_of_upload
from oneflare.metrics.figures import ModelFigures, figures_of
from oneflare.metrics.intervals import Measured, wilson


@dataclass(frozen=True)
class Rehearsed:
    """What a member's own model would be worth, each image answered by a model that has not seen its patient."""

    folds: int
    figures: ModelFigures
    folds_accuracy: tuple[float, ...]
    """accuracy on each fold"""
    guess: Measured
    """accuracy of always answering the most frequent class"""


def rehearse(charter: Charter, data: ClientData, folds: int = 5, observer: Observer | None = None) -> Rehearsed:
    """Train under the terms once for each fold without its patients, and answer the fold. Nothing is kept or sent.

    Under private terms the statistics get their noise, but the budget is not charged, because nothing is told.
    """
    observer = observer or Observer()
    fold_of = patient_folds(data.labels, data.patients, folds, charter.terms.seed)
    logits = torch.empty(len(data), len(charter.classes), dtype=torch.float64)
    for fold in range(folds):
        held = fold_of == fold
        observer.note(f"fold {fold + 1} of {folds}: training on {int((~held).sum())} images")
        logits[held] = _answered(charter, data.take((~held).nonzero()[:, 0]), data.images[held], observer)
    hit = logits.argmax(1) == data.labels
    most = int(data.counts.max())
    number = len(data) if data.patients is None else len(data.patients.unique())
    return Rehearsed(
        folds,
        figures_of(logits, data.labels, charter.classes, data.patients),
        tuple(float(hit[fold_of == fold].double().mean()) for fold in range(folds)),
        wilson(most / len(data), number),
    )


def _answered(charter: Charter, training: ClientData, images: torch.Tensor, observer: Observer) -> torch.Tensor:
    """Logits of `images` under a model that was trained on the rest."""
    if training.classes < 2:
        raise DataError("without one fold fewer than two classes are left; a rehearsal needs more images or patients")
    with tempfile.TemporaryDirectory() as folder:
        summary = train_client(charter.job("rehearsal", Path(folder)), training, observer)
        if summary.status != "trained":
            raise TrainingError(f"the rehearsal could not train: {summary.reason}")
        return model_of_upload(ClientFiles(Path(folder)).upload).logits(images).double()
