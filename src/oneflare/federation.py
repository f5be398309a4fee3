"""One experiment with its data at hand: train, collect, fuse, measure. Each step leaves complete files."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from oneflare._version import __version__
from oneflare.client import ClientFiles, ClientJob, ClientSummary, snapshot_epochs, train_client
from oneflare.config import Experiment
from oneflare.data import ClientData, Dataset, Partition, split_clients
from oneflare.data.partition import partition_of
from oneflare.engine import default_workers, map_tasks
from oneflare.errors import RunError, UploadError
from oneflare.files import read_json, write_json
from oneflare.fusion import GlobalModel, UploadSet, build_fusion, logits_of_all
from oneflare.metrics import diagnose, score
from oneflare.metrics.diagnostics import FeatureSummary
from oneflare.nn import PrototypeNetwork, encoder_spec, feature_map_spec, initial_network
from oneflare.nn.hardware import choose_device, choose_precision
from oneflare.privacy import Privacy
from oneflare.statistics import Plan
from oneflare.upload import Contract, Upload, read_upload


class Observer:
    """Watches a run; does nothing. Progress displays and trackers override what they need."""

    def begin(self, experiment: Experiment, dataset: Dataset, partition: Partition) -> None:
        """Before the first client."""

    def epoch(self, client: int, epoch: int, row: Mapping[str, float], samples: int) -> None:
        """A client ended an epoch over `samples` images."""

    def client_done(self, summary: ClientSummary, samples_seen: int) -> None:
        """A client is complete; `samples_seen` counts images x epochs."""

    def stage(self, text: str) -> None:
        """Another stage begins."""

    def warn(self, text: str) -> None:
        """Something the user should know."""


class RunFiles:
    """Where a run's files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.experiment = folder / "experiment.yaml"
        self.partition = folder / "partition.json"
        self.result = folder / "result.json"
        self.diagnostics = folder / "diagnostics.json"
        self.report = folder / "report.html"

    def client(self, client: int) -> ClientFiles:
        return ClientFiles(self.folder / "clients" / f"{client:03d}")

    def model(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "model.safetensors"

    def metrics(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "metrics.json"


@dataclass(frozen=True)
class Federation:
    """One experiment with its data at hand."""

    experiment: Experiment
    files: RunFiles
    dataset: Dataset
    partition: Partition
    contract: Contract
    encoder: nn.Module | None

    @classmethod
    def build(
        cls,
        experiment: Experiment,
        files: RunFiles,
        dataset: Dataset,
        parts: Sequence[np.ndarray[Any, Any]] | None,
        encoder: nn.Module | None,
    ) -> Federation:
        labels, classes = dataset.train.labels.numpy(), len(dataset.classes)
        if parts is not None:
            partition = partition_of("given", parts, labels, classes)
        else:
            partition = split_clients(labels, classes, experiment.partition, experiment.seed)
        spec = experiment.encoder if encoder is not None else encoder_spec(experiment.encoder, classes)
        network = initial_network(spec, dataset.image.channels, dataset.image.size, classes, experiment.seed, encoder)
        contract = Contract.of(
            network,
            federation=experiment.training_digest(),
            method=experiment.method,
            encoder=spec,
            anchors=experiment.anchors,
            image=dataset.image,
            classes=dataset.classes,
            statistics=_plan(experiment, dataset),
            deep=experiment.trains,
        )
        return cls(experiment, files, dataset, partition, contract, encoder)

    @property
    def workers(self) -> int:
        if choose_device(self.experiment.train.device).type != "cpu":
            return 1
        return self.experiment.workers or default_workers()

    def template(self) -> PrototypeNetwork:
        image = self.contract.image
        return initial_network(
            self.contract.encoder,
            image.channels,
            image.size,
            len(self.contract.classes),
            self.experiment.seed,
            self.encoder,
        )

    def client_data(self, client: int) -> ClientData:
        rows = torch.from_numpy(self.partition.indices[client])
        return ClientData.of(self.dataset.train.take(rows), len(self.dataset.classes))

    def train(self, observer: Observer) -> list[ClientSummary]:
        """Every client alone; the largest first, so that no worker ends up alone with it."""
        sizes = self.partition.sizes
        order = sorted(range(len(sizes)), key=lambda client: -sizes[client])

        def work(client: int, report: Any) -> ClientSummary:
            job = ClientJob(
                self.experiment,
                self.contract,
                client,
                self.files.client(client).folder,
                self.dataset.flip,
                self.encoder,
            )
            return train_client(job, self.client_data(client), lambda epoch, row: report((epoch, row)))

        def seen(client: int, message: tuple[int, dict[str, float]]) -> None:
            observer.epoch(client, message[0], message[1], sizes[client])

        def done(client: int, summary: ClientSummary) -> None:
            observer.client_done(summary, sizes[client] * self.experiment.epochs)
            if summary.status == "failed":
                observer.warn(f"client {client} is left out: {summary.reason}")
            elif summary.status == "empty":
                observer.warn(f"client {client} is left out: it owns no samples")

        results = map_tasks(work, order, workers=self.workers, on_report=seen, on_result=done)
        return sorted(results, key=lambda summary: summary.client)

    def collect(self, summaries: Sequence[ClientSummary], observer: Observer, epoch: int | None = None) -> UploadSet:
        """Read and verify the uploads of all trained clients; one that is refused is named and left out."""
        uploads: list[Upload] = []
        for summary in summaries:
            if summary.status != "trained":
                continue
            files = self.files.client(summary.client)
            try:
                uploads.append(read_upload(files.upload if epoch is None else files.snapshot(epoch), self.contract))
            except UploadError as error:
                observer.warn(f"client {summary.client} is left out: {error}")
        if not uploads:
            reasons = "; ".join(f"client {s.client}: {s.reason}" for s in summaries if s.reason)
            raise RunError(f"no client produced a usable upload ({reasons})")
        return UploadSet(tuple(uploads), self.contract, self.template())

    def fuse(self, specs: Sequence[Mapping[str, Any]], uploads: UploadSet, observer: Observer) -> None:
        """Models, metrics and the simulated fusions at the snapshots, for the fusions that are not there yet."""
        missing = [spec for spec in specs if not self.files.metrics(spec["name"]).exists()]
        if not missing:
            return
        observer.stage(f"fusing {len(uploads)} uploads in {len(missing)} ways")
        clients = [upload.client for upload in uploads]
        epochs = snapshot_epochs(self.experiment.epochs, self.experiment.train.snapshots)

        def work(epoch: int | None, report: Any) -> dict[str, Any]:
            del report
            if epoch is None:
                return self._evaluate(missing, uploads)
            return self._simulate(missing, clients, epoch)

        outcomes = map_tasks(work, [None, *epochs], workers=self.workers)
        final = outcomes[0]
        for spec in missing:
            name = spec["name"]
            history = [
                {"epoch": epoch, "accuracy": outcome[name]} for epoch, outcome in zip(epochs, outcomes[1:], strict=True)
            ]
            history.append({"epoch": self.experiment.epochs, "accuracy": final[name]["accuracy"]})
            write_json(self.files.metrics(name), final[name] | {"history": history})

    def _evaluate(self, specs: Sequence[Mapping[str, Any]], uploads: UploadSet) -> dict[str, dict[str, Any]]:
        test = self.dataset.test
        models: dict[str, GlobalModel] = {}
        seconds: dict[str, float] = {}
        for spec in specs:
            started = time.monotonic()
            models[spec["name"]] = build_fusion(spec).fuse(uploads)
            seconds[spec["name"]] = time.monotonic() - started
        probe = FeatureSummary(uploads.size_weights.float())
        fresh = self.contract.deep and not self.files.diagnostics.exists()
        asked = dict(models)
        if fresh:
            asked["·"] = build_fusion({"name": "feature_mean"}).fuse(uploads)  # streams every encoder for the probe
        logits = logits_of_all(asked, test.images, probes=[probe] if fresh else [])
        if fresh:
            write_json(self.files.diagnostics, diagnose(uploads, probe, test.labels).to_dict())
        outcome = {}
        for name, model in models.items():
            model.save(self.files.model(name), embed=False)
            outcome[name] = score(logits[name], test.labels).to_dict() | {
                "parameters": model.cost.parameters,
                "forward_passes": model.cost.forward_passes,
                "fuse_seconds": seconds[name],
            }
        return outcome

    def _simulate(self, specs: Sequence[Mapping[str, Any]], clients: Sequence[int], epoch: int) -> dict[str, float]:
        """What fusion would have given had clients stopped here; nothing flows back to them."""
        uploads = UploadSet(
            tuple(read_upload(self.files.client(client).snapshot(epoch), self.contract) for client in clients),
            self.contract,
            self.template(),
        )
        models = {spec["name"]: build_fusion(spec).fuse(uploads) for spec in specs}
        logits = logits_of_all(models, self.dataset.test.images)
        labels = self.dataset.test.labels
        return {name: float((value.argmax(1) == labels).double().mean()) for name, value in logits.items()}

    def result(self, summaries: Sequence[ClientSummary], uploads: UploadSet) -> dict[str, Any]:
        experiment = self.experiment
        device = choose_device(experiment.train.device)
        precision = choose_precision(experiment.train.precision, device, self.dataset.image.size)
        return {
            "oneflare": __version__,
            "method": experiment.method,
            "seed": experiment.seed,
            "data": {
                "name": self.dataset.name,
                "train": len(self.dataset.train.labels),
                "test": len(self.dataset.test.labels),
                "classes": list(self.dataset.classes),
            },
            "partition": {
                **self.partition.to_dict(),
                "alpha": experiment.partition.alpha if "dirichlet" in experiment.partition.kind else None,
                "clients": experiment.partition.clients,
                "digest": experiment.partition_digest(),
            },
            "encoder": self.contract.encoder,
            "epochs": experiment.epochs,
            "device": device.type,
            "precision": str(precision).removeprefix("torch."),
            "headline": experiment.fusions[0]["name"],
            "fusions": {spec["name"]: read_json(self.files.metrics(spec["name"])) for spec in experiment.fusions},
            "diagnostics": read_json(self.files.diagnostics) if self.contract.deep else None,
            "clients": [summary.to_dict() for summary in summaries],
            "fused_clients": [upload.client for upload in uploads],
            "cost": {
                "train_seconds": sum(summary.train_seconds for summary in summaries),
                "upload_bytes": sum(upload.file_bytes for upload in uploads),
                "peak_memory_bytes": _peak_memory_bytes(),
            },
        }


def _plan(experiment: Experiment, dataset: Dataset) -> Plan | None:
    """What the statistics of this federation are."""
    if experiment.analytic["name"] == "none":
        return None
    flip = dataset.flip if experiment.augment.flip is None else experiment.augment.flip
    spec = feature_map_spec(experiment.analytic, flip)
    upload = experiment.upload
    privacy = None
    if upload.statistics_epsilon is not None:
        privacy = Privacy(upload.statistics_epsilon, upload.statistics_delta, upload.statistics_clip)
    return Plan.of(spec, dataset.image.channels, dataset.image.size, upload.statistics_dtype, privacy)


def _peak_memory_bytes() -> int:
    """Largest resident size of this process or of any of its workers."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return unit * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
