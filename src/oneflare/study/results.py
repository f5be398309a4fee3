"""The results of a study in `results/<study>/<scale>.json`: collecting, writing and reading them.

Accuracies and their differences are parts of 1 (0.406, -0.012), other measures as they are. Lists called by a plural
("accuracies", "runs", ...) hold one entry per seed of the cell, in the order of its "seeds". Paths are relative to the
folder of runs. Schema 1:

    schema          1
    study, title, question, note, scale, rule
    scale_summary   what the scale means, in words
    seeds           [0, 1, 2]: the seeds that were asked for
    complete        whether every seed of every cell is there
    baseline        row to which "difference" is taken
    places          [{id, data, alpha, clients}]; id is "cifar10-a0.05-c5"
    rows            [{id, arm, label, method, version, fusion, settings}], in the order of the table;
                    id is "fafi" or "fafi:count_prototypes"; version is the log's number ("V7") or "ours"; settings are
                    those of the arm alone
    cells           [{
                      place, row, method, fusion, data, alpha, clients,
                      seeds, missing               seeds that are there, and those that are not
                      accuracies, mean, std        at the end of training; std (n - 1) is null with one seed
                      difference                   {values, mean, std, interval: [low, high], interval_over, p_above,
                                                   seeds} against the baseline at the same place, paired by seed;
                                                   null for the baseline itself. p_above: Student, one-sided
                      balanced, worst_class, calibration_error, per_class
                                                   means over seeds (per_class: a list over classes)
                      peak                         {accuracies, mean}: best over checkpoints, chosen on the test set,
                                                   only ever shown beside the final value
                      history                      [{epoch, accuracies, mean}]
                      diagnostics                  {g_protos_std: [...], inter_client_proto_std: [...], ...} or null
                      lambda                       {largest_raw, last_raw, last_effective: each a list over seeds of the
                                                   largest over clients; traces: [{seed, client, epoch: [...],
                                                   raw: [...], effective: [...]}] or null where no figure of the study
                                                   draws lambda} or null where nothing is aligned
                      cost                         {train_seconds, upload_bytes, forward_passes, parameters}, means
                      runs                         ["cells/fafi-cifar10-a0.05-s0-0123456789", ...]; each holds
                                                   clients/000/trace.jsonl, partition.json, diagnostics.json, ...
                    }]
    claims          [{id, text, log, verdict, tests: [{text, kind, place, arm, than, measure, unit, side, threshold,
                      values, mean, interval, p_value, verdict}]}]; verdict: confirmed | refuted | undecided;
                      values, mean, interval, threshold in "unit" ("points", "%", or "" for a plain quantity)
    log             [{settings, values: {row: number or text}}]: the log's figures in per cent, never mixed with ours
    figures         [{kind, title, arms, data, alpha}]: what to draw; kind: accuracy (bars with deviations), history,
                    lambda, sensitivity (accuracy over lambda_0), clients (accuracy over the number of clients);
                    arms null: all rows
    settings        {place: {row's arm: the layer a user would write}}, seeds left out
    provenance      {oneflare, arithmetic: {training, fusion}, torch, python, machine, train_seconds}
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflare._version import FUSION_ARITHMETIC, TRAINING_ARITHMETIC, __version__
from oneflare.core.files import read_json, write_json, write_text
from oneflare.methods.recipes import find_method
from oneflare.study.cells import Place, StudyPlan
from oneflare.study.claims import judge_claims
from oneflare.study.declare import ArmRow
from oneflare.study.findings import Findings, Finished, Trace, rounded
from oneflare.study.inference import RULE
from oneflare.study.markdown import to_markdown

SCHEMA = 1


def collect(plan: StudyPlan, runs: Path) -> dict[str, Any]:
    """Everything the schema names, from the cells that are finished."""
    declaration, findings = plan.declaration, Findings(plan, runs)
    drawn = any(figure.kind == "lambda" for figure in declaration.figures)
    cells = [_cell(findings, place, row, with_traces=drawn) for place in plan.places for row in declaration.rows()]
    return {
        "schema": SCHEMA,
        "study": declaration.name,
        "title": declaration.title,
        "question": declaration.question,
        "note": declaration.note,
        "scale": plan.scale.name,
        "scale_summary": plan.summary,
        "rule": RULE,
        "seeds": list(plan.seeds),
        "complete": not any(cell["missing"] for cell in cells),
        "baseline": declaration.baseline,
        "places": [place.to_dict() for place in plan.places],
        "rows": [_row(plan, row) for row in declaration.rows()],
        "cells": cells,
        "claims": judge_claims(findings),
        "log": [reference.model_dump(mode="json") for reference in declaration.log],
        "figures": [figure.model_dump(mode="json") for figure in declaration.figures],
        "settings": _settings(plan),
        "provenance": _provenance(findings),
    }


def write_results(content: Mapping[str, Any], folder: Path) -> Path:
    """`<folder>/<study>/<scale>.json` and the Markdown made from it."""
    path: Path = folder / content["study"] / f"{content['scale']}.json"
    write_json(path, content)
    write_text(path.with_suffix(".md"), to_markdown(read_json(path)))
    return path


def _row(plan: StudyPlan, row: ArmRow) -> dict[str, Any]:
    arm = plan.declaration.arms[row.arm]
    settings = {**arm.settings, **arm.scales.get(plan.scale.name, {})}
    method = find_method(arm.method)
    return {
        "id": row.id,
        "arm": row.arm,
        "label": row.label,
        "method": method.name,
        "version": method.version,
        "fusion": row.fusion,
        "settings": settings,
    }


def _settings(plan: StudyPlan) -> dict[str, dict[str, Any]]:
    return {
        place.id: {
            arm: {key: value for key, value in plan.cell(place, arm, plan.seeds[0]).layer.items() if key != "seed"}
            for arm in plan.declaration.arms
        }
        for place in plan.places
    }


def _cell(findings: Findings, place: Place, row: ArmRow, *, with_traces: bool) -> dict[str, Any]:
    plan = findings.plan
    found = findings.at(place, row.id)
    seeds = [one.seed for one in found]
    content: dict[str, Any] = {
        "place": place.id,
        "row": row.id,
        "method": find_method(plan.declaration.arms[row.arm].method).name,
        "fusion": row.fusion,
        "data": place.data,
        "alpha": place.alpha,
        "clients": place.clients,
        "seeds": seeds,
        "missing": [seed for seed in plan.seeds if seed not in seeds],
        "runs": [str(one.result.folder.relative_to(findings.runs)) for one in found],
        **_spread([one.accuracy for one in found]),
    }
    if not found:
        empty = ("difference", "balanced", "worst_class", "calibration_error", "per_class", "peak", "diagnostics")
        return content | dict.fromkeys((*empty, "lambda", "cost")) | {"history": []}
    baseline = plan.declaration.baseline
    against = None if row.id == baseline else findings.difference(place, row.id, baseline)
    content["difference"] = None
    if against is not None:
        shared = [one.seed for one, _ in findings.paired(place, row.id, baseline)]
        content["difference"] = rounded(against.to_dict()) | {"seeds": shared}
    for name in ("balanced_accuracy", "worst_class", "calibration_error"):
        content[name.removesuffix("_accuracy")] = _mean(float(one.metrics[name]) for one in found)
    content["per_class"] = [
        _mean(value for value in column if value is not None)
        for column in zip(*(one.metrics["per_class"] for one in found), strict=True)
    ]
    peaks = [one.peak for one in found]
    content["peak"] = {"accuracies": rounded(peaks), "mean": _mean(peaks)}
    content["history"] = _history(found)
    content["diagnostics"] = _diagnostics(found)
    content["lambda"] = _lambda(found, with_traces) if all(one.aligned for one in found) else None
    content["cost"] = {
        "train_seconds": _mean(float(one.result.content["cost"]["train_seconds"]) for one in found),
        "upload_bytes": _mean(float(one.result.content["cost"]["upload_bytes"]) for one in found),
        "forward_passes": found[0].metrics["forward_passes"],
        "parameters": found[0].metrics["parameters"],
    }
    return content


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "accuracies": rounded(list(values)),
        "mean": _mean(values),
        "std": rounded(statistics.stdev(values)) if len(values) > 1 else None,
    }


def _history(found: Sequence[Finished]) -> list[dict[str, Any]]:
    points = []
    for column in zip(*(one.metrics["history"] for one in found), strict=True):
        accuracies = [float(point["accuracy"]) for point in column]
        points.append({"epoch": column[0]["epoch"], "accuracies": rounded(accuracies), "mean": _mean(accuracies)})
    return points


def _diagnostics(found: Sequence[Finished]) -> dict[str, list[float]] | None:
    measured = [one.result.content["diagnostics"] for one in found]
    if any(one is None for one in measured):
        return None
    names = [name for name, value in measured[0].items() if isinstance(value, int | float)]
    return {name: rounded([one[name] for one in measured]) for name in names}


def _lambda(found: Sequence[Finished], with_traces: bool) -> dict[str, Any]:
    traces = [(one.seed, client, trace) for one in found for client, trace in one.traces()]

    def largest(value: Callable[[Trace], float]) -> list[float]:
        return [rounded(max(value(trace) for seed, _, trace in traces if seed == one.seed)) for one in found]

    return {
        "largest_raw": largest(lambda trace: max(row["lambda_raw_max"] for row in trace)),
        "last_raw": largest(lambda trace: trace[-1]["lambda_raw"]),
        "last_effective": largest(lambda trace: trace[-1]["lambda_effective"]),
        "traces": [
            {
                "seed": seed,
                "client": client,
                "epoch": [int(row["epoch"]) for row in trace],
                "raw": rounded([row["lambda_raw"] for row in trace]),
                "effective": rounded([row["lambda_effective"] for row in trace]),
            }
            for seed, client, trace in traces
        ]
        if with_traces
        else None,
    }


def _provenance(findings: Findings) -> dict[str, Any]:
    import torch

    finished = {cell.name: findings.result(cell) for cell in findings.plan.cells.values()}
    seconds = sum(float(result.content["cost"]["train_seconds"]) for result in finished.values() if result is not None)
    return {
        "oneflare": __version__,
        "arithmetic": {"training": TRAINING_ARITHMETIC, "fusion": FUSION_ARITHMETIC},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "train_seconds": round(seconds, 1),
    }


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return rounded(statistics.fmean(listed)) if listed else None
