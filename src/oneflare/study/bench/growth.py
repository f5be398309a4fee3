"""How time and memory grow with clients and with uploads, and how long the command line takes to start."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from oneflare.core.seeds import torch_generator
from oneflare.fusion import UploadSet, build_fusion, logits_of_all
from oneflare.methods.resolve import resolve
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment
from oneflare.study.bench.steps import random_dataset
from oneflare.upload import Contents, read_upload, write_upload


def _in_child(function: str, **arguments: Any) -> dict[str, float]:
    """Seconds and peak resident memory of one of the functions below, in a fresh interpreter of its own."""
    code = (
        "import json, sys, tempfile, torch; from pathlib import Path; torch.set_num_threads(1); "
        "from oneflare.simulation.simulation import peak_memory_bytes; "
        f"from oneflare.study.bench.growth import {function} as work; "
        "folder = tempfile.TemporaryDirectory(prefix='oneflare-bench-'); "
        "seconds = work(Path(folder.name), **json.loads(sys.argv[1])); "
        "print(json.dumps({'seconds': seconds, 'peak_memory_bytes': peak_memory_bytes()}))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(outcome.stdout)
    return result


def client_growth(counts: Sequence[int], **arguments: Any) -> list[dict[str, Any]]:
    """Federations over the same images, divided among ever more clients, from the first to the averaged model.

    Asking an ensemble costs one pass per client whatever the server does; `fusion_growth` shows that by itself.
    """
    return [
        {"clients": clients, **arguments, **_in_child("train_once", clients=clients, **arguments)} for clients in counts
    ]


def train_once(folder: Path, *, clients: int, epochs: int, batch: int, encoder: Any, **images: int) -> float:
    """images: size, channels and samples of `random_dataset`."""
    dataset = random_dataset(**images)
    dataset = dataclasses.replace(dataset, test=dataset.test.take(torch.arange(100)))
    experiment = resolve(
        {
            "method": "flare",
            "encoder": encoder,
            "partition": {"kind": "iid", "clients": clients},
            "train": {"epochs": epochs, "batch_size": batch, "snapshots": 0},
            "fusions": "average",
        }
    )
    started = time.perf_counter()
    run_experiment(experiment, folder / "run", dataset=dataset)
    return time.perf_counter() - started


def fusion_growth(counts: Sequence[int], **arguments: Any) -> list[dict[str, Any]]:
    """Fusing and asking ever more uploads."""
    return [{"uploads": number, **arguments, **_in_child("fuse_once", number=number, **arguments)} for number in counts]


def fuse_once(folder: Path, *, number: int, encoder: Any, images: int = 256) -> float:
    dataset = random_dataset(32, 3, images)
    settings = {"encoder": encoder, "partition": {"kind": "iid", "clients": 2}, "fusions": "average"}
    federation = Simulation.build(resolve(settings), RunFiles(folder), dataset)
    network, generator = federation.template(), torch_generator(0, "fusion benchmark")
    paths = [folder / f"{client}.safetensors" for client in range(number)]
    for client, path in enumerate(paths):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
        write_upload(path, network, federation.contract, Contents(client=client, counts=torch.ones(10).long(), epoch=1))
    started = time.perf_counter()
    uploads = UploadSet(tuple(read_upload(path, federation.contract) for path in paths), federation.contract, network)
    names = ("average", "count_prototypes", "iffi")
    logits_of_all({name: build_fusion({"name": name}).fuse(uploads).model for name in names}, dataset.test.images)
    return time.perf_counter() - started


def start_up(repeats: int = 3) -> dict[str, float]:
    """Seconds until help is shown, and until a whole one-step run on digits is over (an upper bound of its start)."""
    command = [str(Path(sys.executable).parent / "oneflare")]
    run = ["run", "data.train_size=32", "data.test_size=10", "clients=1", "epochs=1", "partition.kind=iid"]

    def best(*words: str) -> float:
        times = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                subprocess.run([*command, *words], cwd=folder, capture_output=True, check=True)
                times.append(time.perf_counter() - started)
        return min(times)

    return {"help_seconds": best("--help"), "one_step_run_seconds": best(*run, "fusions=average")}
