"""What a controller costs: time per training step over that of `fixed`, in one run.

`python -m benchmarks.controllers`. Steps of all controllers alternate and medians are compared, so that a busy machine
slows them alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from oneflare.client import ClientJob, LocalTraining, build_training
from oneflare.data import load
from oneflare.methods.resolve import resolve
from oneflare.objective import CONTROLLERS
from oneflare.seeds import torch_generator
from oneflare.stages import Federation, RunFiles

ROUNDS = 80
GUARDED = {"name": "meta_annealed", "floor": 1e-3, "ceiling": 1e-2, "lambda_max": 50.0}


def training(controller: str | dict[str, object], pcgrad: bool, folder: Path) -> LocalTraining:
    """The largest client of the default digits federation."""
    layer = {"method": "flare", "controller": controller, "objective": {"pcgrad": pcgrad}}
    experiment = resolve(layer)
    federation = Federation.build(experiment, RunFiles(folder), load(experiment.data), None, None)
    client = max(range(len(federation.partition.sizes)), key=lambda c: federation.partition.sizes[c])
    job = ClientJob(experiment, federation.contract, client, folder, flip=False)
    return build_training(job, federation.client_data(client))


def batch(chosen: LocalTraining) -> tuple[torch.Tensor, torch.Tensor]:
    rows = slice(chosen.train.batch_size)
    views = chosen.augmentation.two_views(chosen.data.images[rows], torch_generator(0, "benchmark"))
    return views, chosen.data.labels[rows].repeat(2)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainings = {key: training(key, False, folder) for key in CONTROLLERS if key != "none"}
        trainings["meta_annealed, all guards"] = training(GUARDED, False, folder)
        trainings["fixed, pcgrad"] = training("fixed", True, folder)
        seconds: dict[str, list[float]] = {key: [] for key in trainings}
        views, labels = batch(trainings["fixed"])
        for round_ in range(-5, ROUNDS):  # the first few warm up
            for key, chosen in trainings.items():
                started = time.process_time()
                chosen.step(views, labels, max(round_, 0) / ROUNDS)
                if round_ >= 0:
                    seconds[key].append(time.process_time() - started)
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    for key, value in middle.items():
        print(f"{key:28} {1e3 * value:7.2f} ms per step   {value / middle['fixed']:.3f} x fixed")


if __name__ == "__main__":
    main()
