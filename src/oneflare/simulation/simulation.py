"""One experiment with its data at hand: train, collect, fuse, measure. Each step leaves complete files."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oneflare._version import __version__
from oneflare.client.files import ClientSummary, tail_epochs
from oneflare.client.lending import snapshots_of
from oneflare.client.observer import Observer
from oneflare.client.start import make_contract
from oneflare.core.config import Experiment
from oneflare.data import Dataset, Partition, split_clients
from oneflare.data.partition import partition_of
from oneflare.data.wrong_labels import with_wrong_labels
from oneflare.errors import ConfigError
from oneflare.fusion import UploadSet, Workspace, build_fusion, without_faulty
from oneflare.metrics import TimedFusion, evaluate, fuse_timed
from oneflare.nn import ANCHORS
from oneflare.nn.hardware import choose_device
from oneflare.simulation.clients import Clients, Setup
from oneflare.simulation.collecting import read_uploads
from oneflare.simulation.engines import call, map_tasks
from oneflare.simulation.files import RunFiles
from oneflare.simulation.kept import diagnose_into, warn_if_outdated
from oneflare.simulation.results import (
    CostResult,
    DataResult,
    DiagnosticsResult,
    FusionResult,
    PartitionResult,
    RunResult,
)
from oneflare.simulation.steady import Steady
from oneflare.simulation.training import train_clients, workers_for
from oneflare.upload import Upload, read_upload


def _partition(experiment: Experiment, dataset: Dataset) -> Partition:
    """Who owns what: as the data say, or as the experiment divides them."""
    labels, classes, split = dataset.train.labels.numpy(), len(dataset.classes), experiment.partition
    if dataset.owners is None:
        return split_clients(labels, classes, split, experiment.seed)
    if split.clients != len(dataset.owners):
        raise ConfigError(
            f"the images of data={dataset.name} come with their owners; set partition.kind=given "
            f"clients={len(dataset.owners)}"
        )
    return partition_of("given", dataset.owners, labels, classes)


@dataclass(frozen=True)
class Seen:
    """A fused model's answers to the test images."""

    content: dict[str, Any]
    """fields of `metrics.json`, `accuracy` among them"""
    right: NDArray[np.bool_]
    """`(images,)`"""


