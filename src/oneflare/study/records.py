"""Results of a study as typed records: `results/<study>/<scale>.json`, from which every table and page is made.

Accuracies and their differences are parts of 1 (0.406, -0.012), other measures as they are. Fields called by a plural
("accuracies", "runs", ...) hold one entry per seed of the cell, in the order of its "seeds". A name that ends in an
underscore here goes without it in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oneflare.core.files import read_json, write_json
from oneflare.core.records import parse_record, record_to_dict
from oneflare.errors import RunError
from oneflare.study.verdicts import Verdict

SCHEMA = 2
Floats = tuple[float, ...]
Interval = tuple[float, float]


@dataclass(frozen=True)
class PlaceResult:
    """Where methods meet."""

    id: str
    """`cifar10-a0.05-c5`"""
    data: str
    alpha: float
    clients: int
    train_images: int | None = None
    """of all clients together; None, as the one below, while no run is there"""
    test_images: int | None = None


@dataclass(frozen=True)
class RowResult:
    """One line of a study's tables: an arm under one fusion."""

    id: str
    """`fafi`, or `fafi:count_prototypes` under another fusion than the study's main one"""
    arm: str
    label: str
    method: str
    version: str
    """the research log's number of the method ("V7"), or "ours\""""
    fusion: str
    settings: dict[str, Any]
    """of the arm alone"""

    @property
    def main(self) -> bool:
        """whether the fusion is the one that the study tests its claims with"""
        return self.id == self.arm

    @property
    def short_label(self) -> str:
        """without the name of the fusion"""
        return self.label.removesuffix(f", {self.fusion}")


@dataclass(frozen=True)
class DifferenceResult:
    """Against the baseline at the same place, paired by seed."""

    values: Floats
    mean: float
    std: float | None
    interval: Interval | None
    """95 % bootstrap interval of the mean; None with one seed"""
    interval_over: str
    """what the bootstrap draws again: `seeds`, or `seeds and images`"""
    p_above: float | None
    """Student's paired test, one-sided; None with one seed"""
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class PeakResult:
    """Best over checkpoints, chosen on the test set: only ever shown beside the final value."""

    accuracies: Floats
    mean: float


@dataclass(frozen=True)
class HistoryPoint:
    """Fusion as simulated at one checkpoint."""

    epoch: int
    accuracies: Floats
    mean: float


@dataclass(frozen=True)
class LambdaTrace:
    """Lambda of one client over epochs."""

    seed: int
    client: int
    epoch: tuple[int, ...]
    raw: Floats
    effective: Floats


@dataclass(frozen=True)
class LambdaResult:
    """The first three: of each seed, the largest over its clients."""

    largest_raw: Floats
    last_raw: Floats
    last_effective: Floats
    traces: tuple[LambdaTrace, ...] | None
    """None where no figure of the study draws lambda"""


