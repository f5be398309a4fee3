"""The results of the finished cells of a study, by place and row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneflare.errors import RunError
from oneflare.simulation.files import RunFiles
from oneflare.simulation.results import FusionResult
from oneflare.simulation.stages import Result, read_result
from oneflare.simulation.steady import Steady
from oneflare.study.answers import read_answers
from oneflare.study.cells import Cell, Place, StudyPlan
from oneflare.study.verdicts import Difference, difference

DIGITS = 6
Trace = list[dict[str, float]]


@dataclass(frozen=True)
class Finished:
    """One finished cell under one fusion."""

    seed: int
    cell: Cell
    result: Result
    fusion: str
    last_alone: bool = False
    """whether the last checkpoint counts alone, also where others are there"""

    @property
    def metrics(self) -> FusionResult:
        return self.result.fusions[self.fusion]

    @property
    def accuracy(self) -> float:
        """The mean of the last checkpoints where the scale asks for them, else that of the end."""
        return self.metrics.accuracy if self._steady is None else self._steady.accuracy

    @property
    def checkpoints(self) -> int:
        """of which `accuracy` is the mean"""
        return 1 if self._steady is None else self._steady.checkpoints

    @property
    def _steady(self) -> Steady | None:
        return None if self.last_alone else self.metrics.steady

    @property
    def peak(self) -> float:
        return max(point.accuracy for point in self.metrics.history)

    def diagnostic(self, name: str) -> float | None:
        """A measure of the uploads' geometry; None where the run has none."""
        measured = self.result.content.diagnostics
        return None if measured is None else measured.figure(name)

    def traces(self) -> list[tuple[int, Trace]]:
        files = RunFiles(self.result.folder)
        return [(client, files.client(client).read_trace()) for client in self.result.content.fused_clients]

    def right(self) -> NDArray[Any] | None:
        """`(images,)` whose mean is `accuracy`: which test images are classified correctly, or at what part of the
        checkpoints; None where answers are not kept."""
        return read_answers(self.result.folder, self.fusion) if self._steady is None else self._steady.shares()

    @property
    def aligned(self) -> bool:
        return bool(self.cell.experiment.controller["name"] != "none")


class Findings:
    """The finished cells of a plan, by place and row."""

    def __init__(self, plan: StudyPlan, runs: Path) -> None:
        self.plan = plan
        self.runs = runs
        self.rows = {row.id: row for row in plan.declaration.rows()}
        self._results: dict[str, Result | None] = {}

    def result(self, cell: Cell) -> Result | None:
        name = cell.name
        if name not in self._results:
            try:
                self._results[name] = read_result(cell.folder(self.runs))
            except RunError:
                self._results[name] = None
        return self._results[name]

    def at(self, place: Place, row: str, first: int | None = None) -> list[Finished]:
        """In the order of seeds, the first so many (default: all); those that are missing are left out."""
        wanted = self.rows[row]
        found = []
        for seed in self.plan.seeds[:first]:
            cell = self.plan.cell(place, wanted.arm, seed)
            result = self.result(cell)
            spec = next(spec for spec in cell.experiment.fusions if spec["name"] == wanted.fusion)
            metrics = None if result is None else result.fusions.get(wanted.fusion)
            if result is not None and metrics is not None and metrics.made_with(spec):
                found.append(Finished(seed, cell, result, wanted.fusion))
        return found

    def paired(self, place: Place, row: str, than: str, first: int | None = None) -> list[tuple[Finished, Finished]]:
        """By seed. Where one of a pair has its last checkpoint alone, the other's counts alone as well."""
        others = {other.seed: other for other in self.at(place, than, first)}
        pairs = [(one, others[one.seed]) for one in self.at(place, row, first) if one.seed in others]
        return [
            pair
            if pair[0].checkpoints == pair[1].checkpoints
            else (replace(pair[0], last_alone=True), replace(pair[1], last_alone=True))
            for pair in pairs
        ]

    def difference(self, place: Place, row: str, than: str, first: int | None = None) -> Difference | None:
        """Of accuracies, as parts of 1."""
        pairs = self.paired(place, row, than, first)
        if not pairs:
            return None
        answers = [_gaps(one, other) for one, other in pairs]
        gaps = [gap for gap in answers if gap is not None]
        kept = np.stack(gaps) if len(gaps) == len(pairs) and len({len(gap) for gap in gaps}) == 1 else None
        return difference([one.accuracy - other.accuracy for one, other in pairs], kept)


def _gaps(one: Finished, other: Finished) -> NDArray[np.float32] | None:
    """`(images,)` whose mean is the difference of their accuracies; None where answers are not kept."""
    ours, theirs = one.right(), other.right()
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    return ours.astype(np.float32) - theirs.astype(np.float32)


def rounded(value: Any) -> Any:
    """Floats to a few significant digits: enough for any table, and files that a person can compare.

    What is left of a difference of equal figures by the computer's arithmetic is nothing.
    """
    if isinstance(value, float):
        return 0.0 if abs(value) < 1e-15 else float(f"{value:.{DIGITS}g}")
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value