class Simulation(Setup):
    """All steps of one experiment: train, collect, fuse and measure."""

    @classmethod
    def build(cls, experiment: Experiment, files: RunFiles, dataset: Dataset) -> Simulation:
        """Divide the data among clients, unless they have owners already, and agree on the contract."""
        partition = _partition(experiment, dataset)
        split = experiment.partition
        if split.label_noise is not None:
            noisy = split.noisy_clients or 1
            dataset = with_wrong_labels(dataset, partition.indices, split.label_noise, noisy, experiment.seed)
            labels = dataset.train.labels.numpy()
            partition = partition_of(partition.kind, partition.indices, labels, len(dataset.classes))
        contract = make_contract(
            experiment,
            dataset.image,
            dataset.classes,
            mirror=dataset.flip,
            federation=experiment.training_digest(),
        )
        return cls(experiment, files, dataset, partition, contract)

    @cached_property
    def clients(self) -> Clients:
        """Who owns what, and what each is asked to do."""
        return Clients(**{item.name: getattr(self, item.name) for item in fields(Setup)})

    @property
    def worst_cosine(self) -> float | None:
        """Of the two closest anchors; None without anchors."""
        anchors = ANCHORS.build(self.contract.anchors, len(self.contract.classes), self.contract.dim)
        return None if anchors is None else anchors.worst_cosine

    @property
    def public(self) -> Tensor | None:
        """The public split as fusions see it: without labels."""
        return None if self.dataset.public is None else self.dataset.public.images

    def train(self, observer: Observer, lender: Clients | None = None) -> list[ClientSummary]:
        """Every client on its own data, where the experiment's engine says, but for the networks that a lender has."""
        return train_clients(self.clients, observer, lender)

    def collect(self, summaries: Sequence[ClientSummary], observer: Observer, epoch: int | None = None) -> UploadSet:
        """The verified uploads of all trained clients; one that is refused is named and left out."""
        uploads = read_uploads(self.files, self.contract, summaries, observer, epoch)
        return self._set_of(uploads)

    def _set_of(self, uploads: tuple[Upload, ...]) -> UploadSet:
        device = choose_device(self.experiment.train.device)
        return UploadSet(uploads, self.contract, self.template(), self.public, device=device)

    def is_fused(self, spec: Mapping[str, Any]) -> bool:
        path = self.files.metrics(spec["name"])
        return path.exists() and FusionResult.read(path).made_with(spec)

    def fuse(self, specs: Sequence[Mapping[str, Any]], uploads: UploadSet, observer: Observer) -> None:
        """Models, metrics and the simulated fusions at the snapshots, for the fusions that are not there yet."""
        missing = [spec for spec in specs if not self.is_fused(spec)]
        if not missing:
            return
        for spec in missing:
            warn_if_outdated(self.files.metrics(spec["name"]), spec, observer)
        observer.stage(f"fusing {len(uploads)} uploads in {len(missing)} ways")
        clients = [upload.client for upload in uploads]
        slow = [spec for spec in missing if build_fusion(spec).trains]
        quick = [spec for spec in missing if spec not in slow]
        epochs = snapshots_of(self.experiment) if quick else []
        groups = [[spec] for spec in slow] + ([quick] if quick else [])
        tasks: list[Callable[[Observer], dict[str, Seen]]] = [
            *(partial(self._evaluate, group, uploads) for group in groups),
            *(partial(_silent, partial(self._simulate, quick, clients, epoch)) for epoch in epochs),
        ]
        if self.contract.deep:
            tasks.append(partial(_silent, partial(self._diagnose, uploads)))
        outcomes = map_tasks(call, tasks, workers=workers_for(self.experiment), observer=observer)
        final = {name: row for outcome in outcomes[: len(groups)] for name, row in outcome.items()}
        simulated = list(zip(epochs, outcomes[len(groups) : len(groups) + len(epochs)], strict=True))
        for spec in missing:
            name = spec["name"]
            content = final[name].content
            for remark in (*content.get("suspects", ()), *content.get("left_out", ())):
                observer.warn(f"{name}: {remark}")
            seen = {epoch: row[name] for epoch, row in simulated if name in row}
            seen[self.experiment.epochs] = final[name]
            history = [{"epoch": epoch, "accuracy": one.content["accuracy"]} for epoch, one in seen.items()]
            path = self.files.metrics(name)
            steady = self._steady(seen)
            replace(FusionResult.from_dict(content | {"history": history}, str(path)), steady=steady).write(path)
            self._workspace(name).discard()

    def _steady(self, seen: Mapping[int, Seen]) -> Steady | None:
        """seen: one fusion after some epochs, the last one among them"""
        epochs, tail = self.experiment.epochs, self.experiment.train.tail
        wanted = [*tail_epochs(epochs, tail), epochs]
        return None if tail is None else Steady.over([seen[epoch].right for epoch in wanted if epoch in seen])

    def _workspace(self, name: str, observer: Observer | None = None) -> Workspace:
        """Where a fusion that trains keeps its checkpoint, and whom it tells."""
        checkpoint, seconds = self.files.fusion_checkpoint(name), self.experiment.train.checkpoint_seconds
        return Workspace(checkpoint, seconds, name, observer or Observer())

    def _evaluate(self, specs: Sequence[Mapping[str, Any]], uploads: UploadSet, observer: Observer) -> dict[str, Seen]:
        """Models and figures by fusion, without members whose uploads turn out to be of no use."""

        def fuse(spec: Mapping[str, Any], kept: UploadSet) -> TimedFusion:
            workspace = self._workspace(spec["name"], observer)
            if len(kept) < len(uploads):  # what was begun with everybody is not gone on with
                workspace.discard()
            return fuse_timed(spec, kept, workspace)

        found, faults = without_faulty(uploads, lambda kept: evaluate(specs, kept, self.dataset.test, fuse))
        for one in found:
            one.model.save(self.files.model(one.name), embed=False)
        reasons = [f"client {fault.client} is left out: {fault}" for fault in faults]
        left_out = {"left_out": reasons} if reasons else {}
        return {one.name: Seen(one.to_dict() | left_out, one.right.cpu().numpy()) for one in found}

    def _diagnose(self, uploads: UploadSet) -> dict[str, Seen]:
        """Figures of the members' networks, where they have trained any."""
        without_faulty(uploads, lambda kept: diagnose_into(self.files.diagnostics, kept, self.dataset))
        return {}

    def _simulate(self, specs: Sequence[Mapping[str, Any]], clients: Sequence[int], epoch: int) -> dict[str, Seen]:
        """What fusion would have given had clients stopped here; nothing flows back to them."""
        paths = [self.files.client(client).snapshot(epoch) for client in clients]
        uploads = self._set_of(tuple(read_upload(path, self.contract) for path in paths))
        found, _ = without_faulty(uploads, lambda kept: evaluate(specs, kept, self.dataset.test))
        return {one.name: Seen({"accuracy": one.scores.accuracy}, one.right.cpu().numpy()) for one in found}

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
            or self.clients.precision,
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


def _silent(work: Callable[[], dict[str, Seen]], _observer: Observer) -> dict[str, Seen]:
    """A task that has nothing to tell on its way."""
    return work()
