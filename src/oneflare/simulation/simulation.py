"""One experiment with its data at hand: train, collect, fuse, measure. Each step leaves complete files."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oneflare._version import __version__
from oneflare.client.cohort import cohorts, supports, train_cohort
from oneflare.client.public_teacher import teacher_features
from oneflare.client.training import ClientFiles, ClientJob, ClientSummary, shared_start, snapshot_epochs
from oneflare.core.config import Experiment
from oneflare.core.files import save_state
from oneflare.core.privacy import Privacy
from oneflare.data import ClientData, Dataset, ImageSpec, Partition, split_clients
from oneflare.data.partition import partition_of
from oneflare.errors import ConfigError, RunError, UploadError
from oneflare.fusion import UploadSet, Workspace, build_fusion, without_faulty
from oneflare.metrics import TimedFusion, evaluate, fuse_timed
from oneflare.nn import ANCHORS, PrototypeNetwork, encoder_spec, feature_map_spec, initial_network
from oneflare.nn.hardware import Workload, choose_device, choose_precision, precision_name
from oneflare.simulation.engines import default_workers, map_tasks
from oneflare.simulation.kept import EXPERIMENT, diagnose_into, say_if_outdated
from oneflare.simulation.results import (
    CostResult,
    DataResult,
    DiagnosticsResult,
    FusionResult,
    PartitionResult,
    RunResult,
)
from oneflare.upload import Contract, Upload, read_upload
from oneflare.upload.statistics import Plan


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

    def fusion_step(self, fusion: str, step: int, steps: int) -> None:
        """A fusion that trains has done this many of its steps."""

    def note(self, text: str) -> None:
        """What was done to the data as they were read."""

    def warn(self, text: str) -> None:
        """Something the user should know."""

    def end(self, content: RunResult) -> None:
        """The run is complete; `content` is what its `result.json` says."""


class RunFiles:
    """Where a run's files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.experiment = folder / EXPERIMENT
        self.partition = folder / "partition.json"
        self.result = folder / "result.json"
        self.diagnostics = folder / "diagnostics.json"
        self.report = folder / "report.html"
        self.bank = folder / "public_bank.safetensors"
        self.plugins = folder / "plugins.json"

    def client(self, client: int) -> ClientFiles:
        return ClientFiles(self.folder / "clients" / f"{client:03d}")

    def model(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "model.safetensors"

    def fusion_checkpoint(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "checkpoint.safetensors"

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
            statistics=statistics_plan(experiment, dataset.image, dataset.flip),
            deep=experiment.trains,
            evidence=experiment.upload.evidence,
        )
        return cls(experiment, files, dataset, partition, contract, encoder)

    @property
    def worst_cosine(self) -> float | None:
        """Of the two closest anchors; None without anchors."""
        anchors = ANCHORS.build(self.contract.anchors, len(self.contract.classes), self.contract.dim)
        return None if anchors is None else anchors.worst_cosine

    @property
    def on_gpu(self) -> bool:
        return choose_device(self.experiment.train.device).type != "cpu"

    @property
    def workers(self) -> int:
        if self.on_gpu:
            return 1
        return self.experiment.workers or default_workers()

    @cached_property
    def precision(self) -> str:
        """Of all clients of this run: decided here once, so that workers do not decide for themselves."""
        if not self.experiment.trains:
            return "float32"
        image, train = self.dataset.image, self.experiment.train
        workload = Workload(self.template().encoder, image.channels, image.size)
        return precision_name(choose_precision(train.precision, choose_device(train.device), workload))

    def template(self) -> PrototypeNetwork:
        return shared_start(self.experiment, self.contract, self.encoder)

    @property
    def public(self) -> Tensor | None:
        """The public split as fusions see it: without labels."""
        return None if self.dataset.public is None else self.dataset.public.images

    def client_data(self, client: int) -> ClientData:
        rows = torch.from_numpy(self.partition.indices[client])
        return ClientData.of(self.dataset.train.take(rows), len(self.dataset.classes))

    def train(self, observer: Observer) -> list[ClientSummary]:
        """Every client on its own data, where the experiment's engine says."""
        self.teach(observer)
        return self._train_on_flower(observer) if self.experiment.engine == "flower" else self._train_here(observer)

    def _train_on_flower(self, observer: Observer) -> list[ClientSummary]:
        """Every client as a node of Flower's simulation, alone."""
        from oneflare.simulation.engines.flower import require_flower

        require_flower(simulation=True)
        from oneflare.simulation.engines.flower.simulation import train_on_flower

        return train_on_flower(
            [self.job(client) for client in range(len(self.partition.sizes))],
            self.dataset.train,
            self.partition.indices,
            self.files.folder,
            on_done=lambda summary: self._announce(summary, observer),
            workers=self.workers,
            gpu=self.on_gpu,
        )

    def _train_here(self, observer: Observer) -> list[ClientSummary]:
        """In worker processes; small clients share a batch of models."""
        sizes = self.partition.sizes
        together = self.experiment.train.cohort if supports(self.job(0)) else 1
        groups = cohorts(sizes, self.dataset.image.size, together)

        def seen(group: list[int], message: tuple[int, int, dict[str, float]]) -> None:
            del group
            client, epoch, row = message
            observer.epoch(client, epoch, row, sizes[client])

        def done(group: list[int], summaries: list[ClientSummary]) -> None:
            del group
            for summary in summaries:
                self._announce(summary, observer)

        results = map_tasks(self._train_group, groups, workers=self.workers, on_report=seen, on_result=done)
        return sorted((summary for group in results for summary in group), key=lambda summary: summary.client)

    def _train_group(self, group: list[int], report: Any) -> list[ClientSummary]:
        """A method, not a closure: where workers are spawned it is pickled."""
        jobs = [self.job(client) for client in group]
        data = [self.client_data(client) for client in group]
        return train_cohort(jobs, data, lambda client, epoch, row: report((client, epoch, row)))

    def teach(self, observer: Observer) -> None:
        """The teacher's view of the public images, where clients are to have it; kept, so that a rerun finds it."""
        public = self.dataset.public
        if not self.experiment.objective.public_bank or self.files.bank.exists():
            return
        if public is None:
            raise ConfigError("objective.bank=public needs images that nobody owns; set data.public=NUMBER")
        observer.stage(f"training the teacher on {len(public.labels)} public images")
        features = teacher_features(self.experiment, self.contract, public, self.dataset.flip, self.encoder)
        save_state(self.files.bank, {"features": features})

    def _announce(self, summary: ClientSummary, observer: Observer) -> None:
        observer.client_done(summary, self.partition.sizes[summary.client] * self.experiment.epochs)
        if summary.status != "trained":
            observer.warn(f"client {summary.client} is left out: {summary.reason}")
        elif summary.stable_lr is not None and summary.peak_lr > summary.stable_lr:
            observer.warn(
                f"client {summary.client}: the peak rate {summary.peak_lr:g} exceeds 2/L = "
                f"{summary.stable_lr:.2g} at the start, the largest stable rate of plain gradient descent; "
                "lower train.lr or add a warm-up"
            )

    def job(self, client: int) -> ClientJob:
        folder = self.files.client(client).folder
        bank = self.files.bank if self.experiment.objective.public_bank else None
        return ClientJob(
            self.experiment,
            self.contract,
            client,
            folder,
            self.dataset.flip,
            self.encoder,
            bank,
            precision=self.precision,
        )

    def collect(self, summaries: Sequence[ClientSummary], observer: Observer, epoch: int | None = None) -> UploadSet:
        """Read and verify the uploads of all trained clients; one that is refused is named and left out."""
        uploads: list[Upload] = []
        for summary in summaries:
            if summary.status != "trained":
                continue
            files = self.files.client(summary.client)
            try:
                upload = read_upload(files.upload if epoch is None else files.snapshot(epoch), self.contract)
                if upload.client != summary.client:
                    raise UploadError(f"{upload.path}: is the upload of client {upload.client}; send the right one")
                uploads.append(upload)
            except UploadError as error:
                observer.warn(f"client {summary.client} is left out: {error}")
        if not uploads:
            reasons = "; ".join(f"client {s.client}: {s.reason}" for s in summaries if s.reason)
            raise RunError(f"no client produced a usable upload ({reasons})")
        return UploadSet(tuple(uploads), self.contract, self.template(), self.public)

    def is_fused(self, spec: Mapping[str, Any]) -> bool:
        path = self.files.metrics(spec["name"])
        return path.exists() and FusionResult.read(path).made_with(spec)

    def fuse(self, specs: Sequence[Mapping[str, Any]], uploads: UploadSet, observer: Observer) -> None:
        """Models, metrics and the simulated fusions at the snapshots, for the fusions that are not there yet."""
        missing = [spec for spec in specs if not self.is_fused(spec)]
        if not missing:
            return
        for spec in missing:
            say_if_outdated(self.files.metrics(spec["name"]), spec, observer.warn)
        observer.stage(f"fusing {len(uploads)} uploads in {len(missing)} ways")
        clients = [upload.client for upload in uploads]
        slow = [spec for spec in missing if build_fusion(spec).trains]
        quick = [spec for spec in missing if spec not in slow]
        epochs = snapshot_epochs(self.experiment.epochs, self.experiment.train.snapshots) if quick else []
        groups = [[spec] for spec in slow] + ([quick] if quick else [])
        tasks: list[Callable[[Any], dict[str, Any]]] = [
            *(partial(self._evaluate, group, uploads) for group in groups),
            *(partial(self._simulate, quick, clients, epoch) for epoch in epochs),
            partial(self._diagnose, uploads),
        ]
        outcomes = map_tasks(
            _call,
            tasks,
            workers=self.workers,
            on_report=lambda _, message: observer.fusion_step(*message),
        )
        final = {name: row for outcome in outcomes[: len(groups)] for name, row in outcome.items()}
        simulated = list(zip(epochs, outcomes[len(groups) : -1], strict=True))
        for spec in missing:
            name = spec["name"]
            for remark in (*final[name].get("suspects", ()), *final[name].get("left_out", ())):
                observer.warn(f"{name}: {remark}")
            history = [{"epoch": epoch, "accuracy": row[name]} for epoch, row in simulated if name in row]
            history.append({"epoch": self.experiment.epochs, "accuracy": final[name]["accuracy"]})
            path = self.files.metrics(name)
            FusionResult.from_dict(final[name] | {"history": history}, str(path)).write(path)
            self._workspace(name).discard()

    def _workspace(self, name: str, report: Any = None) -> Workspace:
        """Where a fusion that trains keeps its checkpoint, and whom it tells."""
        checkpoint, seconds = self.files.fusion_checkpoint(name), self.experiment.train.checkpoint_seconds
        if report is None:
            return Workspace(checkpoint, seconds)
        return Workspace(checkpoint, seconds, lambda step, steps: report((name, step, steps)))

    def _evaluate(
        self, specs: Sequence[Mapping[str, Any]], uploads: UploadSet, report: Any
    ) -> dict[str, dict[str, Any]]:
        """Models and figures by fusion, without members whose uploads turn out to be of no use."""

        def fuse(spec: Mapping[str, Any], kept: UploadSet) -> TimedFusion:
            workspace = self._workspace(spec["name"], report)
            if len(kept) < len(uploads):  # what was begun with everybody is not gone on with
                workspace.discard()
            return fuse_timed(spec, kept, workspace)

        found, faults = without_faulty(uploads, lambda kept: evaluate(specs, kept, self.dataset.test, fuse))
        for one in found:
            one.model.save(self.files.model(one.name), embed=False)
        reasons = [f"client {fault.client} is left out: {fault}" for fault in faults]
        left_out = {"left_out": reasons} if reasons else {}
        return {one.name: one.to_dict() | left_out for one in found}

    def _diagnose(self, uploads: UploadSet, report: Any) -> dict[str, Any]:
        del report
        if self.contract.deep:
            without_faulty(uploads, lambda kept: diagnose_into(self.files.diagnostics, kept, self.dataset))
        return {}

    def _simulate(
        self, specs: Sequence[Mapping[str, Any]], clients: Sequence[int], epoch: int, report: Any
    ) -> dict[str, float]:
        """What fusion would have given had clients stopped here; nothing flows back to them."""
        del report
        uploads = UploadSet(
            tuple(read_upload(self.files.client(client).snapshot(epoch), self.contract) for client in clients),
            self.contract,
            self.template(),
            self.public,
        )

        found, _ = without_faulty(uploads, lambda kept: evaluate(specs, kept, self.dataset.test))
        return {one.name: one.scores.accuracy for one in found}

    def result(self, summaries: Sequence[ClientSummary], uploads: UploadSet) -> RunResult:
        """What `result.json` says, once all clients and fusions are there."""
        experiment = self.experiment
        device = choose_device(experiment.train.device)
        split = self.partition
        return RunResult(
            oneflare=__version__,
            code=experiment.code,
            method=experiment.method,
            seed=experiment.seed,
            data=DataResult(
                name=self.dataset.name,
                train=len(self.dataset.train.labels),
                test=len(self.dataset.test.labels),
                public=0 if self.dataset.public is None else len(self.dataset.public.labels),
                classes=tuple(self.dataset.classes),
                notes=tuple(self.dataset.notes),
            ),
            partition=PartitionResult(
                kind=split.kind,
                sizes=tuple(split.sizes),
                table=tuple(tuple(row) for row in split.table.tolist()),
                empty=tuple(split.empty),
                assignments=split.assignments,
                alpha=experiment.partition.alpha if "dirichlet" in experiment.partition.kind else None,
                clients=experiment.partition.clients,
                digest=experiment.partition_digest(),
            ),
            encoder=dict(self.contract.encoder),
            anchors={**self.contract.anchors, "worst_cosine": self.worst_cosine},
            epochs=experiment.epochs,
            device=device.type,
            precision=", ".join(sorted({summary.precision for summary in summaries if summary.precision}))
            or self.precision,
            headline=experiment.fusions[0]["name"],
            fusions={spec["name"]: FusionResult.read(self.files.metrics(spec["name"])) for spec in experiment.fusions},
            diagnostics=DiagnosticsResult.read(self.files.diagnostics) if self.contract.deep else None,
            clients=tuple(summaries),
            fused_clients=tuple(upload.client for upload in uploads),
            cost=CostResult(
                train_seconds=sum(summary.train_seconds for summary in summaries),
                upload_bytes=sum(upload.file_bytes for upload in uploads),
                peak_memory_bytes=peak_memory_bytes(),
            ),
        )


def statistics_plan(experiment: Experiment, image: ImageSpec, mirror: bool) -> Plan | None:
    """What the statistics of this federation are; mirror: whether a mirrored image keeps its label."""
    if experiment.analytic["name"] == "none":
        return None
    flip = mirror if experiment.augment.flip is None else experiment.augment.flip
    spec = feature_map_spec(experiment.analytic, flip)
    upload = experiment.upload
    privacy = None
    if upload.statistics_epsilon is not None:
        privacy = Privacy(upload.statistics_epsilon, upload.statistics_delta, upload.statistics_clip)
    return Plan.of(spec, image.channels, image.size, upload.statistics_dtype, privacy)


def peak_memory_bytes() -> int:
    """Largest resident size of this process or of any of its workers."""
    unit = 1 if sys.platform == "darwin" else 1024
    return max(_own_peak_bytes(unit), unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def _own_peak_bytes(unit: int) -> int:
    try:  # getrusage would count what the process was before it became this program
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _call(task: Callable[[Any], dict[str, Any]], report: Any) -> dict[str, Any]:
    return task(report)
