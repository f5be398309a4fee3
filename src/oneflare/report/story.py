"""A `Story`: what a page tells of a run, a comparison or a study, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from oneflare.study.verdicts import Difference, Verdict


@dataclass(frozen=True)
class Test:
    """One number that a claim stands or falls with, in its unit."""

    what: str
    where: str
    """the setting; empty where there is only one"""
    mean: float | None
    """None while no run is there"""
    low: float | None
    high: float | None
    values: list[float]
    """by seed"""
    p_value: float | None
    side: Literal["above", "below"]
    threshold: float
    unit: str
    verdict: Verdict

    @property
    def digits(self) -> str:
        return ".1f" if self.unit else ".3g"

    @property
    def line(self) -> str:
        """`FLARE against FAFI (cifar10, alpha 0.05): +1.2 points [-0.4, +2.9], p 0.08, wanted above 0`"""
        what = f"{self.what} ({self.where})" if self.where else self.what
        parts = ["no run yet" if self.mean is None else f"{self.mean:+{self.digits}} {self.unit}".strip()]
        if self.low is not None and self.high is not None:
            parts[0] += f" [{self.low:+{self.digits}}, {self.high:+{self.digits}}]"
        elif len(self.values) > 1:
            parts[0] += f" (by seed {', '.join(f'{value:.3g}' for value in self.values)})"
        if self.p_value is not None:
            parts.append(f"p {self.p_value:.2g}")
        parts.append(f"wanted {self.side} {self.threshold:g}")
        verdict = "" if self.verdict == "undecided" else f": {self.verdict}"
        return f"{what}: {', '.join(parts)}{verdict}"


@dataclass(frozen=True)
class TestedClaim:
    """One claim, tested."""

    name: str
    claim: str
    verdict: Verdict
    tests: list[Test]
    reference: str = ""
    """what the research log reports, with its settings; never mixed with ours"""

    @property
    def evidence(self) -> list[str]:
        """a line per test"""
        return [test.line for test in self.tests]


@dataclass(frozen=True)
class Gap:
    """A paired difference over seeds, in parts of 1."""

    against: str
    mean: float
    low: float | None
    high: float | None
    """bootstrap interval; None with one seed"""

    @classmethod
    def of(cls, against: str, found: Difference) -> Gap:
        low, high = found.interval or (None, None)
        return cls(against, found.mean, low, high)


@dataclass(frozen=True)
class Row:
    """One method under one fusion; figures are means over seeds."""

    label: str
    fusion: str
    main: bool
    """the method's own fusion, or the one a study tests its claims with"""
    seeds: list[int]
    accuracies: list[float]
    mean: float
    std: float | None
    low: float | None
    high: float | None
    """error bar: a deviation each way over seeds; with one seed, what the size of the test set allows (95 %)"""
    gap: Gap | None
    balanced: float
    worst_class: float
    calibration_error: float
    passes: int
    parameters: int
    train_seconds: float
    upload_bytes: float
    fuse_seconds: float | None = None


@dataclass(frozen=True)
class Curve:
    """Simulated fusion at checkpoints, over seeds; only the last point is the real system."""

    label: str
    fusion: str
    main: bool
    epochs: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    peak: float
    """mean over seeds of each seed's best checkpoint: shown beside the final value, never instead of it"""


@dataclass(frozen=True)
class LambdaCurve:
    """Lambda of one method over epochs: mean over all clients of all seeds, and the largest raw value."""

    label: str
    epochs: list[int]
    raw: list[float | None]
    effective: list[float | None]
    largest: float


@dataclass(frozen=True)
class Panel:
    """One setting in which methods meet: same data, same partitions."""

    title: str
    baseline: str
    rows: list[Row]
    curves: list[Curve]
    lambdas: list[LambdaCurve] = field(default_factory=list)
    note: str = ""

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(row.label for row in self.rows))

    @property
    def fusions(self) -> list[str]:
        return list(dict.fromkeys(row.fusion for row in self.rows))

    @property
    def seeds(self) -> int:
        return max((len(row.seeds) for row in self.rows), default=0)

    @property
    def main(self) -> list[Row]:
        """Each method under its main fusion."""
        return [row for row in self.rows if row.main]

    def row(self, label: str, fusion: str) -> Row | None:
        return next((row for row in self.rows if (row.label, row.fusion) == (label, fusion)), None)

    def main_row(self, label: str) -> Row | None:
        return next((row for row in self.main if row.label == label), None)

    def curve(self, label: str, fusion: str) -> Curve | None:
        return next((curve for curve in self.curves if (curve.label, curve.fusion) == (label, fusion)), None)


@dataclass(frozen=True)
class Sweep:
    """Accuracy over a number that was varied."""

    title: str
    axis: str
    series: list[dict[str, Any]]
    """name, x, mean, std"""
    level: dict[str, Any] | None = None
    """name and mean of what has no such number"""


@dataclass(frozen=True)
class Story:
    kind: Literal["run", "comparison", "study"]
    title: str
    page: Path
    """where the page belongs"""
    lead: list[str]
    facts: dict[str, str]
    panels: list[Panel]
    runs: list[dict[str, Any]]
    all_runs: int
    verdicts: list[TestedClaim] = field(default_factory=list)
    rule: str = ""
    """by which verdicts were reached"""
    log: list[dict[str, Any]] = field(default_factory=list)
    """settings and values by label: the research log's figures in per cent"""
    sweeps: list[Sweep] = field(default_factory=list)
    provenance: dict[str, str] = field(default_factory=dict)
    """of the whole, beside that of single runs"""
    note: str = ""
    question: str = ""
    methods: dict[str, str] = field(default_factory=dict)
    """the name of the recipe by label"""

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for panel in self.panels for label in panel.labels))

    def to_dict(self) -> dict[str, Any]:
        """What the figures are drawn from; texts that the page holds anyway are left out."""
        content = asdict(self)
        content.pop("page")
        for run in content["runs"]:
            run.pop("configuration")
            run.pop("provenance")
        return content


def curve_of(label: str, fusion: str, main: bool, epochs: list[int], values: Sequence[Sequence[float]]) -> Curve:
    """values: per seed, per checkpoint"""
    columns = list(zip(*values, strict=True))
    return Curve(
        label,
        fusion,
        main,
        epochs,
        [statistics.fmean(column) for column in columns],
        [min(column) for column in columns],
        [max(column) for column in columns],
        statistics.fmean(max(row) for row in values),
    )
