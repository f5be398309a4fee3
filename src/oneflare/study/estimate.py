"""Estimates how long cells take, from similar finished cells or else from a rough figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from oneflare.core.config import Experiment
from oneflare.errors import OneFlareError
from oneflare.simulation.results import RunResult
from oneflare.study.cells import Cell, families

TRAIN_IMAGES = {"digits": 1437, "cifar10": 50000, "cifar100": 50000, "svhn": 73257, "tiny-imagenet": 100000}
SECONDS_PER_IMAGE = {"conv4": 0.00025, "resnet8": 0.0022, "resnet18": 0.001}
"""of one epoch with two views: the first two on one core of a laptop, the last on a GPU"""
STATISTICS_SECONDS_PER_IMAGE = 0.006
FIXED_SECONDS = 1.0
"""reading data, fusing, writing"""
BORROWED_SECONDS = 20.0
"""of a cell that takes its networks from another one and fuses them"""


def images_of(experiment: Experiment) -> int:
    known = TRAIN_IMAGES.get(experiment.data.name, 10000)
    return min(experiment.data.train_size or known, known)


def rough_seconds(experiment: Experiment) -> float:
    """One process on one core (or a GPU for ResNet-18)."""
    seconds = FIXED_SECONDS
    if experiment.trains:
        per_image = SECONDS_PER_IMAGE.get(experiment.encoder["name"], SECONDS_PER_IMAGE["resnet8"])
        if len(experiment.objective.terms) == 1:
            per_image *= 0.8
        seconds += per_image * images_of(experiment) * experiment.epochs
    if experiment.analytic["name"] != "none":
        seconds += STATISTICS_SECONDS_PER_IMAGE * images_of(experiment)
    return seconds


def finished_seconds(folder: Path) -> float | None:
    """What a finished cell took, or None."""
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        return RunResult.read(path).cost.train_seconds + FIXED_SECONDS
    except OneFlareError:
        return None


def estimate(cells: Iterable[Cell], runs: Path) -> dict[str, float]:
    """Seconds by cell name. Finished cells with the same encoder correct the rough figure for the others.

    Of cells that train the same networks only one trains.
    """
    cells = list(cells)
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        seconds = finished_seconds(cell.folder(runs))
        if seconds is not None:
            ratios.setdefault(_kind(cell), []).append(seconds / rough_seconds(cell.experiment))
    waiting = [cell for cell in cells if finished_seconds(cell.folder(runs)) is None]
    borrowers = {cell.name for family in families(waiting) for cell in family[1:]}
    return {
        cell.name: BORROWED_SECONDS
        if cell.name in borrowers
        else rough_seconds(cell.experiment) * statistics.median(ratios.get(_kind(cell), [1.0]))
        for cell in cells
    }


def _kind(cell: Cell) -> str:
    return f"{cell.experiment.encoder} {cell.experiment.trains}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"