@dataclass(frozen=True)
class CellCost:
    """Means over seeds; training and uploads of all clients together."""

    train_seconds: float
    upload_bytes: float
    forward_passes: int
    parameters: int
    fuse_seconds: float | None = None
    """None in results of the first release"""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One row at one place. What is measured is None while no seed is there."""

    place: str
    row: str
    method: str
    fusion: str
    data: str
    alpha: float
    clients: int
    seeds: tuple[int, ...]
    """that are there"""
    missing: tuple[int, ...]
    """seeds of the first look that are not"""
    runs: tuple[str, ...]
    """folders, relative to the folder of runs"""
    accuracies: Floats
    """at the end of training"""
    mean: float | None
    std: float | None
    """deviation over seeds (n - 1); None with one seed"""
    difference: DifferenceResult | None
    """None for the baseline itself"""
    balanced: float | None
    worst_class: float | None
    calibration_error: float | None
    per_class: tuple[float | None, ...] | None
    """mean over seeds of the share of each class that is recognised"""
    peak: PeakResult | None
    history: tuple[HistoryPoint, ...]
    diagnostics: dict[str, Floats] | None
    """by measure (`g_protos_std`, ...); None where no network was trained"""
    lambda_: LambdaResult | None
    """None where nothing is aligned"""
    cost: CellCost | None

    def __post_init__(self) -> None:
        figures = (self.mean, self.balanced, self.worst_class, self.calibration_error, self.peak, self.cost)
        if self.accuracies and None in figures:
            raise ValueError("a cell with accuracies needs mean, balanced, worst_class, calibration_error, peak, cost")


@dataclass(frozen=True, kw_only=True)
class StatementResult:
    """One number that a claim stands or falls with; values, mean, interval and threshold are in its unit."""

    text: str
    kind: Literal["difference", "trend", "quantity"]
    place: str
    arm: str
    than: str | None
    measure: str
    unit: str
    """`points`, `%`, or nothing for a plain quantity"""
    side: Literal["above", "below"]
    threshold: float
    values: Floats = ()
    """none while no run is there"""
    mean: float | None
    interval: Interval | None
    p_value: float | None
    """of the test behind the verdict, over all looks; while undecided, of the claimed side alone"""
    verdict: Verdict


@dataclass(frozen=True)
class ClaimResult:
    """One claim, tested."""

    id: str
    text: str
    log: str
    """what the research log reports, with its settings"""
    verdict: Verdict
    p_value: float | None
    """of the verdict, over all tests and looks; None while undecided"""
    tests: tuple[StatementResult, ...]
    exploratory: bool = False
    """asked after figures had been seen; not counted among the claims"""
    seeds_wanted: int | None = None
    """of an undecided claim: how many seeds would decide it if means and deviations stayed as they are; None where it
    is decided, or where a thousand would not decide it"""


@dataclass(frozen=True)
class LogResult:
    """Figures of the research log in per cent, by row; they are never mixed with ours."""

    settings: str
    values: dict[str, float | str]


@dataclass(frozen=True)
class FigureResult:
    """What to draw: accuracy (bars with deviations), history, lambda, accuracy over lambda_0 or over clients."""

    kind: Literal["accuracy", "history", "lambda", "sensitivity", "clients"]
    title: str
    arms: tuple[str, ...] | None
    """None: all rows"""
    data: str | None
    alpha: float | None


@dataclass(frozen=True)
class Arithmetic:
    """Versions of OneFlare's arithmetic behind the figures."""

    training: int
    fusion: int


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """With what the study was collected, and how long all its clients trained."""

    oneflare: str
    arithmetic: Arithmetic | None = None
    """None in results of the first release"""
    torch: str
    python: str
    machine: str
    train_seconds: float


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Everything a study has found at one scale."""

    schema: int
    study: str
    title: str
    question: str
    note: str
    scale: str
    scale_summary: str
    """what the scale means, in words"""
    rule: str
    """by which verdicts are reached"""
    seeds: tuple[int, ...]
    """of the first look, which every cell needs, and those that were added while a claim was undecided"""
    looks: tuple[int, ...]
    """numbers of seeds at which verdicts are looked for"""
    complete: bool
    """whether every seed of the first look is there for every cell"""
    baseline: str
    """the row to which differences are taken"""
    places: tuple[PlaceResult, ...]
    rows: tuple[RowResult, ...]
    """in the order of the table"""
    cells: tuple[CellResult, ...]
    claims: tuple[ClaimResult, ...]
    log: tuple[LogResult, ...]
    figures: tuple[FigureResult, ...]
    settings: dict[str, dict[str, dict[str, Any]]]
    """by place and arm: what a user would write, without the seed"""
    provenance: Provenance

    def __post_init__(self) -> None:
        rows, places = {row.id for row in self.rows}, {place.id for place in self.places}
        named = {self.baseline, *(row.arm for row in self.rows), *(cell.row for cell in self.cells)}
        named |= {test.arm for claim in self.claims for test in claim.tests}
        named |= {test.than for claim in self.claims for test in claim.tests if test.than is not None}
        if named - rows:
            raise ValueError(f"the row '{min(named - rows)}' is named but not listed in rows")
        unknown = {cell.place for cell in self.cells} - places
        if unknown:
            raise ValueError(f"the place '{min(unknown)}' is named but not listed in places")
        if {(cell.place, cell.row) for cell in self.cells} != {(place, row) for place in places for row in rows}:
            raise ValueError("cells are not one for every place and row")

    @classmethod
    def read(cls, path: Path) -> StudyResult:
        """The results in a file that `write` wrote."""
        content = read_json(path)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA or "cells" not in content:
            raise RunError(f"{path} is not the result of a study (schema {SCHEMA}); run `oneflare study NAME` again")
        return parse_record(cls, content, str(path), "run `oneflare study NAME` again, which reads the finished runs")

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())

    def measured(self, claim: ClaimResult) -> bool:
        """Whether a claim was put to the test: it has a verdict, or all seeds of the first look for all its tests."""
        return claim.verdict != "undecided" or all(len(test.values) >= self.looks[0] for test in claim.tests)

    def cell(self, place: str, row: str) -> CellResult:
        """By the ids of its place and row."""
        return next(cell for cell in self.cells if (cell.place, cell.row) == (place, row))

    def row(self, name: str) -> RowResult:
        """By its id."""
        return next(row for row in self.rows if row.id == name)

    def to_dict(self) -> dict[str, Any]:
        return record_to_dict(self)
