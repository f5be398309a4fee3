"""What density ratios cost: `python -m benchmarks.density_speed [evidence | fusion]`, by default both.

1. Measuring the evidence, as a part of the processor time of training (digits with conv4, 32 x 32 pixels with resnet8).
2. Fusing 100 members with 512 features and 100 classes: seconds of the processor and of the clock, and memory.
3. Asking the fused model, as a ratio to the bare passes through the members' encoders.

Ratios in one process, one thread per torch operation; seconds are of the processor unless they say wall. The clock
means something on a machine that does nothing else; how many wait for its processors is written beside it. Writes
`results/density/speed.json`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from oneflare.client.density import measure_density
from oneflare.core.files import read_json, write_json
from oneflare.core.seeds import torch_generator
from oneflare.data import ClientData, prepare
from oneflare.fusion import UploadSet, build_fusion, logits_of_all
from oneflare.methods.resolve import resolve
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation, peak_memory_bytes
from oneflare.simulation.stages import run_experiment
from oneflare.study.bench.steps import random_dataset
from oneflare.upload import Contents, read_upload, write_upload

RESULTS = Path(__file__).parents[1] / "results" / "density" / "speed.json"
PLACES: dict[str, dict[str, Any]] = {
    "8 x 8, conv4, 40 epochs": {"size": 8, "channels": 1, "samples": 300, "encoder": "conv4", "epochs": 40},
    "32 x 32, resnet8 width 16, 25 epochs": {
        "size": 32,
        "channels": 3,
        "samples": 600,
        "encoder": {"name": "resnet8", "width": 16},
        "epochs": 25,
    },
}


def evidence_share(*, size: int, channels: int, samples: int, encoder: Any, epochs: int) -> dict[str, float]:
    """Processor seconds of one client's training and of its evidence."""
    data = random_dataset(size, channels, samples)
    layer = {"method": "fafi", "encoder": encoder, "clients": 1, "partition.kind": "iid", "workers": 1}
    experiment = resolve(layer, {"epochs": epochs, "train.snapshots": 0, "upload.evidence": [], "fusions": "average"})
    with tempfile.TemporaryDirectory() as folder:
        before = time.process_time()
        run_experiment(experiment, Path(folder) / "run", dataset=data)
        training = time.process_time() - before
        simulation = Simulation.build(experiment, RunFiles(Path(folder) / "again"), data)
        network = simulation.template().eval()
        own, image = ClientData.of(data.train, len(data.classes)), simulation.contract.image
        measure_density(network, own, image)
        before = time.process_time()
        measure_density(network, own, image)
        evidence = time.process_time() - before
    return {"training_seconds": training, "evidence_seconds": evidence, "share": evidence / training}


def fuse_many(members: int, width: int, classes: int) -> dict[str, float]:
    """A hundred uploads on disk, then the fusion and its answers."""
    data = random_dataset(8, 1, 2 * classes, classes=classes)
    layer = {"method": "fafi", "encoder": {"name": "conv4", "width": width}, "clients": 2, "partition.kind": "iid"}
    experiment = resolve(layer, {"fusions": "density_ratio", "train.snapshots": 0})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        simulation = Simulation.build(experiment, RunFiles(folder), data)
        network, generator = simulation.template().eval(), torch_generator(0, "density benchmark")
        own, contract = ClientData.of(data.train, classes), simulation.contract
        paths = [folder / f"{client}.safetensors" for client in range(members)]
        for client, path in enumerate(paths):
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
            evidence = measure_density(network, own, contract.image)
            write_upload(
                path, network, contract, Contents(client=client, counts=own.counts, epoch=1, evidence=evidence)
            )
        uploads = UploadSet(tuple(read_upload(path, contract) for path in paths), contract, network)
        memory = peak_memory_bytes()
        before, clock = time.process_time(), time.perf_counter()
        model = build_fusion({"name": "density_ratio"}).fuse(uploads).model
        fusing, wall = time.process_time() - before, time.perf_counter() - clock
        images = data.test.images[:64]
        answering = min(_seconds(lambda: logits_of_all({"": model}, images)) for _ in range(2))
        bare = min(_seconds(lambda: _passes(uploads, images)) for _ in range(2))
    more = peak_memory_bytes() - memory
    return {
        "dim": contract.dim,
        "fuse_seconds": fusing,
        "fuse_wall_seconds": wall,
        "load": os.getloadavg()[0],
        "memory_bytes": more,
        "answers_over_passes": answering / bare,
    }


def _seconds(work: Any) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


@torch.no_grad()
def _passes(uploads: UploadSet, images: torch.Tensor) -> None:
    for encoder in uploads.encoders():
        encoder(prepare(images, uploads.contract.image))


def main(*wanted: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = read_json(RESULTS) if RESULTS.exists() else {}
    if "evidence" in wanted or not wanted:
        found["evidence"] = {name: evidence_share(**place) for name, place in PLACES.items()}
    if "fusion" in wanted or not wanted:
        found["fusion"] = {"members": 100, "classes": 100, **fuse_many(100, 128, 100)}
    write_json(RESULTS, found)
    for name, row in found.get("evidence", {}).items():
        print(f"{name}: evidence takes {100 * row['share']:.1f} % of training")
    if "fusion" in found:
        row = found["fusion"]
        print(
            f"100 members, d = {row['dim']}, 100 classes: fused in {row['fuse_seconds']:.1f} s of the processor, "
            f"{row['fuse_wall_seconds']:.1f} s by the clock at load {row['load']:.0f}, with "
            f"{row['memory_bytes'] / 2**20:.0f} MiB more; an answer costs {row['answers_over_passes']:.2f} bare passes"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
