"""Published scores of what a network knows beside the density ratio, on the same uploads.

`python -m benchmarks.knowledge RUN...` reads finished runs whose uploads hold densities and asks every fusion about
images of the training file that nobody trained on (test images where all training images were used, as with the
digits). Each score gets the best of three sharpnesses, which favours it. Writes `results/density/knowledge.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneflare.client.observer import Observer
from oneflare.core.config import DataConfig, Experiment
from oneflare.core.files import write_json, write_text
from oneflare.data import load
from oneflare.data.dataset import Dataset
from oneflare.fusion import UploadSet, build_fusion, logits_of_all
from oneflare.metrics.classification import expected_calibration_error
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import read_experiment

RESULTS = Path(__file__).parents[1] / "results" / "density" / "knowledge.json"
SCORES = ("density", "mahalanobis", "virtual_logit", "energy", "length")
SHARPNESS = (1.0, 3.0, 8.0)
IMAGES = 1500


def unseen(experiment: Experiment, used: Dataset) -> tuple[Tensor, Tensor, str]:
    """Images and labels that no client has trained on, and where they come from."""
    whole = load(DataConfig(name=experiment.data.name, image_size=experiment.data.image_size))
    known = {image.numpy().tobytes() for image in used.train.images}
    rows = [row for row, image in enumerate(whole.train.images) if image.numpy().tobytes() not in known][:IMAGES]
    if rows:
        return whole.train.images[rows], whole.train.labels[rows], "training images that nobody trained on"
    return used.test.images, used.test.labels, "test images"


def uploads_of(run: Path, experiment: Experiment, data: Dataset) -> UploadSet:
    files = RunFiles(run)
    simulation = Simulation.build(experiment, files, data)
    clients = range(experiment.partition.clients)
    summaries = [files.client(client).read_summary() for client in clients if files.client(client).upload.exists()]
    return simulation.collect(summaries, Observer())


def measure(run: Path) -> dict[str, Any]:
    experiment = read_experiment(run)
    data = load(experiment.data)
    images, labels, where = unseen(experiment, data)
    specs: dict[str, dict[str, Any]] = {name: {"name": name} for name in ("density_ratio", "ensemble")}
    for score in SCORES:
        for sharpness in SHARPNESS:
            specs[f"{score} {sharpness:g}"] = {"name": "gated_votes", "by": score, "sharpness": sharpness}
    uploads = uploads_of(run, experiment, data)
    answers = logits_of_all({name: build_fusion(spec).fuse(uploads).model for name, spec in specs.items()}, images)
    accuracy = {name: float((logits.argmax(1) == labels).double().mean()) for name, logits in answers.items()}
    best = {score: max(accuracy[f"{score} {sharpness:g}"] for sharpness in SHARPNESS) for score in SCORES}
    return {
        "data": experiment.data.name,
        "method": experiment.method,
        "alpha": experiment.partition.alpha,
        "clients": experiment.partition.clients,
        "seed": experiment.seed,
        "images": where,
        "accuracy": accuracy,
        "row": {"density_ratio": accuracy["density_ratio"], "ensemble": accuracy["ensemble"], **best},
        "calibration_error": float(expected_calibration_error(answers["density_ratio"].softmax(1), labels)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["row"])
    lines = [
        "Accuracy in per cent, one federation each. `density_ratio` as it is; the scores as gates of `gated_votes`,",
        "each with the best of three sharpnesses. Made by `python -m benchmarks.knowledge`.",
        "",
        f"| federation | {' | '.join(names)} | calibration error of density_ratio |",
        "|---|" + "---:|" * (len(names) + 1),
    ]
    for row in rows:
        what = f"{row['data']}, {row['method']}, alpha {row['alpha']:g}, {row['clients']} clients, seed {row['seed']}"
        cells = [f"{100 * row['row'][name]:.1f}" for name in names]
        lines.append(f"| {what}; {row['images']} | {' | '.join(cells)} | {100 * row['calibration_error']:.1f} |")
    return "\n".join(lines) + "\n"


def main(*runs: str) -> None:
    rows = [measure(Path(run)) for run in runs]
    write_json(RESULTS, {"runs": rows})
    write_text(RESULTS.with_suffix(".md"), table(rows))
    print(table(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
