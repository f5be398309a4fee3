"""The figures of a classifier on test images, with intervals, and without those of small groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oneflare.errors import DataError
from oneflare.metrics.classification import Bin, expected_calibration_error, reliability
from oneflare.metrics.intervals import Measured, mean_of, paired_gain, rank_interval, wilson
from oneflare.metrics.ranking import Array, auroc, average_precision
from oneflare.metrics.withholding import withhold

THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""probabilities of a class at which its rates are told"""
MOST_CLASSES = 200
"""with more classes there is no confusion matrix"""


@dataclass(frozen=True)
class ThresholdRates:
    """The rates of a class if it is answered where its probability is at least `threshold`."""

    threshold: float
    sensitivity: float
    specificity: float


@dataclass(frozen=True)
class ClassFigures:
    """One class against all others; None is a figure that is withheld or that no test image can give."""

    name: str
    support: int | None
    """test images of the class; 0 where there are none, None where the number is withheld"""
    patients: int | None
    """patients with an image of the class; None where patients are not known or the class is withheld"""
    sensitivity: Measured | None
    """of the images of the class, the share that is answered with it"""
    specificity: Measured | None
    """of the images of other classes, the share that is not answered with it"""
    auroc: Measured | None
    average_precision: Measured | None
    curve: tuple[ThresholdRates, ...]
    """empty where the class is withheld or has no images"""

    @property
    def withheld(self) -> bool:
        return self.support is None


@dataclass(frozen=True)
class RuleRates:
    """One class against all others by the model's decision rule; None as in `ClassFigures`."""

    sensitivity: Measured | None
    """of the images of the class, the share that is answered with it"""
    specificity: Measured | None
    """of the images of other classes, the share that is not answered with it"""


@dataclass(frozen=True)
class RuleFigures:
    """What thresholds and "none of the known classes" make of test images (`metrics.deciding`)."""

    rule: str
    """digest of the decision rule"""
    images: int
    """test images"""
    decided: int
    """those that got a class"""
    decided_patients: int | None
    """whose images they are; None where patients are not known"""
    undecided: Measured
    """the share of images that is answered with none of the known classes"""
    accuracy: Measured | None
    """of the decided images; None where they are fewer than the smallest group"""
    classes: tuple[RuleRates, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.decided <= self.images or not 0 <= (self.decided_patients or 0) <= self.decided:
            raise ValueError("the images that got a class do not fit the images of the test")


@dataclass(frozen=True)
class ModelFigures:
    """One model on one set of test images."""

    images: int
    patients: int | None
    """None where they are not known"""
    accuracy: Measured
    balanced_accuracy: Measured | None
    """mean sensitivity of the classes that are told; None where all are withheld"""
    calibration_error: float
    classes: tuple[ClassFigures, ...]
    confusion: tuple[tuple[int | None, ...], ...] | None
    """row: true class, column: answer; a cell is None where it is withheld, all of it with more than 200 classes"""
    reliability: tuple[Bin, ...]
    """bins of confidence, joined until each holds the smallest group"""
    kept: tuple[float, ...] | None = None
    """the share of images with at least each level of familiarity (`metrics.thresholds`); None where the model cannot
    tell unknown images"""
    by_rule: RuleFigures | None = None
    """the answers by the model's decision rule, where all other figures are of its most likely class; None where it has
    no such rule"""

    def __post_init__(self) -> None:
        if self.by_rule is not None and len(self.by_rule.classes) != len(self.classes):
            raise ValueError("the figures of the decision rule have another number of classes")
        if self.images < 1 or min(self._supports, default=0) < 0 or sum(self._supports) > self.images:
            raise ValueError("the images of the classes do not add up to the images of the test")
        if self.confusion is not None and len(self.confusion) != len(self.classes):
            raise ValueError("the confusion matrix has another number of classes")
        for one, row in zip(self.classes, self.confusion or (), strict=False):
            known = [cell for cell in row if cell is not None]
            most = self.images if one.support is None else one.support
            if min(known, default=0) < 0 or len(row) != len(self.classes) or sum(known) > most:
                raise ValueError(f"the confusion matrix does not fit the images of class {one.name:.80}")

    @property
    def complete(self) -> bool:
        """Whether all that is not withheld adds up, as it does at one member."""
        if all(one.support is not None for one in self.classes) and sum(self._supports) != self.images:
            return False
        rows = zip(self.classes, self.confusion or (), strict=False)
        return all(None in row or one.support in (None, sum(cell or 0 for cell in row)) for one, row in rows)

    @property
    def _supports(self) -> list[int]:
        return [one.support for one in self.classes if one.support is not None]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.classes)

    @property
    def weakest(self) -> ClassFigures | None:
        """The class with the lowest sensitivity that is told."""
        told = [one for one in self.classes if one.sensitivity is not None]
        return min(told, key=lambda one: one.sensitivity.value, default=None)  # type: ignore[union-attr]


