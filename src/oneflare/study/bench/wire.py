"""The size of an upload, and what sending less of it costs in accuracy."""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from oneflare.client.observer import Observer
from oneflare.fusion import FUSIONS, UploadSet, build_fusion
from oneflare.methods.resolve import resolve
from oneflare.metrics import evaluate
from oneflare.nn.hardware import one_thread
from oneflare.nn.network import filled
from oneflare.simulation.features import load_data
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment
from oneflare.study.bench.steps import random_dataset
from oneflare.upload import Contents, SentForm, read_upload, write_upload

FORMATS = ("float32", "bfloat16", "int8")
SENT = frozenset({"weights", "prototypes", "counts"})
"""what the resent uploads hold; fusions that need more are not measured here"""


def communication(
    layer: dict[str, Any], *, seeds: int = 3, folder: Path | None = None, fusions: Sequence[str] = ()
) -> dict[str, Any]:
    """The same trained clients sent in every format and fused in every way; means over seeds."""
    names = list(fusions) or [name for name in FUSIONS if build_fusion({"name": name}).needs <= SENT]
    root = folder or Path(tempfile.mkdtemp(prefix="oneflare-wire-"))
    sizes: dict[str, list[int]] = {kind: [] for kind in FORMATS}
    accuracy: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in FORMATS}
    for seed in range(seeds):
        experiment = resolve(layer, {"seed": seed, "upload": {"dtype": "float32"}, "fusions": names})
        run_experiment(experiment, root / f"s{seed}")
        files = RunFiles(root / f"s{seed}")
        federation = Simulation.build(experiment, files, load_data(experiment))
        summaries = [files.client(client).read_summary() for client in range(len(federation.partition.sizes))]
        with one_thread():
            sent = federation.collect([summary for summary in summaries if summary is not None], Observer())
            for kind in FORMATS:
                again = _resend(sent, kind, root / f"s{seed}" / "wire" / kind)
                for found in evaluate([{"name": name} for name in names], again, federation.dataset.test):
                    accuracy[kind][found.name].append(found.scores.accuracy)
                sizes[kind].append(sum(upload.file_bytes for upload in again))
    exact = accuracy["float32"]
    return {
        "seeds": seeds,
        "int8_over_float32": size_ratios(),
        "formats": {
            kind: {
                "bytes": statistics.fmean(sizes[kind]),
                "ratio": statistics.fmean(sizes[kind]) / statistics.fmean(sizes["float32"]),
                "accuracy": {name: statistics.fmean(values) for name, values in accuracy[kind].items()},
                "points_lost": {
                    name: 100 * (statistics.fmean(exact[name]) - statistics.fmean(values))
                    for name, values in accuracy[kind].items()
                },
                "mean_points_lost": statistics.fmean(
                    100 * (statistics.fmean(exact[name]) - statistics.fmean(values))
                    for name, values in accuracy[kind].items()
                ),
            }
            for kind in FORMATS
        },
    }


def size_ratios() -> dict[str, float]:
    """File size of an int8 upload over a float32 one, for encoders of several sizes."""
    ratios = {}
    for name, width in (("resnet8", 16), ("resnet8", 32), ("resnet18", 64)):
        experiment = resolve({"encoder": {"name": name, "width": width}, "partition.kind": "iid", "clients": 2})
        dataset = random_dataset(32, 3, 20)
        federation = Simulation.build(experiment, RunFiles(Path("unused")), dataset)
        network, sizes = federation.template(), []
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("int8", "float32"):
                path = Path(folder) / kind
                counts = torch.ones(10).long()
                write_upload(
                    path,
                    network,
                    federation.contract,
                    Contents(client=0, counts=counts, epoch=1),
                    SentForm(dtype=kind),
                )
                sizes.append(path.stat().st_size)
        ratios[f"{name} width {width}"] = sizes[0] / sizes[1]
    return ratios


def _resend(sent: UploadSet, kind: str, folder: Path) -> UploadSet:
    uploads = []
    for upload, prototypes in zip(sent, sent.prototypes, strict=True):
        network = filled(copy.deepcopy(sent.template), upload.weights(), prototypes)
        counts = torch.zeros(len(sent.contract.classes)) if upload.counts is None else upload.counts
        path = folder / f"{upload.client}.safetensors"
        write_upload(
            path,
            network,
            sent.contract,
            Contents(client=upload.client, counts=counts.long(), epoch=1),
            SentForm(dtype=kind),
        )
        uploads.append(read_upload(path, sent.contract))
    return UploadSet(tuple(uploads), sent.contract, sent.template)
