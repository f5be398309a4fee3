"""Keeps the figures of finished cells, one small file each, so that they outlive the machine that made them.

A file `<cell>.json` holds what studies read: the experiment, its result, the answers to the test images and the
lambdas of every epoch, but neither uploads nor models. A study that finds it does not run the cell again, on any
machine; a fusion that the file lacks needs a new training.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oneflare.client.files import ClientFiles
from oneflare.core.config import Experiment
from oneflare.core.files import read_json, write_json, write_text
from oneflare.core.records import parse_record
from oneflare.errors import RunError
from oneflare.simulation.files import RunFiles
from oneflare.simulation.results import RunResult
from oneflare.simulation.stages import read_experiment
from oneflare.study.answers import FILE as ANSWERS
from oneflare.study.answers import has_answers
from oneflare.study.cells import Cell, cell_name
from oneflare.study.findings import rounded

SCHEMA = 1
REMEDY = "delete the file; the cell is then run again"
LAMBDAS = ("epoch", "lambda_raw", "lambda_raw_max", "lambda_effective")
"""columns of a trace that studies read"""


@dataclass(frozen=True)
class KeptCell:
    """The figures of one finished cell."""

    schema: int
    experiment: dict[str, Any]
    partition: dict[str, Any]
    result: dict[str, Any]
    """as in `result.json`"""
    answers: dict[str, Any]
    """by fusion: one bit for each test image, as in `answers.json`"""
    traces: dict[str, list[dict[str, float]]]
    """by client: the lambdas of every epoch; empty where nothing is aligned"""
    machine: dict[str, str]
    """where it was run"""


def keep_figures(cell: Cell, runs: Path, archive: Path) -> None:
    """Write the file of a finished cell; a file that is there is replaced."""
    files = RunFiles(cell.folder(runs))
    result = RunResult.read(files.result)
    asked = {name: row for name, row in result.fusions.items() if has_answers(files.folder, name, row)}
    result = replace(result, fusions=asked)  # a stop may have come between a fusion and its answers
    aligned = cell.experiment.controller["name"] != "none"
    content = {
        "schema": SCHEMA,
        "experiment": read_experiment(files.folder).model_dump(mode="json"),
        "partition": read_json(files.partition),
        "result": result.to_dict(),
        "answers": read_json(files.folder / ANSWERS),
        "traces": {str(client): _lambdas(files.client(client)) for client in result.fused_clients if aligned},
        "machine": _machine(),
    }
    write_text(archive / f"{cell.name}.json", _one_line(content))


def keep_missing(cells: Iterable[Cell], runs: Path, archive: Path) -> None:
    """Write the files of finished cells that have none."""
    for cell in cells:
        if not (archive / f"{cell.name}.json").exists():
            keep_figures(cell, runs, archive)


def take_figures(cells: Iterable[Cell], runs: Path, archive: Path) -> int:
    """Lay the kept figures of cells that were not run here into the folder of runs; returns how many cells."""
    taken = 0
    for cell in cells:
        path = archive / f"{cell.name}.json"
        if path.exists() and not RunFiles(cell.folder(runs)).experiment.exists():
            _lay_down(_read(path), cell.folder(runs))
            taken += 1
    return taken


def _read(path: Path) -> KeptCell:
    content = read_json(path, REMEDY)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise RunError(f"{path} does not hold the figures of a cell (schema {SCHEMA}); {REMEDY}")
    kept = parse_record(KeptCell, content, str(path), REMEDY)
    parse_record(RunResult, kept.result, f"{path}: result", REMEDY)
    if cell_name(Experiment.model_validate(kept.experiment)) != path.stem:
        raise RunError(f"{path} holds the figures of another cell than its name says; {REMEDY}")
    return kept


def _lay_down(kept: KeptCell, folder: Path) -> None:
    """The experiment comes last: without it the folder is no run, and a killed process leaves nothing behind."""
    files = RunFiles(folder)
    for client, rows in kept.traces.items():
        write_text(files.client(int(client)).trace, "".join(_one_line(row) for row in rows))
    write_json(files.partition, kept.partition)
    write_json(folder / ANSWERS, kept.answers)
    write_json(files.result, kept.result)
    write_text(files.experiment, Experiment.model_validate(kept.experiment).to_yaml())


def _one_line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def _lambdas(client: ClientFiles) -> list[dict[str, float]]:
    return [{name: rounded(row[name]) for name in LAMBDAS if name in row} for row in client.read_trace()]


def _machine() -> dict[str, str]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": str(torch.__version__), "python": platform.python_version(), "instructions": capability}