@dataclass(frozen=True)
class AgainstAlone:
    """Two models on the same images: the federation's against the member's own."""

    better: int
    """images that only the federation's model answers right"""
    worse: int
    """images that only the member's own model answers right"""
    gain: Measured
    """accuracy of the federation's model minus that of the member's own"""

    def __post_init__(self) -> None:
        if self.better < 0 or self.worse < 0:
            raise ValueError("a number of images cannot be negative")


@dataclass(frozen=True)
class Truth:
    """The true classes of the images of a test, and whose images they are."""

    labels: Array
    """`(n,)` numbers of the true classes"""
    patients: Array | None
    """`(n,)` whose image it is; None where that is not known"""

    @classmethod
    def of(cls, labels: Tensor, patients: Tensor | None) -> Truth:
        return cls(labels.numpy(), None if patients is None else patients.numpy())

    def number(self, rows: Array) -> int:
        """Independent observations among some images `(n,)` of truth values: patients, or else the images."""
        return int(rows.sum()) if self.patients is None else len(np.unique(self.patients[rows]))

    def share(self, hit: Array, rows: Array) -> Measured:
        """The share of `rows` in which `hit` holds, both `(n,)`."""
        return wilson(float(hit[rows].mean()), self.number(rows))


def figures_of(
    logits: Tensor, labels: Tensor, names: Sequence[str], patients: Tensor | None = None, smallest_group: int = 1
) -> ModelFigures:
    """What may be told of a model's answers. logits `(n, C)`, labels and patients `(n,)`.

    smallest_group: figures of fewer images, or patients where they are known, are withheld; 1 withholds nothing.
    """
    test = Truth.of(labels, patients)
    _enough(test, smallest_group)
    probabilities = logits.double().softmax(1)
    shares, ranks, predicted = probabilities.numpy(), _odds(logits.double()).numpy(), logits.argmax(1).numpy()
    everything = np.ones(len(predicted), dtype=bool)
    counts, sizes = _confusion(test, predicted, len(names))
    hidden = withhold(sizes, counts, smallest_group)
    supports = counts.sum(1)
    classes = []
    for label, name in enumerate(names):
        own = test.labels == label
        if hidden.classes[label]:
            classes.append(ClassFigures(name, None, None, None, None, None, None, ()))
        elif not supports[label]:
            patients_of = None if test.patients is None else 0
            told = test.share(predicted != label, everything)
            classes.append(ClassFigures(name, 0, patients_of, None, told, None, None, ()))
        else:
            classes.append(_class(name, test, own, _Answered(shares[:, label], ranks[:, label], predicted == label)))
    told_rates = [one.sensitivity for one in classes if one.sensitivity is not None]
    small = len(names) <= MOST_CLASSES
    return ModelFigures(
        images=len(predicted),
        patients=None if test.patients is None else test.number(everything),
        accuracy=test.share(predicted == test.labels, everything),
        balanced_accuracy=mean_of(told_rates) if told_rates else None,
        calibration_error=expected_calibration_error(probabilities, labels),
        classes=tuple(classes),
        confusion=_told_cells(counts, hidden.cells) if small else None,
        reliability=_joined(reliability(probabilities, labels), smallest_group),
    )


