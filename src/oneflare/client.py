"""One client's isolated training: its own data in, one upload out.

Nothing is shared while training. Every random draw is named by (seed, client, purpose, epoch), so a client's upload
does not depend on where, when or beside whom it is trained, and training resumes from any epoch bit for bit.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.config import Experiment, ObjectiveConfig, TrainConfig
from oneflare.data import Augmentation, ClientData, Split, prepare
from oneflare.errors import RunError, TrainingError
from oneflare.files import load_state, read_json, save_state, write_json, write_text
from oneflare.nn import PrototypeNetwork, build_anchors, build_feature_map, initial_network
from oneflare.nn.hardware import choose_device, choose_precision, one_thread
from oneflare.objective import Batch, ClientFacts, Controller, align, build_controller, local_terms
from oneflare.schedules import build_schedule
from oneflare.seeds import torch_generator
from oneflare.statistics import measure, pack, privatise
from oneflare.upload import KNOWN, Contract, write_upload

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
        self.parameters = list(network.parameters())
        self.optimizer = torch.optim.SGD(
            self.parameters,
            lr=train.lr,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            fused=self.device.type != "mps",
        )
        self.batches = math.ceil(len(data) / train.batch_size)
        self.epoch = 0

    @property
    def total_steps(self) -> int:
        return self.train.epochs * self.batches

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
            losses, hits = self.step(*self.views(rows, draws), progress)
            names = list(losses)
            row = torch.stack(list(losses.values()))
            totals = row if totals is None else totals + row
            correct += hits
        self.epoch += 1
        if totals is None or not bool(torch.isfinite(totals).all()):
            raise TrainingError(f"the loss became NaN or infinite in epoch {self.epoch}; lower train.lr or train.clip")
        means = (totals / self.batches).tolist()
        return {
            "epoch": self.epoch,
            "progress": progress,
            "lr": self.optimizer.param_groups[0]["lr"],
            **dict(zip(names, means, strict=True)),
            "accuracy": float(correct) / (2 * len(self.data)),
            **self.controller.trace(),
        }

    def views(self, rows: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """Both views of some samples `(2B, c, h, w)` and their labels `(2B,)`."""
        images, labels = self.data.images[rows].to(self.device), self.data.labels[rows].to(self.device)
        return self.augmentation.two_views(images, draws), labels.repeat(2)

    def step(self, views: Tensor, labels: Tensor, progress: float) -> tuple[dict[str, Tensor], Tensor]:
        """One update. views: `(2B, c, h, w)`, labels: `(2B,)`. Returns detached losses by name, and the hits."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.train.lr * self.schedule(progress)
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
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.train.clip)
        self.optimizer.step()
        self.controller.step()
        with torch.no_grad():
            hits = (batch.logits.argmax(1) == labels).sum()
        return {"local": local.detach(), **{name: term.detach() for name, term in terms.items()}}, hits

    def state_dict(self) -> dict[str, Any]:
        momentum = [self.optimizer.state.get(p, {}).get("momentum_buffer") for p in self.parameters]
        return {
            "epoch": self.epoch,
            "network": dict(self.network.state_dict()),
            "momentum": momentum,
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self.network.load_state_dict(state["network"])
        for parameter, buffer in zip(self.parameters, state["momentum"], strict=True):
            if buffer is not None:
                self.optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffer)
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
    held = {"client": job.client, "samples": len(data), "classes": int((data.counts > 0).sum())}
    if len(data) == 0:
        summary = ClientSummary(status="empty", reason="owns no samples", **held)
    else:
        try:
            with one_thread():
                summary = (_train if job.experiment.trains else _measure)(job, data, files, observe, held)
        except TrainingError as error:
            summary = ClientSummary(status="failed", reason=str(error), **held)
    write_json(files.summary, summary.to_dict())
    files.checkpoint.unlink(missing_ok=True)
    if files.checkpoint.parent.is_dir():
        files.checkpoint.parent.rmdir()
    return summary


def _train(
    job: ClientJob, data: ClientData, files: ClientFiles, observe: EpochObserver | None, held: dict[str, int]
) -> ClientSummary:
    kept, held_out = hold_out(data, job.experiment.train.holdout, (job.experiment.seed, job.client))
    training = build_training(job, kept)
    statistics = client_statistics(job, data)
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
            _write_upload(files.snapshot(training.epoch), job, data, statistics, training, held_out)
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
    write_text(files.trace, "".join(json.dumps(row) + "\n" for row in trace))
    _write_upload(files.upload, job, data, statistics, training, held_out)
    return ClientSummary(
        status="trained",
        train_seconds=seconds,
        upload_bytes=files.upload.stat().st_size,
        lambda_raw_max=max(row["lambda_raw_max"] for row in trace),
        lambda_effective_final=trace[-1]["lambda_effective"],
        accuracy_own=trace[-1]["accuracy"],
        **held,  # type: ignore[arg-type]
    )


def _measure(
    job: ClientJob, data: ClientData, files: ClientFiles, observe: EpochObserver | None, held: dict[str, int]
) -> ClientSummary:
    """The upload of a client that trains nothing."""
    del observe
    started = time.monotonic()
    _write_upload(files.upload, job, data, client_statistics(job, data))
    return ClientSummary(
        status="trained",
        train_seconds=time.monotonic() - started,
        upload_bytes=files.upload.stat().st_size,
        **held,  # type: ignore[arg-type]
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


def _write_upload(
    path: Path,
    job: ClientJob,
    data: ClientData,
    statistics: Mapping[str, Tensor] | None,
    training: LocalTraining | None = None,
    held_out: ClientData | None = None,
) -> None:
    upload = job.experiment.upload
    trust = None
    if training is not None and job.experiment.train.holdout > 0:
        trust = 0.0
        if held_out is not None:
            trust = calibrate(training.network, data.counts, held_out, job.contract)
    write_upload(
        path,
        None if training is None else training.network,
        job.contract,
        client=job.client,
        counts=data.counts,
        epoch=0 if training is None else training.epoch,
        seed=job.experiment.seed,
        counts_mode=upload.counts,
        counts_epsilon=upload.counts_epsilon,
        dtype=upload.dtype,
        statistics=statistics,
        trust=trust,
    )
