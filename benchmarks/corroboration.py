"""What `flare_analytic` gains over its two parts: `python -m benchmarks.corroboration [PREFIX...]` makes the runs below
whose names begin so (all of them without a prefix) in $ONEFLARE_RUNS/corroboration, where they are not there, asks
`analytic`, `density_ratio` and `flare_analytic` of the same uploads about training images that `data.train_size` left
out and about all test images, and writes `results/density/corroboration.json` and `.md`. The weight of the networks was
chosen on the former. Data: $ONEFLARE_DATA.
"""

from __future__ import annotations

import os
import subprocess
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
RUNS = Path(os.environ.get("ONEFLARE_RUNS", "runs")) / "corroboration"
LEFT_OUT = 10_000
"""at most so many training images that nobody trained on"""
WEIGHTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
SMALL_IMAGES = ("data.image_size=16", "encoder=resnet8", "encoder.width=16")
PARTS = ("analytic", "density_ratio", "flare_analytic")


def cells() -> dict[str, list[str]]:
    """name -> words of `oneflare run`"""
    found = {}

    def add(kind: str, data: str, images: int, epochs: int, alpha: float, clients: int, seed: int, *more: str) -> None:
        words = [
            f"data={data}",
            f"data.train_size={images}",
            f"epochs={epochs}",
            f"alpha={alpha}",
            f"clients={clients}",
        ]
        found[f"{kind}-{data}-a{alpha}-c{clients}-s{seed}"] = [*words, f"seed={seed}", *more]

    for seed in range(3):
        add("whole", "digits", 900, 40, 0.05, 5, seed)
    head = ("backbone=efficientnet_lite0", "encoder=mlp", "encoder.width=64")
    add("backbone", "cifar10", 2000, 25, 0.05, 5, 0, "data.test_size=1000", *head)
    add("backbone", "cifar10", 2000, 25, 0.5, 5, 0, "data.test_size=1000", *head)
    for data in ("cifar10", "cifar100", "svhn"):
        add("small", data, 2500, 12, 0.5, 10, 0, *SMALL_IMAGES)
        add("small", data, 2500, 12, 0.05, 5, 0, *SMALL_IMAGES)
    add("medium", "cifar100", 5000, 15, 0.5, 5, 0, *SMALL_IMAGES)
    add("medium", "cifar10", 5000, 15, 0.5, 10, 0, *SMALL_IMAGES)
    add("medium", "svhn", 5000, 25, 0.5, 10, 0, *SMALL_IMAGES)
    for alpha in (0.05, 0.5):
        for data in ("svhn", "cifar10"):
            for seed in range(5):
                add("decisive", data, 10000, 25, alpha, 5, seed, *SMALL_IMAGES)
    return found


def make(name: str) -> Path:
    """The folder of a finished run."""
    folder = RUNS / name
    if not (folder / "result.json").exists():
        command = [str(Path(sys.executable).with_name("oneflare")), "run", "method=flare_analytic", *cells()[name]]
        subprocess.run([*command, f"fusions={','.join(PARTS)}", "--out", str(folder), "--quiet"], check=True)
    return folder


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
        "per cent; the weight t of the networks is what the rule takes. Its constants were chosen on left-out training",
        "images. Right alone: the share of test images that only one of the two parts gets right.",
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


def main(*prefixes: str) -> None:
    with one_thread():
        for name in cells():
            if not name.startswith(prefixes or ""):
                continue
            found = measure(make(name))
            known = read_json(RESULTS)["runs"] if RESULTS.exists() else {}
            known |= {name: found}
            ordered = {name: known[name] for name in cells() if name in known}
            write_json(RESULTS, {"runs": ordered})
            write_text(RESULTS.with_suffix(".md"), table(list(ordered.values())))
            print(name, f"{gain(found['test']):+.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