def compared(together: Tensor, alone: Tensor, labels: Tensor, patients: Tensor | None = None) -> AgainstAlone:
    """The federation's model against the member's own on the same images, from the logits of both `(n, C)`."""
    right, before = (one.argmax(1) == labels for one in (together, alone))
    better, worse = int((right & ~before).sum()), int((before & ~right).sum())
    number = len(labels) if patients is None else len(patients.unique())
    return AgainstAlone(better, worse, paired_gain(better, worse, len(labels), number))


def _enough(test: Truth, limit: int) -> None:
    number = test.number(np.ones(len(test.labels), dtype=bool))
    if number < max(limit, 1):
        what = "test images" if test.patients is None else "patients in the test"
        raise DataError(f"{number} {what} are fewer than the smallest group that may be told of ({limit}); add images")


def _confusion(test: Truth, predicted: Array, number: int) -> tuple[Array, Array]:
    """`(C, C)` in images, and `(C, C + 1)` in patients (or images) with the whole class in the last column."""
    counts = np.zeros((number, number), dtype=np.int64)
    np.add.at(counts, (test.labels, predicted), 1)
    if test.patients is None:
        return counts, np.hstack([counts, counts.sum(1, keepdims=True)])
    sizes = np.zeros((number, number + 1), dtype=np.int64)
    for row, column in np.argwhere(counts).tolist():
        sizes[row, column] = test.number((test.labels == row) & (predicted == column))
    for row in np.flatnonzero(counts.sum(1)).tolist():
        sizes[row, -1] = test.number(test.labels == row)
    return counts, sizes


@dataclass(frozen=True)
class _Answered:
    """What the model says of one class, each `(n,)`."""

    shares: Array
    """its probability"""
    ranks: Array
    """what orders the images by it; unlike the probability, it is never rounded to 0 or 1"""
    hit: Array
    """whether the class is the answer"""


def _odds(logits: Tensor) -> Tensor:
    """`(n, C)` log(p / (1 - p)) = logit - log of the sum of the exponentials of the others"""
    columns = torch.arange(logits.shape[1])
    others = [logits[:, columns != label].logsumexp(1) for label in range(logits.shape[1])]
    return logits - torch.stack(others, 1)


def _class(name: str, test: Truth, own: Array, said: _Answered) -> ClassFigures:
    others = ~own
    support, positives = int(own.sum()), test.number(own)
    specificity = area = precision = None
    curve: tuple[ThresholdRates, ...] = ()
    if others.any():
        specificity = test.share(~said.hit, others)
        area = rank_interval(auroc(said.ranks, own), positives, test.number(others))
        precision = wilson(average_precision(said.ranks, own), positives)
        curve = tuple(
            ThresholdRates(
                limit, float((said.shares[own] >= limit).mean()), float((said.shares[others] < limit).mean())
            )
            for limit in THRESHOLDS
        )
    sensitivity = test.share(said.hit, own)
    patients = None if test.patients is None else positives
    return ClassFigures(name, support, patients, sensitivity, specificity, area, precision, curve)


def _told_cells(counts: Array, hidden: Array) -> tuple[tuple[int | None, ...], ...]:
    return tuple(
        tuple(None if hidden[row, column] else int(counts[row, column]) for column in range(len(counts)))
        for row in range(len(counts))
    )


def _joined(bins: Sequence[Bin], limit: int) -> tuple[Bin, ...]:
    """Neighbouring bins together until each holds at least `limit` images; the totals stay the same."""
    joined: list[Bin] = []
    for one in bins:
        if joined and (joined[-1].count < limit or one.count < limit):
            joined[-1] = join(joined[-1], one)
        else:
            joined.append(one)
    return tuple(joined)


def join(one: Bin, other: Bin) -> Bin:
    """Two bins as one."""
    count = one.count + other.count

    def mean(a: float, b: float) -> float:
        return (a * one.count + b * other.count) / count

    return Bin(count, mean(one.confidence, other.confidence), mean(one.accuracy, other.accuracy))
