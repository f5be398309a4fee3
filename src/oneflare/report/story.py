"""What a page tells, as plain data: a run, a comparison and a study all become a `Story`, and the page knows only that."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oneflare.report import lead
from oneflare.report.details import run_details
from oneflare.stages import Result
from oneflare.study import Comparison

DETAIL_BYTES = 2_400_000
"""of JSON for single runs; what does not fit is left out and counted"""


@dataclass(frozen=True)
class Verdict:
    """One claim, tested."""

    name: str
    claim: str
    verdict: str
    """confirmed | refuted | undecided"""
    evidence: str
    reference: str = ""
    """what the research log reports, with its settings; never mixed with ours"""


@dataclass(frozen=True)
class Gap:
    """A paired difference over seeds."""

    against: str
    mean: float
    low: float | None
    high: float | None
    """bootstrap interval; None with one seed"""


@dataclass(frozen=True)
class Row:
    """One method under one fusion: an accuracy per seed."""

    label: str
    fusion: str
    own: bool
    accuracies: list[float]
    mean: float
    std: float | None
    gap: Gap | None = None
    reference: str = ""


@dataclass(frozen=True)
class Curve:
    """Simulated fusion at checkpoints, over seeds; only the last point is the real system."""

    label: str
    fusion: str
    own: bool
    epochs: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    peak: float
    """mean over seeds of each seed's best checkpoint: shown beside the final value, never instead of it"""


@dataclass(frozen=True)
class Panel:
    """One setting in which methods meet: same data, same partitions."""

    title: str
    baseline: str
    rows: list[Row]
    curves: list[Curve]
    note: str = ""

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(row.label for row in self.rows))

    @property
    def fusions(self) -> list[str]:
        return list(dict.fromkeys(row.fusion for row in self.rows))

    def row(self, label: str, fusion: str) -> Row | None:
        return next((row for row in self.rows if (row.label, row.fusion) == (label, fusion)), None)

    @property
    def own(self) -> list[Row]:
        """Each method under its own fusion."""
        return [row for row in self.rows if row.own]

    def curve(self, label: str, fusion: str) -> Curve | None:
        return next((curve for curve in self.curves if (curve.label, curve.fusion) == (label, fusion)), None)


@dataclass(frozen=True)
class Story:
    kind: str
    """run | comparison | study"""
    title: str
    folder: Path
    lead: list[str]
    facts: dict[str, str]
    panels: list[Panel]
    runs: list[dict[str, Any]]
    all_runs: int
    verdicts: list[Verdict] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    """provenance of the whole, beside that of single runs"""

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self)
        content.pop("folder")
        return content


def run_story(result: Result) -> Story:
    """The fusions of one run's uploads against each other."""
    method = result.content["method"]
    panel = panel_of(setting_of(result), {method: [result]}, method)
    return Story(
        kind="run",
        title=f"{method} on {result.content['data']['name']}",
        folder=result.folder,
        lead=lead.of_run(result),
        facts=facts_of([result]),
        panels=[panel],
        runs=[run_details(result, run_label(result), 0)],
        all_runs=1,
    )


def comparison_story(comparison: Comparison) -> Story:
    """Methods on shared partitions."""
    results = {method: list(runs) for method, runs in comparison.results.items()}
    first = comparison.results[comparison.methods[0]][0]
    panel = panel_of(setting_of(first), results, comparison.methods[0])
    everyone = [run for runs in zip(*results.values(), strict=True) for run in runs]
    return Story(
        kind="comparison",
        title=f"{lead.listed(list(comparison.methods))} on {first.content['data']['name']}",
        folder=comparison.folder,
        lead=lead.of_panel(panel, first, len(comparison.seeds)),
        facts=facts_of(everyone),
        panels=[panel],
        runs=bounded((run, run_label(run), 0) for run in everyone),
        all_runs=len(everyone),
    )


def run_label(result: Result) -> str:
    return f"{result.content['method']}, seed {result.content['seed']}"


def setting_of(result: Result) -> str:
    content = result.content
    return f"{content['data']['name']}, {content['partition']['clients']} clients, {skew_of(content['partition'])}"


def skew_of(partition: dict[str, Any]) -> str:
    return f"{partition['kind']}({partition['alpha']:g})" if partition["alpha"] is not None else str(partition["kind"])


def facts_of(results: Sequence[Result]) -> dict[str, str]:
    """The frame in a few words; what varies is listed."""

    def over(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values))

    contents = [result.content for result in results]
    return {
        "data": over(content["data"]["name"] for content in contents),
        "training images": over(f"{content['data']['train']:,}" for content in contents),
        "test images": over(f"{content['data']['test']:,}" for content in contents),
        "clients": over(content["partition"]["clients"] for content in contents),
        "split": over(skew_of(content["partition"]) for content in contents),
        "encoder": over(content["encoder"]["name"] for content in contents),
        "epochs": over(content["epochs"] for content in contents),
        "seeds": over(content["seed"] for content in contents),
    }


def panel_of(title: str, results: dict[str, list[Result]], baseline: str) -> Panel:
    """Every method and fusion that all seeds have; gaps to the baseline under the same fusion, own against own."""
    rows: list[Row] = []
    curves: list[Curve] = []
    own_baseline = results[baseline][0].headline
    for label, runs in results.items():
        for fusion in runs[0].fusions:
            accuracies = accuracies_of(runs, fusion)
            if accuracies is None:
                continue
            own = fusion == runs[0].headline
            against = accuracies_of(results[baseline], own_baseline if own else fusion)
            gap = None if label == baseline or against is None else gap_of(baseline, accuracies, against)
            rows.append(Row(label, fusion, own, accuracies, statistics.fmean(accuracies), spread(accuracies), gap))
            curves.append(_curve(label, fusion, own, runs))
    return Panel(title, baseline, rows, curves)


def accuracies_of(runs: Sequence[Result], fusion: str) -> list[float] | None:
    if any(fusion not in run.fusions for run in runs):
        return None
    return [float(run.fusions[fusion]["accuracy"]) for run in runs]


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds (n - 1); None with one."""
    return statistics.stdev(values) if len(values) > 1 else None


def gap_of(against: str, ours: Sequence[float], theirs: Sequence[float]) -> Gap:
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return Gap(against, statistics.fmean(differences), None, None)


def _curve(label: str, fusion: str, own: bool, runs: Sequence[Result]) -> Curve:
    histories = [run.fusions[fusion]["history"] for run in runs]
    epochs = [point["epoch"] for point in histories[0]]
    values = [[point["accuracy"] for point in history] for history in histories]
    columns = list(zip(*values, strict=True))
    return Curve(
        label,
        fusion,
        own,
        epochs,
        [statistics.fmean(column) for column in columns],
        [min(column) for column in columns],
        [max(column) for column in columns],
        statistics.fmean(max(row) for row in values),
    )


def bounded(runs: Iterable[tuple[Result, str, int]], most: int = DETAIL_BYTES) -> list[dict[str, Any]]:
    """Details of as many runs as fit, in the given order; put first what must be there."""
    kept: list[dict[str, Any]] = []
    size = 0
    for result, label, panel in runs:
        details = run_details(result, label, panel)
        size += len(json.dumps(details))
        if kept and size > most:
            break
        kept.append(details)
    return sorted(kept, key=lambda run: run["panel"])
