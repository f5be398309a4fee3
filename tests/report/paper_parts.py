"""Results of the paper's studies with figures that are made up, so that tests need not train for hours."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np

from oneflare.report.paper.material import OUTLINE
from oneflare.study.cells import make_plan
from oneflare.study.declare import find_declaration
from oneflare.study.records import (
    CellCost,
    CellResult,
    ClaimResult,
    DifferenceResult,
    HistoryPoint,
    LambdaResult,
    LambdaTrace,
    PeakResult,
    StudyResult,
)
from oneflare.study.results import collect, write_results
from oneflare.study.scales import find_scale
from oneflare.study.verdicts import difference

TEST_IMAGES = {"svhn": 26032}


def finished(cell: CellResult, accuracies: list[float], *, aligned: bool, largest: float = 50.0) -> CellResult:
    """The cell as it would be with these accuracies, one for each seed."""
    mean, seeds = statistics.fmean(accuracies), tuple(range(len(accuracies)))
    epochs = (1, 5, 10, 15, 20, 25)
    rise = [0.4 + 0.6 * (epoch / epochs[-1]) ** 0.5 for epoch in epochs]
    history = tuple(
        HistoryPoint(epoch, tuple(part * value for value in accuracies), part * mean)
        for epoch, part in zip(epochs, rise, strict=True)
    )
    steps = tuple(range(1, 26))
    raw = tuple(5.0 * (largest / 5.0) ** (epoch / 25) for epoch in steps)
    effective = tuple(value * (1 - epoch / 25) for value, epoch in zip(raw, steps, strict=True))
    traces = tuple(LambdaTrace(seed, client, steps, raw, effective) for seed in seeds for client in range(2))
    pulled = LambdaResult((largest,) * len(seeds), (largest,) * len(seeds), (0.0,) * len(seeds), traces)
    return replace(
        cell,
        seeds=seeds,
        missing=tuple(seed for seed in cell.missing if seed not in seeds),
        runs=tuple(f"cells/{seed}" for seed in seeds),
        accuracies=tuple(accuracies),
        mean=mean,
        std=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        balanced=mean,
        worst_class=0.1,
        calibration_error=0.1,
        peak=PeakResult(tuple(accuracies), mean),
        history=history,
        lambda_=pulled if aligned else None,
        cost=CellCost(12.0 + 3 * len(cell.row), 2e5 + 1e4 * len(cell.row), 5, 1000, 0.01 * len(cell.fusion)),
    )


def study_result(study: str, scale: str, runs: Path, seeds: int = 5) -> StudyResult:
    """Every cell with accuracies that are drawn from a seed; no run is there."""
    plan = make_plan(find_declaration(study), find_scale(scale), seeds=seeds, full=scale != "paper")
    empty = collect(plan, runs)
    draw = np.random.default_rng(7)
    cells = []
    for cell in empty.cells:
        aligned = empty.row(cell.row).method in ("flare", "meta_annealed", "floor", "etf_annealed", "autonomous")
        values = [float(value) for value in 0.4 + 0.3 * draw.random() + 0.03 * draw.standard_normal(seeds)]
        largest = 1.77e6 if empty.row(cell.row).method == "meta_annealed" else 50.03
        cells.append(finished(cell, values, aligned=aligned, largest=largest))
    cells = [_against_baseline(cell, cells, empty.baseline) for cell in cells]
    claims = tuple(_tested(claim) for claim in empty.claims)
    places = tuple(replace(place, test_images=TEST_IMAGES.get(place.data, 5000)) for place in empty.places)
    return replace(empty, cells=tuple(cells), claims=claims, places=places, complete=True)


def _against_baseline(cell: CellResult, cells: list[CellResult], baseline: str) -> CellResult:
    if cell.row == baseline:
        return cell
    other = next(one for one in cells if (one.place, one.row) == (cell.place, baseline))
    found = difference([mine - theirs for mine, theirs in zip(cell.accuracies, other.accuracies, strict=True)])
    against = DifferenceResult(found.values, found.mean, found.std, found.interval, "seeds", None, cell.seeds)
    return replace(cell, difference=against)


def _tested(claim: ClaimResult) -> ClaimResult:
    tests = tuple(
        replace(test, values=(1.0, 2.0, 3.0), mean=2.0, interval=(-1.0, 3.0), p_value=0.01, verdict="confirmed")
        for test in claim.tests
    )
    return replace(claim, verdict="confirmed", p_value=0.01, tests=tests)


def write_all(folder: Path, scale: str, seeds: int = 5) -> Path:
    """`<folder>/<study>/<scale>.json` of every study in the paper's outline."""
    for study in OUTLINE:
        write_results(study_result(study, scale, folder / "runs", seeds), folder)
    return folder
