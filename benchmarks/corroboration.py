"""What `flare_analytic` gains over its two parts: `python -m benchmarks.corroboration RUN...` reads finished runs whose
uploads hold networks with densities and statistics, asks `analytic`, `density_ratio` and `flare_analytic` of the same
uploads about training images that `data.train_size` left out and about all test images, and writes
`results/density/corroboration.json` and `.md`. The weight of the networks was chosen on the former. Runs that the file
holds already are asked again only if they are named.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare._version import FUSION_ARITHMETIC
from oneflare.client.observer import Observer
from oneflare.core.config import DataConfig
from oneflare.core.files import read_json, write_json, write_text
from oneflare.data import Split, load
from oneflare.data.dataset import draw_rows
from oneflare.fusion import GlobalModel, build_fusion, logits_of_all
from oneflare.metrics.classification import expected_calibration_error
from oneflare.nn.hardware import one_thread
from oneflare.simulation.stages import open_run, read_experiment

RESULTS = Path(__file__).parents[1] / "results" / "density" / "corroboration.json"
LEFT_OUT = 4000
"""at most so many training images that nobody trained on"""
WEIGHTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5)
PARTS = ("analytic", "density_ratio", "flare_analytic")


def left_out(config: DataConfig) -> Split | None:
    """Training images that no client has, in a random order; None where the run took all."""
    if config.train_size is None:
        return None
    everything = load(config.model_copy(update={"train_size": None, "test_size": 1})).train
    spare = torch.ones(len(everything.labels), dtype=torch.bool)
    spare[draw_rows(len(spare), config.train_size, config.seed, "train")] = False
    order = torch.randperm(int(spare.sum()), generator=torch.Generator().manual_seed(config.seed))
    return everything.take(spare.nonzero().flatten()[order[:LEFT_OUT]])


def ask(models: Mapping[str, GlobalModel], images: Split) -> dict[str, Any]:
    """Accuracies in per cent, by part, by weight of the networks, and of which images one part alone is right."""
    logits, labels = logits_of_all(models, images.images), images.labels
    right = {name: logits[name].argmax(1) == labels for name in PARTS}
    posterior = logits["analytic"].log_softmax(1)
    scores = logits["density_ratio"] / models["density_ratio"].rule.sharpness  # type: ignore[attr-defined]
    only = {name: right[name] & ~right[other] for name, other in (PARTS[:2], PARTS[1::-1])}
    return {
        "images": len(labels),
        "weight": float(models["flare_analytic"].rule.sharpness),  # type: ignore[attr-defined]
        "accuracy": {name: percent(found) for name, found in right.items()},
        "calibration_error": {
            name: 100 * expected_calibration_error(found.softmax(1), labels) for name, found in logits.items()
        },
        "cross_entropy": {name: float(F.cross_entropy(found, labels)) for name, found in logits.items()},
        "right_alone": {name: percent(found) for name, found in only.items()},
        "by_weight": {str(t): percent((posterior + t * scores).argmax(1) == labels) for t in WEIGHTS},
    }


def percent(found: Tensor) -> float:
    return 100 * float(found.double().mean())


def gain(row: dict[str, Any]) -> float:
    """Points over the better part."""
    accuracy = row["accuracy"]
    return float(accuracy["flare_analytic"] - max(accuracy["analytic"], accuracy["density_ratio"]))


def measure(run: Path) -> dict[str, Any]:
    experiment = read_experiment(run)
    simulation, uploads = open_run(run, Observer())
    models = {name: build_fusion({"name": name}).fuse(uploads).model for name in PARTS}
    data, spare = experiment.data, None if experiment.backbone is not None else left_out(experiment.data)
    return {
        "data": data.name,
        "train": len(simulation.dataset.train.labels),
        "alpha": experiment.partition.alpha,
        "clients": experiment.partition.clients,
        "epochs": experiment.train.epochs,
        "seed": experiment.seed,
        "backbone": experiment.backbone is not None,
        "arithmetic": FUSION_ARITHMETIC,
        "left_out": None if spare is None else ask(models, spare),
        "test": ask(models, simulation.dataset.test),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "`flare_analytic` and its two parts on the same uploads, by `python -m benchmarks.corroboration`. Accuracy in",
        "per cent; the weight t of the networks is what the rule takes. The left-out training images chose its two",
        "constants. Right alone: the share of test images that only one of the two parts gets right.",
        "",
        "| federation | seed | t | analytic | density ratio | flare_analytic | gain | gain on left-out images "
        "| right alone: analytic, density ratio | calibration error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        test, spare = row["test"], row["left_out"]
        three = " | ".join(f"{test['accuracy'][name]:.1f}" for name in PARTS)
        alone = ", ".join(f"{test['right_alone'][name]:.1f}" for name in PARTS[:2])
        name = f"{row['data']}, {row['train']:,} images, {row['epochs']} epochs, alpha {row['alpha']}"
        name += f", {row['clients']} clients" + (", backbone" if row["backbone"] else "")
        lines.append(
            f"| {name} | {row['seed']} | {test['weight']:.2f} | {three} | {gain(test):+.2f} "
            f"| {'–' if spare is None else format(gain(spare), '+.2f')} | {alone} "
            f"| {test['calibration_error']['flare_analytic']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(*runs: str) -> None:
    with one_thread():
        for run in map(Path, runs):
            found = measure(run)
            known = read_json(RESULTS)["runs"] if RESULTS.exists() else {}
            known = dict(sorted((known | {run.name: found}).items()))
            write_json(RESULTS, {"runs": known})
            write_text(RESULTS.with_suffix(".md"), table(list(known.values())))
            print(run.name, f"{gain(found['test']):+.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
