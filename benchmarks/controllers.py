"""What a controller costs: seconds per step over those of `fixed`, in one run: `python -m benchmarks.controllers`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from oneflare.client import ClientJob, LocalTraining, build_training
from oneflare.data import load
from oneflare.methods.resolve import resolve
from oneflare.objective import CONTROLLERS
from oneflare.stages import Federation, RunFiles

ROUNDS = 8
GUARDED = {"name": "meta_annealed", "floor": 1e-3, "ceiling": 1e-2, "lambda_max": 50.0}


def training(controller: str | dict[str, object], pcgrad: bool, folder: Path) -> LocalTraining:
    """The largest client of the default digits federation."""
    layer = {"method": "flare", "controller": controller, "objective": {"pcgrad": pcgrad}}
    experiment = resolve(layer)
    federation = Federation.build(experiment, RunFiles(folder), load(experiment.data), None, None)
    client = max(range(len(federation.partition.sizes)), key=lambda c: federation.partition.sizes[c])
    job = ClientJob(experiment, federation.contract, client, folder, flip=False)
    return build_training(job, federation.client_data(client))


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainings = {key: training(key, False, folder) for key in CONTROLLERS if key != "none"}
        trainings["meta_annealed, all guards"] = training(GUARDED, False, folder)
        trainings["fixed, pcgrad"] = training("fixed", True, folder)
        best = dict.fromkeys(trainings, float("inf"))
        for _ in range(ROUNDS):
            for key, chosen in trainings.items():
                chosen.epoch = 0
                started = time.process_time()
                chosen.run_epoch()
                best[key] = min(best[key], (time.process_time() - started) / chosen.batches)
    for key, seconds in best.items():
        print(f"{key:28} {1e3 * seconds:7.2f} ms per step   {seconds / best['fixed']:.3f} x fixed")


if __name__ == "__main__":
    main()
