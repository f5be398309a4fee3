"""Keeps the images of a patient together, on one side of every split.

A patient is whoever a table's column or the folder below a class folder names. Inside a `Split` patients are numbers
that mean nothing elsewhere; their names stay with the list of files and never enter an upload, a result or a page.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oneflare.errors import DataError

Array = np.ndarray[Any, Any]


def numbered(names: Sequence[str | None]) -> Tensor | None:
    """`(n,)` numbers from 0, in the order in which patients appear; an image without a patient counts as its own.

    None where nobody is named.
    """
    if not any(name is not None for name in names):
        return None
    numbers: dict[object, int] = {}
    keys = [(row,) if name is None else name for row, name in enumerate(names)]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def check_apart(train: Iterable[str | None], test: Iterable[str | None], remedy: str) -> None:
    """Refuse a split that has images of one patient on both sides."""
    both = sorted({name for name in train if name is not None} & {name for name in test if name is not None})
    if both:
        many = f"{len(both)} patients have" if len(both) > 1 else "1 patient has"
        raise DataError(
            f"{many} images in both the training and the test part (for example '{both[0]:.80}'), so the test would "
            f"measure memory; {remedy}"
        )


def held_out_rows(labels: Tensor, patients: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """`(n,)` which images are held out: whole patients, so that every class comes near the fraction.

    Patients are taken from the largest to the smallest, in random order among equals, if that brings the sum over
    classes of (held-out share - fraction)^2 down and leaves every class somebody to train on. Where no patient fits,
    the one that exceeds the fraction least is taken.
    """
    counts = _counts(labels, patients)
    totals = counts.sum(0)
    counts, totals = counts[:, totals > 0], totals[totals > 0]
    chosen, held = np.zeros(len(counts), dtype=bool), np.zeros_like(totals)

    def distance(part: Array) -> float:
        return float((((part / totals) - fraction) ** 2).sum())

    shuffled = torch.randperm(len(counts), generator=generator).numpy()
    order = [int(patient) for patient in shuffled[np.argsort(-counts[shuffled].sum(1), kind="stable")]]
    order = order if fraction > 0 else []
    for patient in order:
        more = held + counts[patient]
        if (more < totals).all() and distance(more) < distance(held):
            chosen[patient], held = True, more
    if not chosen.any():
        allowed = [patient for patient in order if (counts[patient] < totals).all()]
        if allowed:
            chosen[min(allowed, key=lambda patient: distance(counts[patient]))] = True
    return torch.from_numpy(chosen)[patients]


def patient_folds(labels: Tensor, patients: Tensor | None, folds: int, seed: int = 0) -> Tensor:
    """`(n,)` the fold of each image, from 0: no patient is in two folds, and classes are spread as evenly as possible.

    Without patients every image stands for itself. The assignment is scikit-learn's StratifiedGroupKFold.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    groups = torch.arange(len(labels)) if patients is None else patients
    number = len(groups.unique())
    if not 2 <= folds <= number:
        who = "images" if patients is None else "patients"
        raise DataError(f"{folds} folds of {number} {who} cannot be made; choose between 2 and the number of {who}")
    most = int(labels.bincount().max())
    if folds > most:
        raise DataError(f"{folds} folds cannot be made, because no class has more than {most} images; choose fewer")
    result = torch.empty(len(labels), dtype=torch.long)
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about classes that have fewer images than there are folds
        parts = splitter.split(np.zeros(len(labels)), labels.numpy(), groups.numpy())
        for fold, (_, rows) in enumerate(parts):
            result[torch.from_numpy(rows)] = fold
    return result


def _counts(labels: Tensor, patients: Tensor) -> Array:
    """`(patients, classes)` images"""
    counts = np.zeros((int(patients.max()) + 1, int(labels.max()) + 1))
    np.add.at(counts, (patients.numpy(), labels.numpy()), 1)
    return counts
