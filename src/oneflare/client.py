"""One client's isolated training: its own data in, one upload out.

Nothing is shared while training. Every random draw is named by (seed, client, purpose, epoch), so a client's upload
does not depend on where, when or beside whom it is trained, and training resumes from any epoch bit for bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.config import Experiment, ObjectiveConfig, TrainConfig
from oneflare.data import Augmentation, ClientData
from oneflare.errors import RunError, TrainingError
from oneflare.files import load_state, read_json, save_state, write_json, write_text
from oneflare.nn import PrototypeNetwork, build_anchors, initial_network
from oneflare.nn.hardware import choose_device, choose_precision, one_thread
from oneflare.nn.sgd import SGD
from oneflare.objective import Batch, ClientFacts, Controller, align, build_controller, local_terms
from oneflare.schedules import build_schedule
from oneflare.seeds import torch_generator
from oneflare.upload import Contract, write_upload

DIVERGED = "the loss became NaN or infinite in epoch {epoch}; lower train.lr or train.clip"
EpochObserver = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class ClientJob:
    """Everything one client needs to know, apart from its data."""

    experiment: Experiment
    contract: Contract
    client: int
    folder: Path
    flip: bool
    encoder: nn.Module | None = None


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
        try:
            return ClientSummary(**read_json(self.summary))
        except TypeError:
            raise RunError(f"{self.summary} has unknown fields; delete the folder {self.folder}") from None

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
        anchors: Tensor | None,
        objective: ObjectiveConfig,
        train: TrainConfig,
        stream: tuple[int, int],
    ) -> None:
        """stream: (seed, client), the name of this client's random numbers."""
        self.device = choose_device(train.device)
        self.precision = choose_precision(train.precision, self.device, augmentation.image.size)
        self.network = network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.data = data
        self.augmentation = augmentation
        self.controller = controller
        self.anchors = None if anchors is None else anchors.to(self.device)
        self.objective = objective
        self.train = train
        self.stream = stream
        self.schedule = build_schedule(train.schedule)
        self.optimizer = SGD(
            list(network.parameters()), momentum=train.momentum, weight_decay=train.weight_decay, clip=train.clip
        )
        self.batches = math.ceil(len(data) / train.batch_size)
        self.epoch = 0

    @property
    def total_steps(self) -> int:
        return self.train.epochs * self.batches

    def lr(self, progress: float) -> float:
        return self.train.lr * self.schedule(progress)

    def run_epoch(self) -> dict[str, float]:
        """One pass over the client's data; returns the trace row (means over the epoch's steps)."""
        seed, client = self.stream
        order = torch.randperm(len(self.data), generator=torch_generator(seed, client, "order", self.epoch))
        draws = torch_generator(seed, client, "augment", self.epoch)
        totals: Tensor | None = None
        names: list[str] = []
        correct = torch.zeros((), device=self.device)
        progress = 0.0
        self.network.train()
        for index, rows in enumerate(order.tensor_split(self.batches)):
            progress = (self.epoch * self.batches + index) / self.total_steps
            losses, hits = self.step(*self.views(rows, Augmentation.draw(len(rows), draws)), progress)
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
        batch = Batch(
            nn.functional.normalize(features.float(), dim=1),
            labels,
            self.network.prototypes,
            self.objective.supcon_temperature,
            self.objective.proto_temperature,
        )
        terms = local_terms(self.objective.terms, batch)
        local = torch.stack([self.objective.terms[name] * term for name, term in terms.items()]).sum()
        if self.anchors is None:
            loss = local
        else:
            terms["align"] = align(self.network.prototypes, self.anchors)
            loss = self.controller.loss(local, terms["align"], progress)
        loss.backward()
        self.optimizer.step(self.lr(progress))
        self.controller.step()
        with torch.no_grad():
            hits = (batch.logits.argmax(1) == labels).sum()
        return {"local": local.detach(), **{name: term.detach() for name, term in terms.items()}}, hits

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "network": dict(self.network.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])


def build_training(job: ClientJob, data: ClientData) -> LocalTraining:
    experiment, contract = job.experiment, job.contract
    network = initial_network(
        contract.encoder,
        contract.image.channels,
        contract.image.size,
        len(contract.classes),
        experiment.seed,
        job.encoder,
        contract.dim,
    )
    return LocalTraining(
        network,
        data,
        Augmentation.for_data(experiment.augment, contract.image, job.flip),
        build_controller(experiment.controller, ClientFacts(tuple(data.counts.tolist()))),
        build_anchors(contract.anchors, len(contract.classes), contract.dim),
        experiment.objective,
        experiment.train,
        (experiment.seed, job.client),
    )


def train_client(job: ClientJob, data: ClientData, observe: EpochObserver | None = None) -> ClientSummary:
    """Train one client to the end, from its last checkpoint if there is one, and write its files.

    The summary is written last: a client with a summary is complete.
    """
    files = ClientFiles(job.folder)
    done = files.read_summary()
    if done is not None:
        return done
    if len(data) == 0:
        summary = ClientSummary(job.client, "empty", 0, 0, "owns no samples")
    else:
        try:
            with one_thread():
                summary = _train(job, data, files, observe)
        except TrainingError as error:
            summary = ClientSummary(job.client, "failed", len(data), data.classes, str(error))
    write_json(files.summary, summary.to_dict())
    files.checkpoint.unlink(missing_ok=True)
    if files.checkpoint.parent.is_dir():
        files.checkpoint.parent.rmdir()
    return summary


def _train(job: ClientJob, data: ClientData, files: ClientFiles, observe: EpochObserver | None) -> ClientSummary:
    training = build_training(job, data)
    trace: list[dict[str, float]] = []
    seconds_before = 0.0
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
            send(files.snapshot(training.epoch), job, training.network, data, training.epoch)
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
    return finish_client(job, files, training.network, data, trace, seconds)


def finish_client(
    job: ClientJob,
    files: ClientFiles,
    network: PrototypeNetwork,
    data: ClientData,
    trace: list[dict[str, float]],
    seconds: float,
) -> ClientSummary:
    """Write trace and upload of a trained client; the summary is left to the caller, because it marks completion."""
    write_text(files.trace, "".join(json.dumps(row) + "\n" for row in trace))
    send(files.upload, job, network, data, int(trace[-1]["epoch"]))
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
    )


def send(path: Path, job: ClientJob, network: PrototypeNetwork, data: ClientData, epoch: int) -> None:
    """Write the client's message, with what its switches let out."""
    upload = job.experiment.upload
    write_upload(
        path,
        network,
        job.contract,
        client=job.client,
        counts=data.counts,
        epoch=epoch,
        seed=job.experiment.seed,
        counts_mode=upload.counts,
        counts_epsilon=upload.counts_epsilon,
        dtype=upload.dtype,
    )
