"""Collects the results of a study from its finished cells, and writes them to `results/<study>/<scale>.json`."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from oneflare._version import FUSION_ARITHMETIC, TRAINING_ARITHMETIC, __version__
from oneflare.core.files import write_text
from oneflare.methods.recipes import find_method
from oneflare.study.cells import Place, StudyPlan
from oneflare.study.claims import judge_claims
from oneflare.study.declare import ArmRow
from oneflare.study.findings import Findings, Finished, Trace, rounded
from oneflare.study.markdown import to_markdown
from oneflare.study.records import (
    SCHEMA,
    Arithmetic,
    CellCost,
    CellResult,
    DifferenceResult,
    FigureResult,
    HistoryPoint,
    LambdaResult,
    LambdaTrace,
    LogResult,
    PeakResult,
    PlaceResult,
    Provenance,
    RowResult,
    StudyResult,
)
from oneflare.study.verdicts import RULE


def collect(plan: StudyPlan, runs: Path) -> StudyResult:
    """Everything the finished cells show; runs: the folder of the cells."""
    declaration, findings = plan.declaration, Findings(plan, runs)
    drawn = any(figure.kind == "lambda" for figure in declaration.figures)
    cells = [_cell(findings, place, row, with_traces=drawn) for place in plan.places for row in declaration.rows()]
    return StudyResult(
        schema=SCHEMA,
        study=declaration.name,
        title=declaration.title,
        question=declaration.question,
        note=declaration.note,
        scale=plan.scale.name,
        scale_summary=plan.summary,
        rule=RULE,
        seeds=tuple(sorted({*plan.first_seeds, *(seed for cell in cells for seed in cell.seeds)})),
        looks=plan.looks,
        complete=not any(cell.missing for cell in cells),
        baseline=declaration.baseline,
        places=tuple(_place(findings, place) for place in plan.places),
        rows=tuple(_row(plan, row) for row in declaration.rows()),
        cells=tuple(cells),
        claims=judge_claims(findings),
        log=tuple(LogResult(reference.settings, reference.values) for reference in declaration.log),
        figures=tuple(
            FigureResult(figure.kind, figure.title, figure.arms, figure.data, figure.alpha)
            for figure in declaration.figures
        ),
        settings=_settings(plan),
        provenance=_provenance(findings),
    )


def write_results(content: StudyResult, folder: Path) -> Path:
    """`<folder>/<study>/<scale>.json` and the Markdown made from it."""
    path = folder / content.study / f"{content.scale}.json"
    content.write(path)
    write_text(path.with_suffix(".md"), to_markdown(StudyResult.read(path)))
    return path


def _place(findings: Findings, place: Place) -> PlaceResult:
    """With the images of the first finished run there."""
    cells = (cell for (where, _, _), cell in findings.plan.cells.items() if where == place.id)
    result = next((result for result in map(findings.result, cells) if result is not None), None)
    train, test = (None, None) if result is None else (result.content.data.train, result.content.data.test)
    return PlaceResult(place.id, place.data, place.alpha, place.clients, train, test)


def _row(plan: StudyPlan, row: ArmRow) -> RowResult:
    arm = plan.declaration.arms[row.arm]
    settings = {**arm.settings, **arm.scales.get(plan.scale.name, {})}
    method = find_method(arm.method)
    return RowResult(
        id=row.id,
        arm=row.arm,
        label=row.label,
        method=method.name,
        version=method.version,
        fusion=row.fusion,
        settings=settings,
    )


def _settings(plan: StudyPlan) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        place.id: {
            arm: {key: value for key, value in plan.cell(place, arm, plan.seeds[0]).layer.items() if key != "seed"}
            for arm in plan.declaration.arms
        }
        for place in plan.places
    }


def _cell(findings: Findings, place: Place, row: ArmRow, *, with_traces: bool) -> CellResult:
    plan = findings.plan
    found = findings.at(place, row.id)
    seeds = tuple(one.seed for one in found)
    accuracies = [one.accuracy for one in found]
    peaks = [one.peak for one in found]
    aligned = bool(found) and all(one.aligned for one in found)
    return CellResult(
        place=place.id,
        row=row.id,
        method=find_method(plan.declaration.arms[row.arm].method).name,
        fusion=row.fusion,
        data=place.data,
        alpha=place.alpha,
        clients=place.clients,
        seeds=seeds,
        missing=tuple(seed for seed in plan.first_seeds if seed not in seeds),
        runs=tuple(str(one.result.folder.relative_to(findings.runs)) for one in found),
        accuracies=_rounded(accuracies),
        mean=_mean(accuracies) if found else None,
        std=rounded(statistics.stdev(accuracies)) if len(found) > 1 else None,
        difference=_difference(findings, place, row),
        balanced=_mean(one.metrics.balanced_accuracy for one in found) if found else None,
        worst_class=_mean(one.metrics.worst_class for one in found) if found else None,
        calibration_error=_mean(one.metrics.calibration_error for one in found) if found else None,
        per_class=_per_class(found) if found else None,
        peak=PeakResult(_rounded(peaks), _mean(peaks)) if found else None,
        history=_history(found),
        diagnostics=_diagnostics(found) if found else None,
        lambda_=_lambda(found, with_traces) if aligned else None,
        cost=_cost(found) if found else None,
    )


def _difference(findings: Findings, place: Place, row: ArmRow) -> DifferenceResult | None:
    baseline = findings.plan.declaration.baseline
    against = None if row.id == baseline else findings.difference(place, row.id, baseline)
    if against is None:
        return None
    return DifferenceResult(
        values=_rounded(against.values),
        mean=rounded(against.mean),
        std=rounded(against.std),
        interval=None if against.interval is None else (rounded(against.interval[0]), rounded(against.interval[1])),
        interval_over="seeds and images" if against.over_images else "seeds",
        p_above=rounded(against.p_value(0.0, "above")),
        seeds=tuple(one.seed for one, _ in findings.paired(place, row.id, baseline)),
    )


def _per_class(found: Sequence[Finished]) -> tuple[float | None, ...]:
    columns = [
        [value for value in column if value is not None]
        for column in zip(*(one.metrics.per_class for one in found), strict=True)
    ]
    return tuple(_mean(column) if column else None for column in columns)


def _cost(found: Sequence[Finished]) -> CellCost:
    return CellCost(
        train_seconds=_mean(one.result.content.cost.train_seconds for one in found),
        upload_bytes=_mean(one.result.content.cost.upload_bytes for one in found),
        forward_passes=found[0].metrics.forward_passes,
        parameters=found[0].metrics.parameters,
        fuse_seconds=_mean(one.metrics.fuse_seconds for one in found),
    )


def _history(found: Sequence[Finished]) -> tuple[HistoryPoint, ...]:
    points = []
    for column in zip(*(one.metrics.history for one in found), strict=True):
        accuracies = [point.accuracy for point in column]
        points.append(HistoryPoint(column[0].epoch, _rounded(accuracies), _mean(accuracies)))
    return tuple(points)


def _diagnostics(found: Sequence[Finished]) -> dict[str, tuple[float, ...]] | None:
    measured = [one.result.content.diagnostics.to_dict() for one in found if one.result.content.diagnostics is not None]
    if len(measured) < len(found):
        return None
    names = [name for name in measured[0] if all(isinstance(one[name], int | float) for one in measured)]
    return {name: _rounded([one[name] for one in measured]) for name in names}


def _lambda(found: Sequence[Finished], with_traces: bool) -> LambdaResult:
    traces = [(one.seed, client, trace) for one in found for client, trace in one.traces()]

    def largest(value: Callable[[Trace], float]) -> tuple[float, ...]:
        return _rounded([max(value(trace) for seed, _, trace in traces if seed == one.seed) for one in found])

    drawn = (
        LambdaTrace(
            seed,
            client,
            tuple(int(row["epoch"]) for row in trace),
            _rounded([row["lambda_raw"] for row in trace]),
            _rounded([row["lambda_effective"] for row in trace]),
        )
        for seed, client, trace in traces
    )
    return LambdaResult(
        largest_raw=largest(lambda trace: max(row["lambda_raw_max"] for row in trace)),
        last_raw=largest(lambda trace: trace[-1]["lambda_raw"]),
        last_effective=largest(lambda trace: trace[-1]["lambda_effective"]),
        traces=tuple(drawn) if with_traces else None,
    )


def _provenance(findings: Findings) -> Provenance:
    import torch

    finished = {cell.name: findings.result(cell) for cell in findings.plan.cells.values()}
    seconds = sum(result.content.cost.train_seconds for result in finished.values() if result is not None)
    return Provenance(
        oneflare=__version__,
        arithmetic=Arithmetic(TRAINING_ARITHMETIC, FUSION_ARITHMETIC),
        torch=str(torch.__version__),
        python=platform.python_version(),
        machine=platform.machine(),
        train_seconds=round(seconds, 1),
    )


def _mean(values: Iterable[float]) -> float:
    return float(rounded(statistics.fmean(values)))


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(rounded(list(values)))
