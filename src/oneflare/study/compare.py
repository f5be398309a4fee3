"""Compares methods over seeds on shared partitions, with paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare.client.observer import Observer
from oneflare.core.files import digest_of, write_json
from oneflare.core.layers import Layer
from oneflare.core.records import read_record, record_to_dict
from oneflare.core.stopping import AGAIN, on_stop
from oneflare.errors import ConfigError, RunError
from oneflare.methods import find_method
from oneflare.methods.resolve import resolve
from oneflare.simulation.kept import warn_what_changed
from oneflare.simulation.stages import Result, read_result, run_experiment
from oneflare.study.verdicts import Spread

FILE = "comparison.json"


@dataclass(frozen=True)
class Listed:
    """What `comparison.json` says: which runs of its folder are compared."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs by method and seed; seeds share the partition, so differences are paired."""

    folder: Path
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    results: dict[str, tuple[Result, ...]]

    @property
    def fusions(self) -> list[str]:
        """In the order of the first method that has them."""
        return list(dict.fromkeys(name for runs in self.results.values() for name in runs[0].fusions))

    def own_fusion(self, method: str) -> str:
        return self.results[method][0].headline

    def cell(self, method: str, fusion: str) -> Spread | None:
        """Accuracies of one method under one fusion, one per seed."""
        runs = self.results[method]
        if any(fusion not in run.fusions for run in runs):
            return None
        return Spread(tuple(run.fusions[fusion].accuracy for run in runs))

    def difference(self, method: str, fusion: str) -> tuple[float, float | None] | None:
        """Mean and deviation over seeds of (method - first method), both under one fusion."""
        return _paired(self.cell(method, fusion), self.cell(self.methods[0], fusion))

    def own_difference(self, method: str) -> tuple[float, float | None] | None:
        """The same, each method under its own fusion."""
        first = self.methods[0]
        return _paired(self.cell(method, self.own_fusion(method)), self.cell(first, self.own_fusion(first)))

    def to_dict(self) -> dict[str, Any]:
        table: dict[str, dict[str, Any]] = {}
        for method in self.methods:
            table[method] = {}
            for fusion in self.fusions:
                cell, difference = self.cell(method, fusion), self.difference(method, fusion)
                if cell is not None:
                    table[method][fusion] = {
                        "accuracies": list(cell.values),
                        "mean": cell.mean,
                        "std": cell.std,
                        "paired_difference": None if difference is None else difference[0],
                        "paired_difference_std": None if difference is None else difference[1],
                    }
        return {
            "methods": list(self.methods),
            "seeds": list(self.seeds),
            "own_fusions": {method: self.own_fusion(method) for method in self.methods},
            "accuracy": table,
            "runs": {method: [str(run.folder) for run in runs] for method, runs in self.results.items()},
        }


def _paired(cell: Spread | None, first: Spread | None) -> tuple[float, float | None] | None:
    if cell is None or first is None:
        return None
    gaps = [a - b for a, b in zip(cell.values, first.values, strict=True)]
    return statistics.fmean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else None


def compare_methods(
    methods: Sequence[str],
    layers: Sequence[Layer] = (),
    *,
    seeds: int = 3,
    folder: Path | None = None,
    observer: Observer | None = None,
) -> Comparison:
    """Run what is missing; a method and seed that are complete are read back."""
    names = [find_method(name).name for name in methods]
    if not names:
        raise ConfigError("name at least one method to compare, for example: oneflare compare fafi flare")
    if len(set(names)) != len(names):
        raise ConfigError("a method is named twice")
    experiments = {name: [resolve(*layers, {"method": name, "seed": seed}) for seed in range(seeds)] for name in names}
    if folder is None:
        shared = digest_of([experiment.training_digest() for runs in experiments.values() for experiment in runs])
        first = experiments[names[0]][0]
        folder = Path("runs") / f"compare-{first.data.name}-{'-'.join(names)}-{shared[:8]}"
    warn_what_changed(
        [(folder / f"{name}-s{run.seed}", run) for name in names for run in experiments[name]],
        observer or Observer(),
    )
    with on_stop(lambda: _what_is_kept(folder, len(names) * seeds)):
        results = {
            name: tuple(
                run_experiment(experiment, folder / f"{name}-s{experiment.seed}", observer=observer)
                for experiment in experiments[name]
            )
            for name in names
        }
    comparison = Comparison(folder, tuple(names), tuple(range(seeds)), results)
    write_json(folder / FILE, record_to_dict(Listed(comparison.methods, comparison.seeds)))
    return comparison


def _what_is_kept(folder: Path, runs: int) -> str:
    done = sum(1 for _ in folder.glob("*/result.json"))
    return f"{done} of {runs} runs are complete; {AGAIN}" if done else ""


def read_comparison(folder: Path) -> Comparison:
    if not (folder / FILE).exists():
        raise RunError(f"{folder} is not a comparison (no {FILE})")
    listed = read_record(Listed, folder / FILE, "run the same `oneflare compare` again")
    results = {name: tuple(read_result(folder / f"{name}-s{seed}") for seed in listed.seeds) for name in listed.methods}
    return Comparison(folder, listed.methods, listed.seeds, results)
