"""What lambda means at an encoder: the scale of the prototypes and accuracy over lambda, on held-out training images.

    python -m benchmarks.regime measure RUNS [--arms mean,per_prototype] [--epochs 25] [--seeds 100]
    python -m benchmarks.regime table RUNS NAME

`measure` trains every arm that RUNS does not hold yet, one after another, and `table` writes `results/regime/NAME.json`
and `.md` from what is there. No test image is read: the images that are scored come from the training file as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import oneflare
from oneflare.core.config import DataConfig
from oneflare.core.files import write_json, write_text
from oneflare.core.layers import merge
from oneflare.core.seeds import torch_generator
from oneflare.data import Dataset, load
from oneflare.simulation.stages import read_experiment, read_result

RESULTS = Path(__file__).parents[1] / "results" / "regime"
LAMBDAS = (1.0, 2.5, 5.0, 10.0, 20.0, 50.0)
YARDSTICK = (0.987, 0.959, 0.914, 0.874, 0.597, 0.503)
"""g_protos_std in the research log over LAMBDAS: CIFAR-10, alpha 0.05, ResNet-18 with 512 features"""
SPREAD = (0.0176, 0.0263, 0.0419, 0.0711, 0.1172, 0.1727)
"""inter_client_proto_std there"""
ARMS: dict[str, dict[str, Any]] = {
    "mean": {"objective": {"align_reduction": "mean"}},
    "projection": {"encoder": {"dim": 512}, "objective": {"align_reduction": "mean"}},
    "per_prototype": {"objective": {"align_reduction": "per_prototype"}},
    "seen": {"objective": {"align_reduction": "mean", "align_classes": "seen"}},
    "projection_seen": {"encoder": {"dim": 512}, "objective": {"align_reduction": "mean", "align_classes": "seen"}},
    "per_prototype_seen": {"objective": {"align_reduction": "per_prototype", "align_classes": "seen"}},
}
"""how the pull is counted"""
PLACES: dict[str, dict[str, Any]] = {
    "cifar10": {"data": DataConfig(name="cifar10", image_size=16), "train": 2_500, "held_out": 2_000, "epochs": 25},
    "digits": {"data": DataConfig(name="digits"), "train": 1_150, "held_out": 288, "epochs": 40},
    "digits_small": {"data": DataConfig(name="digits"), "train": 1_150, "held_out": 288, "epochs": 20},
}
"""images to train on and to score, both from the training file"""
ENCODERS = {
    "cifar10": {"name": "resnet8", "width": 16, "stem_stride": 2},
    "digits": {"name": "resnet8", "width": 16},
    "digits_small": {"name": "conv4", "width": 16},
}
"""64 features; the stride makes a step four times as cheap, and the pull does not depend on it"""


def held_out(place: str) -> Dataset:
    """A data set whose test images are training images that no client owns."""
    settings = PLACES[place]
    whole = load(settings["data"])
    order = held_out_order(len(whole.train.labels))
    train, test = order[: settings["train"]], order[settings["train"] : settings["train"] + settings["held_out"]]
    return dataclasses.replace(whole, train=whole.train.take(train), test=whole.train.take(test))


def held_out_order(available: int) -> Any:
    import torch

    return torch.randperm(available, generator=torch_generator(0, "held-out training images"))


def layers(method: str, lambda_0: float | None) -> dict[str, Any]:
    """V7 with this lambda, or a method as it is."""
    if lambda_0 is None:
        return {"method": method}
    return {"method": "etf_annealed", "controller": {"name": "annealed", "lambda_0": lambda_0, "schedule": "linear"}}


def measure(runs: Path, options: argparse.Namespace) -> None:
    dataset = held_out(options.place)
    for seed in options.seeds:
        for arm in options.arms:
            for word in options.what:
                method, lambda_0 = ("etf_annealed", float(word)) if word[0].isdigit() else (word, None)
                folder = runs / f"{options.place}-{arm}-{word}-{seed}"
                if (folder / "result.json").exists():
                    continue
                settings = merge(
                    {"encoder": ENCODERS[options.place], "alpha": 0.05, "clients": 5, "workers": 1},
                    {"train": {"epochs": options.epochs or PLACES[options.place]["epochs"], "snapshots": 0}},
                    {"fusions": ["density_ratio", "feature_mean", "count_prototypes", "ensemble"], "seed": seed},
                    layers(method, lambda_0),
                    {} if method == "fafi" else ARMS[arm],
                )
                oneflare.run(data=dataset, out=folder, **settings)
                print(folder.name, row_of(folder), flush=True)


def row_of(folder: Path) -> dict[str, Any]:
    """What one finished run says."""
    found, experiment = read_result(folder).content, read_experiment(folder)
    place, arm, word, seed = folder.name.split("-")
    assert found.diagnostics is not None
    return {
        "place": place,
        "arm": arm,
        "what": word,
        "seed": int(seed),
        "method": found.method,
        "encoder": experiment.encoder,
        "objective": experiment.objective.model_dump(exclude_none=True),
        "controller": experiment.controller,
        "epochs": found.epochs,
        "precision": found.precision,
        "partition_digest": found.partition.digest,
        "g_protos_std": found.diagnostics.g_protos_std,
        "inter_client_proto_std": found.diagnostics.inter_client_proto_std,
        "accuracy": {name: fusion.accuracy for name, fusion in found.fusions.items()},
    }


def table(runs: Path, name: str) -> str:
    rows = [row_of(path.parent) for path in sorted(runs.glob(f"{name}-*/result.json"))]
    write_json(
        RESULTS / f"{name}.json", {"command": " ".join(["python -m benchmarks.regime", *sys.argv[1:]]), "runs": rows}
    )
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["arm"], row["what"]].append(row)
    lines = [
        "Held-out training images; accuracy in per cent, mean over the seeds that are there.",
        "",
        "| pull | lambda or method | seeds | g_protos_std | inter_client_proto_std | density_ratio | feature_mean |"
        " count_prototypes | ensemble |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (arm, what), some in sorted(cells.items(), key=lambda item: (item[0][0], _order(item[0][1]))):
        scale, spread = (
            statistics.fmean(row[key] for row in some) for key in ("g_protos_std", "inter_client_proto_std")
        )
        fusions = ("density_ratio", "feature_mean", "count_prototypes", "ensemble")
        shown = [f"{100 * statistics.fmean(row['accuracy'][fusion] for row in some):.1f}" for fusion in fusions]
        lines.append(f"| {arm} | {what} | {len(some)} | {scale:.3f} | {spread:.3f} | {' | '.join(shown)} |")
    if name in ("cifar10", "digits_small"):
        for value, scale, spread in zip(LAMBDAS, YARDSTICK, SPREAD, strict=True):
            lines.append(f"| research log | {value:g} | | {scale:.3f} | {spread:.3f} | | | | |")
    return "\n".join(lines) + "\n"


def _order(what: str) -> float:
    return float(what) if what[0].isdigit() else 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=["measure", "table"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--place", choices=list(PLACES), default="cifar10")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    parser.add_argument("--what", type=lambda text: text.split(","), default=[f"{value:g}" for value in LAMBDAS])
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[100])
    parser.add_argument("--epochs", type=int, default=None)
    options = parser.parse_args()
    if options.do == "measure":
        measure(options.runs, options)
        return
    text = table(options.runs, options.place)
    write_text(RESULTS / f"{options.place}.md", text)
    print(text)


if __name__ == "__main__":
    main()
