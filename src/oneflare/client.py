"""One client's isolated training: its own data in, one upload out.

Nothing is shared while training. Every random draw is named by (seed, client, purpose, epoch), so a client's upload
does not depend on where, when or beside whom it is trained, and training resumes from any epoch bit for bit.
"""

from __future__ import annotations

import copy
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.config import Experiment, ObjectiveConfig, TrainConfig
from oneflare.data import Augmentation, ClientData, Split, prepare
from oneflare.errors import RunError, TrainingError
from oneflare.files import load_state, read_json, save_state, write_json, write_text
from oneflare.nn import PrototypeNetwork, Target, build_feature_map, build_target, initial_network
from oneflare.nn.hardware import choose_device, choose_precision, one_thread
from oneflare.objective import Batch, ClientFacts, Controller, Pull, build_controller, local_terms
from oneflare.optim import SGD, Thermostat, largest_curvature, scaled_rate, stable_rate
from oneflare.schedules import build_schedule, peak, restart_steps
from oneflare.seeds import torch_generator
from oneflare.statistics import measure, pack, privatise
from oneflare.upload import KNOWN, Contract, write_upload

DIVERGED = "the loss became NaN or infinite in epoch {epoch}; lower train.lr or train.clip"
EpochObserver = Callable[[int, dict[str, float]], None]

CALIBRATION_BATCH = 256
TRUST: tuple[float, ...] = (0.0, *(2.0 ** (e / 4) for e in range(-16, 17)))


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
    conflicts: float = 0.0
    """share of steps in which the pull of the anchors conflicted with the local gradient"""
    peak_lr: float = 0.0
    stable_lr: float | None = None
    """2/L at the start, where train.check_lr asked for it"""

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
    ) -> None:
        """stream: (seed, client), the name of this client's random numbers."""
        self.device = choose_device(train.device)
        self.precision = choose_precision(train.precision, self.device, augmentation.image.size)
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
        self.optimizer = SGD(
            list(network.parameters()), momentum=train.momentum, weight_decay=train.weight_decay, clip=train.clip
        )
        self.batches = math.ceil(len(data) / train.batch_size)
        self.restarts = restart_steps(self.schedule, self.total_steps) if train.momentum_reset else frozenset()
        self.thermostat = Thermostat(train.thermostat, self.batches) if train.thermostat else None
        self.epoch = 0

    @property
    def total_steps(self) -> int:
        return self.train.epochs * self.batches

    def lr(self, progress: float) -> float:
        return self.base_lr * self.schedule(progress)

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
        loss = local if pull is None else self.controller.loss(local, pull.loss, progress)
        loss.backward()
        if pull is not None:
            terms |= {"align": pull.loss, "conflicts": pull.apply(self.objective.pcgrad)}
        self.optimizer.step(self.lr(progress))
        self.controller.step()
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
        )

    def _local(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """The named terms, and L_local."""
        terms = local_terms(self.objective.terms, batch)
        return terms, torch.stack([self.objective.terms[name] * term for name, term in terms.items()]).sum()

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
        return stable_rate(largest_curvature(loss, list(network.parameters()), start))

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "network": dict(self.network.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "controller": self.controller.state_dict(),
            "thermostat": None if self.thermostat is None else self.thermostat.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])
        if self.thermostat is not None:
            self.thermostat.load_state_dict(state["thermostat"])


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
        build_target(contract.anchors, network.prototypes),
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
    summary = finish_client(job, files, training.network, data, trace, seconds, companions)
    return replace(summary, peak_lr=training.peak_lr, stable_lr=stable)


def finish_client(
    job: ClientJob,
    files: ClientFiles,
    network: PrototypeNetwork,
    data: ClientData,
    trace: list[dict[str, float]],
    seconds: float,
    companions: Companions | None = None,
) -> ClientSummary:
    """Write trace and upload of a trained client; the summary is left to the caller, because it marks completion."""
    write_text(files.trace, "".join(json.dumps(row) + "\n" for row in trace))
    send(files.upload, job, network, data, int(trace[-1]["epoch"]), companions)
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
    )


