"""The results of the finished cells of a study, by place and row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oneflare.errors import RunError
from oneflare.simulation.files import RunFiles
from oneflare.simulation.results import FusionResult
from oneflare.simulation.stages import Result, read_result
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

    @property
    def metrics(self) -> FusionResult:
        return self.result.fusions[self.fusion]

    @property
    def accuracy(self) -> float:
        return self.metrics.accuracy

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

    def answers(self) -> Any:
        return read_answers(self.result.folder, self.fusion)

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
        others = {other.seed: other for other in self.at(place, than, first)}
        return [(one, others[one.seed]) for one in self.at(place, row, first) if one.seed in others]

    def difference(self, place: Place, row: str, than: str, first: int | None = None) -> Difference | None:
        """Of accuracies, as parts of 1."""
        pairs = self.paired(place, row, than, first)
        if not pairs:
            return None
        answers = [(one.answers(), other.answers()) for one, other in pairs]
        kept = None
        if all(a is not None and b is not None and len(a) == len(b) for a, b in answers):
            kept = np.stack([a.astype(np.float32) - b.astype(np.float32) for a, b in answers])
        return difference([one.accuracy - other.accuracy for one, other in pairs], kept)


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
