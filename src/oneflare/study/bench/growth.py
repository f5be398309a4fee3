"""How time and memory grow: with clients, with uploads to fuse, and from the first key press."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from oneflare.federation import Federation, RunFiles
from oneflare.fusion import UploadSet, build_fusion, logits_of_all
from oneflare.methods.resolve import resolve
from oneflare.nn.hardware import one_thread
from oneflare.seeds import torch_generator
from oneflare.stages import run_experiment
from oneflare.study.bench.steps import random_dataset
from oneflare.upload import read_upload, write_upload


def _in_child(work: Callable[[Path], float]) -> dict[str, float]:
    """Seconds and peak resident memory of some work, in a process of its own."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        torch.set_num_threads(1)  # a forked process must not meet its parent's thread pool
        folder = Path(tempfile.mkdtemp(prefix="oneflare-bench-"))
        try:
            seconds = work(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        theirs.send({"seconds": seconds, "peak_memory_bytes": 1024 * max(own, workers)})

    process = context.Process(target=child)
    process.start()
    theirs.close()
    outcome: dict[str, float] = ours.recv()
    process.join()
    return outcome


def client_growth(
    counts: Sequence[int],
    *,
    size: int,
    channels: int,
    samples: int,
    epochs: int,
    batch: int,
    encoder: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Federations over the same images, divided among ever more clients, from the first to the averaged model.

    Asking an ensemble costs one pass per client whatever the server does; `fusion_growth` shows that by itself.
    """
    dataset = random_dataset(size, channels, samples)
    dataset = dataclasses.replace(dataset, test=dataset.test.take(torch.arange(100)))
    rows = []
    for clients in counts:
        experiment = resolve(
            {
                "method": "flare",
                "encoder": dict(encoder),
                "partition": {"kind": "iid", "clients": clients},
                "train": {"epochs": epochs, "batch_size": batch, "snapshots": 0},
                "fusions": "average",
            }
        )

        def work(folder: Path, experiment: Any = experiment) -> float:
            started = time.perf_counter()
            run_experiment(experiment, folder / "run", dataset=dataset)
            return time.perf_counter() - started

        rows.append({"clients": clients, "samples": samples, "epochs": epochs, "batch": batch, **_in_child(work)})
    return rows


def fusion_growth(counts: Sequence[int], *, encoder: Mapping[str, Any], images: int = 256) -> list[dict[str, Any]]:
    """Fusing and asking ever more uploads."""
    dataset = random_dataset(32, 3, images)
    settings = {"encoder": dict(encoder), "partition": {"kind": "iid", "clients": 2}}
    federation = Federation.build(resolve(settings), RunFiles(Path("unused")), dataset, None, None)
    rows = []
    for number in counts:

        def work(folder: Path, number: int = number) -> float:
            network = federation.template()
            generator = torch_generator(0, "fusion benchmark")
            uploads = []
            for client in range(number):
                with torch.no_grad():
                    for parameter in network.parameters():
                        parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
                path = folder / f"{client}.safetensors"
                write_upload(path, network, federation.contract, client=client, counts=torch.ones(10).long(), epoch=1)
                uploads.append(path)
            started = time.perf_counter()
            with one_thread():
                read = tuple(read_upload(path, federation.contract) for path in uploads)
                several = UploadSet(read, federation.contract, network)
                models = {
                    name: build_fusion({"name": name}).fuse(several) for name in ("average", "count_prototypes", "iffi")
                }
                logits_of_all(models, dataset.test.images)
            return time.perf_counter() - started

        rows.append({"uploads": number, "images": images, **_in_child(work)})
    return rows


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
