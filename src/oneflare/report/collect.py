"""Makes the story of a run or of a comparison from its files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oneflare.report import lead
from oneflare.report.details import mean_lambda, run_details, traces_of
from oneflare.report.story import Curve, Gap, LambdaCurve, Panel, Row, Story, curve_of
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import Result
from oneflare.study import Comparison
from oneflare.study.verdicts import difference

DETAIL_BYTES = 2_000_000
"""of JSON for single runs; what does not fit is left out and counted"""


def run_story(result: Result) -> Story:
    """The fusions of one run's uploads against each other."""
    method = result.content.method
    return Story(
        kind="run",
        title=f"{method} on {result.content.data.name}",
        page=RunFiles(result.folder).report,
        lead=lead.of_run(result),
        facts=facts_of([result]),
        panels=[panel_of(setting_of(result), {method: [result]}, method)],
        runs=[run_details(result, run_label(result), 0)],
        methods={method: method},
        all_runs=1,
    )


def comparison_story(comparison: Comparison) -> Story:
    """Methods on shared partitions."""
    results = {method: list(runs) for method, runs in comparison.results.items()}
    first = comparison.results[comparison.methods[0]][0]
    panel = panel_of(setting_of(first), results, comparison.methods[0])
    by_seed = [run for runs in zip(*results.values(), strict=True) for run in runs]
    return Story(
        kind="comparison",
        title=f"{lead.listed(list(comparison.methods))} on {first.content.data.name}",
        page=RunFiles(comparison.folder).report,
        lead=lead.of_panel(panel, first),
        facts=facts_of(by_seed),
        panels=[panel],
        runs=bounded((run, run_label(run), 0) for run in by_seed),
        methods={method: method for method in comparison.methods},
        all_runs=len(by_seed),
    )


def run_label(result: Result, name: str | None = None) -> str:
    return f"{name or result.content.method}, seed {result.content.seed}"


def setting_of(result: Result) -> str:
    content = result.content
    return f"{content.data.name}, {content.partition.skew}, {content.partition.clients} clients"


def facts_of(results: Sequence[Result]) -> dict[str, str]:
    """The frame in a few words; what varies is listed."""

    def over(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values))

    contents = [result.content for result in results]
    return {
        "data": over(content.data.name for content in contents),
        "training images": over(f"{content.data.train:,}" for content in contents),
        "test images": over(f"{content.data.test:,}" for content in contents),
        "clients": over(content.partition.clients for content in contents),
        "split": over(content.partition.skew for content in contents),
        "encoder": over(content.encoder["name"] for content in contents),
        "epochs": over(content.epochs for content in contents),
        "seeds": over(content.seed for content in contents),
    }


def panel_of(title: str, results: Mapping[str, list[Result]], baseline: str) -> Panel:
    """Every method and fusion that all seeds have; gaps to the baseline: own against own, others like with like."""
    rows: list[Row] = []
    curves: list[Curve] = []
    own_baseline = results[baseline][0].headline
    for label, runs in results.items():
        for fusion in runs[0].fusions:
            if any(fusion not in run.fusions for run in runs):
                continue
            own = fusion == runs[0].headline
            against = own_baseline if own else fusion
            gap = None if label == baseline else _gap(runs, fusion, results[baseline], against, baseline)
            rows.append(_row(label, fusion, own, runs, gap))
            curves.append(_curve(label, fusion, own, runs))
    return Panel(title, baseline, rows, curves, lambdas_of(results))


def _row(label: str, fusion: str, own: bool, runs: Sequence[Result], gap: Gap | None) -> Row:
    figures = [run.fusions[fusion] for run in runs]
    accuracies = [row.accuracy for row in figures]

    centre, std = statistics.fmean(accuracies), statistics.stdev(accuracies) if len(accuracies) > 1 else None
    low, high = lead.wilson(centre, runs[0].content.data.test) if std is None else (centre - std, centre + std)
    return Row(
        label,
        fusion,
        own,
        seeds=[run.content.seed for run in runs],
        accuracies=accuracies,
        mean=centre,
        std=std,
        low=low,
        high=high,
        gap=gap,
        balanced=statistics.fmean(row.balanced_accuracy for row in figures),
        worst_class=statistics.fmean(row.worst_class for row in figures),
        calibration_error=statistics.fmean(row.calibration_error for row in figures),
        passes=figures[0].forward_passes,
        parameters=figures[0].parameters,
        train_seconds=statistics.fmean(run.content.cost.train_seconds for run in runs),
        upload_bytes=statistics.fmean(run.content.cost.upload_bytes for run in runs),
        fuse_seconds=statistics.fmean(row.fuse_seconds for row in figures),
    )


def _gap(runs: Sequence[Result], fusion: str, others: Sequence[Result], other_fusion: str, name: str) -> Gap | None:
    if any(other_fusion not in other.fusions for other in others):
        return None
    pairs = zip(runs, others, strict=True)
    values = [run.fusions[fusion].accuracy - other.fusions[other_fusion].accuracy for run, other in pairs]
    return Gap.of(name, difference(values))


def _curve(label: str, fusion: str, own: bool, runs: Sequence[Result]) -> Curve:
    histories = [run.fusions[fusion].history for run in runs]
    epochs = [point.epoch for point in histories[0]]
    return curve_of(label, fusion, own, epochs, [[point.accuracy for point in history] for history in histories])


def lambdas_of(results: Mapping[str, Sequence[Result]]) -> list[LambdaCurve]:
    """Of the methods that are aligned at all."""
    curves = []
    for label, runs in results.items():
        found = mean_lambda(label, [trace for run in runs for trace in traces_of(run).values()])
        if found is not None:
            curves.append(found)
    return curves


def bounded(runs: Iterable[tuple[Result, str, int]], most: int = DETAIL_BYTES) -> list[dict[str, Any]]:
    """Details of as many runs as fit; the given order puts the most wanted first, the page lists them by method."""
    kept: list[dict[str, Any]] = []
    size = 0
    for result, label, panel in runs:
        details = run_details(result, label, panel)
        size += len(json.dumps(details))
        if kept and size > most:
            break
        kept.append(details)
    order = {label: number for number, label in enumerate(dict.fromkeys(run["name"] for run in kept))}
    return sorted(kept, key=lambda run: (run["panel"], order[run["name"]], run["seed"]))