@dataclass(frozen=True)
class Companions:
    """What an upload may hold beside the network."""

    statistics: Mapping[str, Tensor] | None = None
    """packed"""
    held_out: ClientData | None = None
    """kept back from training, to calibrate the network"""


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


def client_statistics(job: ClientJob, data: ClientData) -> dict[str, Tensor] | None:
    """The packed statistics of a client's images, noised if the federation agreed on that; None if it sends none."""
    plan = job.contract.statistics
    if plan is None:
        return None
    image, classes = job.contract.image, len(job.contract.classes)
    features = build_feature_map(plan.feature_map, image.channels, image.size, plan.bound)
    statistics = measure(features, data.images, data.labels, classes)
    if plan.privacy is not None:
        seed = job.experiment.upload.statistics_noise_seed
        generator = torch_generator(secrets.randbits(62) if seed is None else seed, job.client, "statistics noise")
        statistics = privatise(statistics, plan.privacy, generator)
    return pack(statistics, plan.dtype)


def hold_out(data: ClientData, share: float, stream: tuple[int, int]) -> tuple[ClientData, ClientData | None]:
    """What a client trains on, and the part of each class that it keeps back; None if nothing is kept back."""
    order = torch.randperm(len(data), generator=torch_generator(*stream, "hold-out"))
    labels = data.labels[order]
    held = torch.zeros(len(data), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero().squeeze(1)
        held[rows[: int(share * len(rows))]] = True
    if not bool(held.any()):
        return data, None
    kept, back = (
        ClientData.of(Split(data.images[rows], data.labels[rows]), len(data.counts))
        for rows in (order[~held].sort().values, order[held].sort().values)
    )
    return kept, back


@torch.no_grad()
def calibrate(network: PrototypeNetwork, counts: Tensor, held_out: ClientData, contract: Contract) -> float:
    """How far a client's log-likelihood ratios L_c = z.P_c - log n_c may be trusted: beta for softmax(beta L).

    Over the classes it knows (`KNOWN` images), each with equal weight: the smallest beta whose cross-entropy on the
    images kept back is within one standard error of the best, because trusting a network too much costs more than
    trusting it too little. 0 means that it has no say.

    counts: `(C,)` images of each class
    """
    known = counts >= KNOWN
    rows = known[held_out.labels]
    if int(known.sum()) < 2 or not bool(rows.any()):
        return 0.0
    images, labels = held_out.images[rows], (known.cumsum(0) - 1)[held_out.labels[rows]]
    network.eval()
    parts = images.to(network.prototypes.device).split(CALIBRATION_BATCH)
    features = torch.cat([network(prepare(part, contract.image)) for part in parts])
    ratios = (features @ network.prototypes[known].T).cpu().double() - counts[known].double().log()
    weights = 1 / torch.bincount(labels)[labels].double()
    weights = weights / weights.sum()
    losses = torch.stack([nn.functional.cross_entropy(beta * ratios, labels, reduction="none") for beta in TRUST])
    excess = losses - losses[int((losses @ weights).argmin())]  # (betas, images)
    mean = excess @ weights
    error = ((weights * (excess - mean[:, None])) ** 2).sum(1).sqrt()
    return TRUST[int((mean <= error).int().argmax())]


def send(
    path: Path,
    job: ClientJob,
    network: PrototypeNetwork | None,
    data: ClientData,
    epoch: int,
    companions: Companions | None = None,
) -> None:
    """Write the client's message, with what its switches let out."""
    companions = companions or Companions()
    upload = job.experiment.upload
    trust = None
    if network is not None and job.experiment.train.holdout > 0:
        trust = 0.0
        if companions.held_out is not None:
            trust = calibrate(network, data.counts, companions.held_out, job.contract)
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
        statistics=companions.statistics,
        trust=trust,
    )
