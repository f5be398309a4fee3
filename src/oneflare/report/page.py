"""One HTML file that opens from disk: tables, figures, configuration."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from oneflare.errors import RunError
from oneflare.files import write_text
from oneflare.report import figures
from oneflare.stages import Result, RunFiles, read_experiment, read_result
from oneflare.study import Comparison
from oneflare.study.compare import FILE, read_comparison


def write_report(folder: Path) -> Path:
    """The page of a run or of a comparison, whichever the folder holds."""
    if (folder / FILE).exists():
        return write_comparison(read_comparison(folder))
    if not folder.is_dir():
        raise RunError(f"no folder at {folder}")
    result = read_result(folder)
    path = RunFiles(folder).report
    write_text(path, _render("OneFlare run", None, [_section(result, result.content["method"])]))
    return path


def write_comparison(comparison: Comparison) -> Path:
    sections = [
        _section(comparison.results[method][0], f"{method}, seed {comparison.seeds[0]}")
        for method in comparison.methods
    ]
    path = comparison.folder / "report.html"
    write_text(path, _render("OneFlare comparison", _comparison_table(comparison), sections))
    return path


def _render(title: str, comparison: dict[str, Any] | None, sections: Sequence[dict[str, Any]]) -> str:
    from jinja2 import Environment

    source = resources.files("oneflare.report").joinpath("page.html.j2").read_text()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(title=title, comparison=comparison, sections=sections)


def _comparison_table(comparison: Comparison) -> dict[str, Any]:
    rows = []
    for method in comparison.methods:
        cells = []
        for fusion in comparison.fusions:
            cell = comparison.cell(method, fusion)
            gap = comparison.difference(method, fusion)
            cells.append(
                {
                    "mean": None if cell is None else 100 * cell.mean,
                    "std": None if cell is None or len(cell.accuracies) < 2 else 100 * cell.std,
                    "gap": None if gap is None or method == comparison.methods[0] else 100 * gap[0],
                    "own": comparison.own_fusion(method) == fusion,
                }
            )
        rows.append({"method": method, "cells": cells})
    return {
        "fusions": comparison.fusions,
        "rows": rows,
        "seeds": len(comparison.seeds),
        "first": comparison.methods[0],
    }


def traces_of(result: Result) -> dict[int, list[dict[str, float]]]:
    """The traces of the clients that took part."""
    files = RunFiles(result.folder)
    return {client: files.client(client).read_trace() for client in result.content["fused_clients"]}


def _section(result: Result, title: str) -> dict[str, Any]:
    content = result.content
    traces = traces_of(result)
    experiment = read_experiment(result.folder)
    controller = experiment.controller
    aligned = any(row["lambda_raw_max"] > 0 for rows in traces.values() for row in rows)
    bound = controller.get("lambda_max") if controller.get("valve", 0) != 0 else None
    curves = {
        name: ([point["epoch"] for point in row["history"]], [point["accuracy"] for point in row["history"]])
        for name, row in result.fusions.items()
    }
    return {
        "title": title,
        "content": content,
        "headline": result.headline,
        "fusions": result.fusions,
        "accuracy_figure": figures.accuracy_over_checkpoints(curves),
        "has_history": any(len(epochs) > 1 for epochs, _ in curves.values()),
        "lambda_figure": (figures.lambda_curves(traces, bound) if aligned else None),
        "client_figure": figures.client_class_picture(content["partition"]["table"], content["data"]["classes"]),
        "configuration": experiment.to_yaml(),
    }
