"""One client's isolated training, from its own data to one upload.

Nothing is shared while training. Every random draw is named by (seed, client, purpose, epoch), so a client's upload
does not depend on where, when or beside whom it is trained, and training resumes from any epoch bit for bit.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.client.companions import ClientJob, Companions, client_statistics, hold_out, send
from oneflare.core.config import Experiment, ObjectiveConfig, TrainConfig
from oneflare.core.files import load_state, save_state, write_json, write_text
from oneflare.core.records import read_record
from oneflare.core.schedules import build_schedule, peak, restart_steps
from oneflare.core.seeds import torch_generator
from oneflare.data import Augmentation, ClientData
from oneflare.errors import TrainingError
from oneflare.nn import PrototypeNetwork, Target, build_anchors, build_target, freeze_prototypes, initial_network
from oneflare.nn.hardware import PRECISIONS, Workload, choose_device, choose_precision, one_thread, precision_name
from oneflare.nn.optimisers import SGD, Thermostat, largest_curvature, scaled_rate, stable_rate
from oneflare.objective import (
    Bank,
    Batch,
    ClientFacts,
    Controller,
    Proximal,
    Pull,
    build_bank,
    build_controller,
    local_terms,
)
from oneflare.upload import Contract

DIVERGED = "the loss became NaN or infinite in epoch {epoch}; lower train.lr or train.clip"
EpochObserver = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class ClientSummary:
    """What a client reports beside its upload; kept in `summary.json`."""

    client: int
    status: str
    """trained | failed | empty"""
    samples: int
    classes: int
    reason: str = ""
    train_seconds: float = 0.0
    upload_bytes: int = 0
    lambda_raw_max: float = 0.0
    lambda_effective_final: float = 0.0
    accuracy_own: float = 0.0
    """on its own training images, as augmented in the last epoch: it says nothing about new images"""
    conflicts: float = 0.0
    """share of steps in which the pull of the anchors conflicted with the local gradient"""
    peak_lr: float = 0.0
    stable_lr: float | None = None
    """2/L at the start, where train.check_lr asked for it"""
    precision: str = ""
    """float32 or bfloat16; empty where nothing was trained"""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ClientFiles:
    """Where a client's files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.upload = folder / "upload.safetensors"
        self.trace = folder / "trace.jsonl"
        self.summary = folder / "summary.json"
        self.checkpoint = folder / "checkpoint" / "state.safetensors"

    def snapshot(self, epoch: int) -> Path:
        return self.folder / "snapshots" / f"epoch-{epoch:05d}.safetensors"

    def read_summary(self) -> ClientSummary | None:
        if not self.summary.exists():
            return None
        remedy = f"delete the folder {self.folder} and run the same command again"
        return read_record(ClientSummary, self.summary, remedy)

    def remove_checkpoint(self) -> None:
        self.checkpoint.unlink(missing_ok=True)
        if self.checkpoint.parent.is_dir():
            self.checkpoint.parent.rmdir()

    def read_trace(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []


def snapshot_epochs(epochs: int, snapshots: int) -> list[int]:
    """Epochs after which fusion is simulated, evenly spread before the last one."""
    return sorted({round(k * epochs / (snapshots + 1)) for k in range(1, snapshots + 1)} - {0, epochs})


class LocalTraining:
    """The loop of one client. `run_epoch` advances it; `state_dict` is everything that resuming needs."""

    def __init__(
        self,
        network: PrototypeNetwork,
        data: ClientData,
        augmentation: Augmentation,
        controller: Controller,
        target: Target | None,
        objective: ObjectiveConfig,
        train: TrainConfig,
        stream: tuple[int, int],
        bank: Bank | None = None,
    ) -> None:
        """stream: (seed, client), the name of this client's random numbers."""
        self.device = choose_device(train.device)
        workload = Workload(network.encoder, augmentation.image.channels, augmentation.image.size)
        self.precision = choose_precision(train.precision, self.device, workload)
        self.network = network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.data = data
        self.augmentation = augmentation
        self.controller = controller
        self.controller.to(self.device)
        self.target = None if target is None else target.to(self.device)
        self.objective = objective
        self.train = train
        self.stream = stream
        self.schedule = build_schedule(train.schedule)
        self.base_lr = scaled_rate(train.lr, train.batch_size, train.lr_scale_batch)
        self.bank = bank
        if bank is not None:
            bank.to(self.device)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.proximal = Proximal(trained, objective.proximal) if objective.proximal else None
        self.optimizer = SGD(trained, momentum=train.momentum, weight_decay=train.weight_decay, clip=train.clip)
        self.batches = math.ceil(len(data) / train.batch_size)
        self.restarts = restart_steps(self.schedule, self.total_steps) if train.momentum_reset else frozenset()
        self.thermostat = Thermostat(train.thermostat, self.batches) if train.thermostat else None
        self.epoch = 0

    @property
    def total_steps(self) -> int:
        return self.train.epochs * self.batches

    def lr(self, progress: float) -> float:
        return self.base_lr * self.schedule(progress)

    @property
    def aligning(self) -> bool:
        """Whether this epoch contrasts with the bank and does nothing else."""
        return self.epoch < (self.objective.alignment_epochs or 0)

    def run_epoch(self) -> dict[str, float]:
        """One pass over the client's data; returns the trace row (means over the epoch's steps)."""
        seed, client = self.stream
        order = torch.randperm(len(self.data), generator=torch_generator(seed, client, "order", self.epoch))
        draws = torch_generator(seed, client, "augment", self.epoch)
        noise = torch_generator(seed, client, "thermostat", self.epoch) if self.thermostat else None
        totals: Tensor | None = None
        names: list[str] = []
        correct = torch.zeros((), device=self.device)
        progress = 0.0
        self.network.train()
        for index, rows in enumerate(order.tensor_split(self.batches)):
            number = self.epoch * self.batches + index
            progress = number / self.total_steps
            if number in self.restarts:
                self.optimizer.reset_momentum()
            losses, hits = self.step(*self.views(rows, Augmentation.draw(len(rows), draws)), progress)
            if self.thermostat is not None and noise is not None:
                self.thermostat.step(self.optimizer, self.lr(progress), noise)
            names = list(losses)
            row = torch.stack(list(losses.values()))
            totals = row if totals is None else totals + row
            correct += hits
        self.epoch += 1
        if totals is None or not bool(torch.isfinite(totals).all()):
            raise TrainingError(DIVERGED.format(epoch=self.epoch))
        means = (totals / self.batches).tolist()
        return {
            "epoch": self.epoch,
            "progress": progress,
            "lr": self.lr(progress),
            **dict(zip(names, means, strict=True)),
            "accuracy": float(correct) / (2 * len(self.data)),
            **self.controller.trace(),
        }

    def views(self, rows: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Both views of some samples `(2B, c, h, w)` and their labels `(2B,)`."""
        images, labels = self.data.images[rows].to(self.device), self.data.labels[rows].to(self.device)
        return self.augmentation.two_views(images, draws), labels.repeat(2)

    def step(self, views: Tensor, labels: Tensor, progress: float) -> tuple[dict[str, Tensor], Tensor]:
        """One update. views: `(2B, c, h, w)`, labels: `(2B,)`. Returns detached losses by name, and the hits."""
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            features = self.network.encoder(views)
        batch = self._batch(features, labels, self.network)
        terms, local = self._local(batch)
        pull = None if self.target is None else Pull(self.network.prototypes, self.target.at(progress))
        loss = local if pull is None or self.aligning else self.controller.loss(local, pull.loss, progress)
        loss.backward()
        if pull is not None:
            terms |= {"align": pull.loss, "conflicts": pull.apply(self.objective.pcgrad)}
        if self.proximal is not None:
            terms["proximal"] = self.proximal.apply()
        self.optimizer.step(self.lr(progress))
        if not self.aligning:
            self.controller.step()
        if self.bank is not None:
            self.bank.push(batch.features, labels)
        with torch.no_grad():
            hits = (batch.logits.argmax(1) == labels).sum()
        return {"local": local.detach(), **{name: term.detach() for name, term in terms.items()}}, hits

    def _batch(self, features: Tensor, labels: Tensor, network: PrototypeNetwork) -> Batch:
        return Batch(
            nn.functional.normalize(features.float(), dim=1),
            labels,
            network.prototypes,
            self.objective.supcon_temperature,
            self.objective.proto_temperature,
            None if self.bank is None else self.bank.pairs(),
        )

    def _local(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """The named terms, and L_local; the term of the bank is weighted already."""
        contrast = None
        if self.bank is not None and (self.aligning or not self.objective.alignment_epochs):
            contrast = self.bank.contrast(batch.features, batch.supcon_temperature)
        if contrast is not None and self.aligning:
            return {"bank": contrast}, contrast
        terms = local_terms(self.objective.terms, batch)
        local = torch.stack([self.objective.terms[name] * term for name, term in terms.items()]).sum()
        return (terms, local) if contrast is None else ({**terms, "bank": contrast}, local + contrast)

    @property
    def peak_lr(self) -> float:
        return self.base_lr * peak(self.schedule)

    def stable_lr(self) -> float:
        """2/L of L_local on one batch, from where training is now, which it leaves untouched."""
        seed, client = self.stream
        rows = torch.arange(min(len(self.data), self.train.batch_size))
        draws = Augmentation.draw(len(rows), torch_generator(seed, client, "curvature", "views"))
        views, labels = self.views(rows, draws)
        network = copy.deepcopy(self.network).train()

        def loss() -> Tensor:
            return self._local(self._batch(network.encoder(views), labels, network))[1]

        start = torch_generator(seed, client, "curvature", "start")
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        return stable_rate(largest_curvature(loss, trained, start))

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "precision": precision_name(self.precision),
            "network": dict(self.network.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "controller": self.controller.state_dict(),
            "thermostat": None if self.thermostat is None else self.thermostat.state_dict(),
            "bank": None if self.bank is None else self.bank.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self.precision = PRECISIONS.get(state.get("precision", ""), self.precision)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])
        if self.thermostat is not None:
            self.thermostat.load_state_dict(state["thermostat"])
        if self.bank is not None:
            self.bank.load_state_dict(state["bank"])


def shared_start(experiment: Experiment, contract: Contract, encoder: nn.Module | None) -> PrototypeNetwork:
    """The network that every client of a federation begins with; encoder: where it is the user's own."""
    image, classes = contract.image, len(contract.classes)
    network = initial_network(
        contract.encoder, image.channels, image.size, classes, experiment.seed, encoder, contract.dim
    )
    if experiment.objective.freeze_prototypes:
        anchors = build_anchors(contract.anchors, classes, contract.dim)
        assert anchors is not None
        freeze_prototypes(network, anchors)
    return network


def build_training(job: ClientJob, data: ClientData) -> LocalTraining:
    experiment, contract = job.experiment, job.contract
    network = shared_start(experiment, contract, job.encoder)
    train = experiment.train
    if job.precision is not None:
        train = train.model_copy(update={"precision": job.precision})
    public = load_state(job.bank)["features"] if job.bank is not None and job.bank.exists() else None
    return LocalTraining(
        network,
        data,
        Augmentation.for_data(experiment.augment, contract.image, job.flip),
        build_controller(experiment.controller, ClientFacts(tuple(data.counts.tolist()))),
        build_target(contract.anchors, network.prototypes),
        experiment.objective,
        train,
        (experiment.seed, job.client),
        build_bank(experiment.objective.bank, contract.dim, public),
    )


def train_client(job: ClientJob, data: ClientData, observe: EpochObserver | None = None) -> ClientSummary:
    """Train one client to the end, from its last checkpoint if there is one, and write its files.

    The summary is written last: a client with a summary is complete.
    """
    files = ClientFiles(job.folder)
    done = files.read_summary()
    if done is not None:
        files.remove_checkpoint()
        return done
    if len(data) == 0:
        summary = ClientSummary(job.client, "empty", 0, 0, "owns no samples")
    else:
        try:
            with one_thread():
                summary = _train(job, data, files, observe) if job.experiment.trains else _measure(job, data, files)
        except TrainingError as error:
            summary = ClientSummary(job.client, "failed", len(data), data.classes, str(error))
    write_json(files.summary, summary.to_dict())
    files.remove_checkpoint()
    return summary


def _train(job: ClientJob, data: ClientData, files: ClientFiles, observe: EpochObserver | None) -> ClientSummary:
    kept, held_out = hold_out(data, job.experiment.train.holdout, (job.experiment.seed, job.client))
    training = build_training(job, kept)
    companions = Companions(client_statistics(job, data), held_out)
    trace: list[dict[str, float]] = []
    seconds_before = 0.0
    stable = training.stable_lr() if job.experiment.train.check_lr else None
    if files.checkpoint.exists():
        state = load_state(files.checkpoint)
        training.load_state_dict(state["training"])
        trace, seconds_before = state["trace"], state["seconds"]
    config = job.experiment.train
    snapshots = set(snapshot_epochs(config.epochs, config.snapshots))
    started = saved = time.monotonic()
    while training.epoch < config.epochs:
        row = training.run_epoch()
        trace.append(row)
        if observe is not None:
            observe(training.epoch, row)
        if training.epoch in snapshots:
            send(files.snapshot(training.epoch), job, training.network, data, training.epoch, companions)
        now = time.monotonic()
        if training.epoch < config.epochs and now - saved >= config.checkpoint_seconds:
            state = {
                "training": training.state_dict(),
                "trace": trace,
                "seconds": seconds_before + now - started,
            }
            save_state(files.checkpoint, state)
            saved = time.monotonic()
    seconds = seconds_before + time.monotonic() - started
    return replace(finish_client(job, files, training, data, trace, seconds, companions), stable_lr=stable)


def finish_client(
    job: ClientJob,
    files: ClientFiles,
    training: LocalTraining,
    data: ClientData,
    trace: list[dict[str, float]],
    seconds: float,
    companions: Companions | None = None,
) -> ClientSummary:
    """Write trace and upload of a trained client; the summary is left to the caller, because it marks completion."""
    write_text(files.trace, "".join(json.dumps(row) + "\n" for row in trace))
    send(files.upload, job, training.network, data, int(trace[-1]["epoch"]), companions)
    return ClientSummary(
        client=job.client,
        status="trained",
        samples=len(data),
        classes=data.classes,
        train_seconds=seconds,
        upload_bytes=files.upload.stat().st_size,
        lambda_raw_max=max(row["lambda_raw_max"] for row in trace),
        lambda_effective_final=trace[-1]["lambda_effective"],
        accuracy_own=trace[-1]["accuracy"],
        conflicts=sum(row.get("conflicts", 0.0) for row in trace) / len(trace),
        peak_lr=training.peak_lr,
        precision=precision_name(training.precision),
    )


def _measure(job: ClientJob, data: ClientData, files: ClientFiles) -> ClientSummary:
    """The upload of a client that trains nothing."""
    started = time.monotonic()
    send(files.upload, job, None, data, 0, Companions(client_statistics(job, data)))
    return ClientSummary(
        client=job.client,
        status="trained",
        samples=len(data),
        classes=data.classes,
        train_seconds=time.monotonic() - started,
        upload_bytes=files.upload.stat().st_size,
    )
