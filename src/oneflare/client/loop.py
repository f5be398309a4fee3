"""The training loop of one client.

Every random draw is named by (seed, client, purpose, epoch), so training resumes from any epoch bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.client.job import ClientJob
from oneflare.client.start import shared_start
from oneflare.core.config import ObjectiveConfig, TrainConfig
from oneflare.core.files import load_state
from oneflare.core.schedules import build_schedule, peak, restart_steps
from oneflare.core.seeds import torch_generator
from oneflare.data import Augmentation, ClientData
from oneflare.errors import TrainingError
from oneflare.nn import PrototypeNetwork, Target, add_unknown, build_target
from oneflare.nn.hardware import PRECISIONS, Workload, choose_device, choose_precision, precision_name
from oneflare.nn.optimisers import (
    SGD,
    StepSettings,
    Thermostat,
    build_optimiser,
    largest_curvature,
    scaled_rate,
    stable_rate,
)
from oneflare.objective import (
    Bank,
    Batch,
    ClientFacts,
    Controller,
    OutlierMaker,
    Proximal,
    Pull,
    PullOptions,
    build_bank,
    build_controller,
    local_terms,
)
from oneflare.objective.terms import Outliers

DIVERGED = "the loss became NaN or infinite in epoch {epoch}; lower train.lr or train.clip"


@dataclass(frozen=True)
class Aim:
    """What one client minimises, with the parts that its objective names."""

    objective: ObjectiveConfig
    controller: Controller
    target: Target | None = None
    """the anchors that prototypes are pulled toward"""
    bank: Bank | None = None


class LocalTraining:
    """The loop of one client. `run_epoch` advances it; `state_dict` is everything that resuming needs."""

    def __init__(
        self,
        network: PrototypeNetwork,
        data: ClientData,
        augmentation: Augmentation,
        aim: Aim,
        train: TrainConfig,
        stream: tuple[int, int],
    ) -> None:
        """stream: (seed, client), the name of this client's random numbers."""
        self.device = choose_device(train.device)
        workload = Workload(network.encoder, augmentation.image.channels, augmentation.image.size)
        self.precision = choose_precision(train.precision, self.device, workload)
        self.network = network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.data = data
        self.augmentation = augmentation
        self.controller = aim.controller
        self.controller.to(self.device)
        self.target = None if aim.target is None else aim.target.to(self.device)
        self.objective = objective = aim.objective
        self.pull = PullOptions(objective.align_classes == "seen", objective.align_reduction == "per_prototype")
        self.train = train
        self.stream = stream
        self.schedule = build_schedule(train.schedule)
        self.base_lr = scaled_rate(train.lr, train.batch_size, train.lr_scale_batch)
        self.bank = aim.bank
        if self.bank is not None:
            self.bank.to(self.device)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.proximal = Proximal(trained, objective.proximal) if objective.proximal else None
        settings = StepSettings(train.momentum, train.weight_decay, train.clip)
        self.optimizer = build_optimiser(train.optimiser, trained, settings)
        self.outliers: OutlierMaker | None = None
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
        if self.objective.open_set:
            self.outliers = OutlierMaker(torch_generator(seed, client, "outliers", self.epoch))
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
                assert isinstance(self.optimizer, SGD)  # the only one that the thermostat is for
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
        batch = self._batch(*self._features(views, labels), labels, self.network)
        terms, local = self._local(batch)
        pull = None
        if self.target is not None:
            pull = Pull(self.network.prototypes, self.target.at(progress), labels, self.pull)
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

    def _features(self, views: Tensor, labels: Tensor) -> tuple[Tensor, Outliers | None]:
        """Raw features of the views, and outliers: those pass through the encoder together with the views, so that both
        meet the same batch-norm statistics."""
        network, maker = self.network, self.outliers
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            if maker is None or network.unknown is None:
                return network.encoder(views), None
            inputs = maker.images(views, network.encoder, network.prototypes, network.unknown)
            features, others = network.encoder(torch.cat([views, inputs])).float().tensor_split([len(views)])
        return features, maker.outliers(others, features, labels, network.unknown)

    def _batch(self, features: Tensor, outliers: Outliers | None, labels: Tensor, network: PrototypeNetwork) -> Batch:
        return Batch(
            nn.functional.normalize(features.float(), dim=1),
            labels,
            network.prototypes,
            self.objective.supcon_temperature,
            self.objective.proto_temperature,
            None if self.bank is None else self.bank.pairs(),
            outliers,
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
            return self._local(self._batch(network.encoder(views), None, labels, network))[1]

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


def build_training(job: ClientJob, data: ClientData) -> LocalTraining:
    experiment, contract = job.experiment, job.contract
    network = shared_start(experiment, contract)
    if experiment.objective.open_set:
        add_unknown(network, experiment.seed)
    train = experiment.train
    if job.precision is not None:
        train = train.model_copy(update={"precision": job.precision})
    public = load_state(job.bank)["features"] if job.bank is not None and job.bank.exists() else None
    aim = Aim(
        experiment.objective,
        build_controller(experiment.controller, ClientFacts(tuple(data.counts.tolist()))),
        build_target(contract.anchors, network.prototypes),
        build_bank(experiment.objective.bank, contract.dim, public),
    )
    return LocalTraining(
        network,
        data,
        Augmentation.for_data(experiment.augment, contract.image, job.flip),
        aim,
        train,
        (experiment.seed, job.client),
    )
