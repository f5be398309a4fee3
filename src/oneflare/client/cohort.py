"""Trains several small clients together as one batch of models (`torch.func.vmap`).

With a handful of tiny images per client, a step costs what its hundred operations cost to start; a batch of models
starts them once. The mathematics is that of `LocalTraining`, client by client: own order, own views, own gradient norm,
own controller. Sums are rounded in another order, so a cohort's uploads agree with single training to rounding, and are
repeatable: who trains together depends on the partition alone, never on the number of workers. What cannot be
batched so is trained one after another: `supports`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from oneflare.client.files import ClientFiles, ClientSummary, snapshot_epochs
from oneflare.client.job import ClientJob
from oneflare.client.loop import DIVERGED, LocalTraining, build_training
from oneflare.client.observer import Observer
from oneflare.client.sending import send
from oneflare.client.training import finish_client, train_client
from oneflare.core.files import write_json
from oneflare.core.seeds import torch_generator
from oneflare.data import Augmentation, ClientData
from oneflare.nn.given import CUSTOM
from oneflare.nn.hardware import choose_device, one_thread
from oneflare.objective import Batch, Pull, local_terms

LARGEST_IMAGE = 8
MOST_SAMPLES = 16
MOST_CLIENTS = 16
"""The rule's constants, measured: docs/performance.md."""


def supports(job: ClientJob) -> bool:
    """Whether clients with such a job may train as one batch of models; a precision of `auto` must be decided before.

    Batched are the networks, the objective's terms, the pull toward anchors, and the controllers. The other parts of a
    client (below) are not, nor are networks from elsewhere, which vmap may not understand. Only float32 agrees with
    training alone: in bfloat16 the batched convolutions round so differently that the gradient of a single step differs
    by 13 % (float32: 0.0002 %), so there each client trains alone.
    """
    experiment, train, image = job.experiment, job.experiment.train, job.contract.image
    alone = (
        train.thermostat,
        train.check_lr,
        train.holdout,
        train.optimiser is not None,
        experiment.objective.has_additions,
        job.contract.statistics is not None,
        job.contract.encoder["name"] == CUSTOM,
        image.backbone is not None and image.backbone.tune is not None,
    )
    on_processor = choose_device(train.device).type == "cpu"
    return experiment.trains and on_processor and not any(alone) and (job.precision or train.precision) == "float32"


def cohorts(sizes: Sequence[int], image_size: int, most: int | None) -> list[list[int]]:
    """Who trains together: clients with the same few samples of small images; everybody else alone.

    Largest first, so that no worker ends up alone with the largest. `most` overrides the rule; 1 switches it off.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for client, size in enumerate(sizes):
        groups[size].append(client)
    result: list[list[int]] = []
    for size in sorted(groups, reverse=True):
        together = most or (MOST_CLIENTS if image_size <= LARGEST_IMAGE and size <= MOST_SAMPLES else 1)
        if size == 0:
            together = 1
        clients = groups[size]
        result += [clients[start : start + together] for start in range(0, len(clients), together)]
    return result


def train_cohort(
    jobs: Sequence[ClientJob], data: Sequence[ClientData], observer: Observer | None = None
) -> list[ClientSummary]:
    """Train some clients to the end and write their files.

    One alone, and what cohorts do not support, is trained the plain way, with checkpoints. A cohort that was
    interrupted starts again as a whole: it takes seconds, and its result stays the same.
    """
    observer = observer or Observer()
    if len(jobs) == 1 or not all(map(supports, jobs)):
        return [train_client(*pair, observer) for pair in zip(jobs, data, strict=True)]
    files = [ClientFiles(job.folder) for job in jobs]
    done = [client.read_summary() for client in files]
    if all(summary is not None for summary in done):
        return [summary for summary in done if summary is not None]
    with one_thread():
        summaries = Cohort(jobs, data).train(files, observer)
    for client, summary in zip(files, summaries, strict=True):
        write_json(client.summary, summary.to_dict())
    return summaries


class Cohort:
    """K clients with equally many samples; every tensor of the model gains a first dimension K."""

    def __init__(self, jobs: Sequence[ClientJob], data: Sequence[ClientData]) -> None:
        self.jobs = jobs
        self.data = data
        self.trainings: list[LocalTraining] = [build_training(*pair) for pair in zip(jobs, data, strict=True)]
        self.first = self.trainings[0]
        self.images = torch.stack([client.images for client in data])
        self.labels = torch.stack([client.labels for client in data])
        self.parameters, self.buffers = stack_module_state([training.network for training in self.trainings])
        self.momentum = {name: torch.zeros_like(tensor) for name, tensor in self.parameters.items()}
        self.failed: dict[int, str] = {}

    def train(self, files: Sequence[ClientFiles], observer: Observer) -> list[ClientSummary]:
        config = self.first.train
        snapshots = set(snapshot_epochs(config.epochs, config.snapshots, config.tail))
        traces: list[list[dict[str, float]]] = [[] for _ in self.jobs]
        started = time.monotonic()
        for epoch in range(1, config.epochs + 1):
            for index, row in enumerate(self.run_epoch(epoch)):
                traces[index].append(row)
                observer.epoch(self.jobs[index].client, epoch, row, len(self.data[index]))
            if epoch in snapshots:
                self._unstack()
                for index in self._alive():
                    path = files[index].snapshot(epoch)
                    send(path, self.jobs[index], self.trainings[index].network, self.data[index], epoch)
        self._unstack()
        seconds = (time.monotonic() - started) / len(self.jobs)
        return [self._finish(index, files[index], traces[index], seconds) for index in range(len(self.jobs))]

    def _alive(self) -> list[int]:
        return [index for index in range(len(self.jobs)) if index not in self.failed]

    def _finish(self, index: int, files: ClientFiles, trace: list[dict[str, float]], seconds: float) -> ClientSummary:
        job, data = self.jobs[index], self.data[index]
        if index in self.failed:
            return ClientSummary(job.client, "failed", len(data), data.classes, self.failed[index])
        return finish_client(job, files, self.trainings[index], data, trace, seconds)

    def run_epoch(self, epoch: int) -> list[dict[str, float]]:
        """One pass over everybody's data; the trace row of each client."""
        streams = [training.stream for training in self.trainings]
        orders = torch.stack(
            [torch.randperm(self.images.shape[1], generator=torch_generator(*s, "order", epoch - 1)) for s in streams]
        )
        generators = [torch_generator(*stream, "augment", epoch - 1) for stream in streams]
        batches, total = self.first.batches, self.first.total_steps
        sums: dict[str, Tensor] = {}
        hits = torch.zeros(len(self.jobs))
        progress = 0.0
        for index, columns in enumerate(orders.tensor_split(batches, dim=1)):
            number = (epoch - 1) * batches + index
            progress = number / total
            if number in self.first.restarts:
                torch._foreach_zero_(list(self.momentum.values()))
            losses, right = self.step(*self._views(columns, generators), progress)
            sums = {name: sums.get(name, 0.0) + value for name, value in losses.items()}
            hits += right
        finite = torch.stack(list(sums.values())).isfinite().all(0)
        for index in (~finite).nonzero().flatten().tolist():
            self.failed.setdefault(index, DIVERGED.format(epoch=epoch))
        lr = self.first.lr(progress)
        means = {name: (value / batches).tolist() for name, value in sums.items()}
        samples = self.images.shape[1]
        return [
            {
                "epoch": epoch,
                "progress": progress,
                "lr": lr,
                **{name: values[index] for name, values in means.items()},
                "accuracy": float(hits[index]) / (2 * samples),
                **training.controller.trace(),
            }
            for index, training in enumerate(self.trainings)
        ]

    def _views(self, columns: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """columns `(K, B)` -> views `(K, 2B, c, h, w)`, labels `(K, 2B)`; each client draws from its own stream."""
        clients, batch = columns.shape
        rows = torch.arange(clients)[:, None]
        draws = torch.stack([Augmentation.draw(batch, generator) for generator in generators])
        draws = draws.view(clients, 2, batch, -1).transpose(0, 1).reshape(2 * clients * batch, -1)
        views = self.first.augmentation.two_views(self.images[rows, columns].flatten(0, 1), draws)
        views = views.contiguous().view(2, clients, batch, *views.shape[1:]).transpose(0, 1).flatten(1, 2)
        return views, self.labels[rows, columns].repeat(1, 2)

    def step(self, views: Tensor, labels: Tensor, progress: float) -> tuple[dict[str, Tensor], Tensor]:
        """One update of every client. Returns detached losses by name `(K,)`, and the hits `(K,)`."""
        terms, hits = vmap(self._losses)(self.parameters, self.buffers, views, labels)
        weights = self.first.objective.terms
        local = torch.stack([weights[name] * term for name, term in terms.items()]).sum(0)
        target = self.first.target
        pull = None
        if target is not None:
            pull = Pull(self.parameters["prototypes"], target.at(progress), labels, self.first.pull)
        if pull is None:
            local.sum().backward()
        else:
            pairs = zip(self.trainings, local, pull.loss, strict=True)
            parts = [training.controller.loss(one, pulled, progress) for training, one, pulled in pairs]
            torch.stack(parts).sum().backward()
            terms |= {"align": pull.loss, "conflicts": pull.apply(self.first.objective.pcgrad)}
        self._descend(progress)
        for training in self.trainings:
            training.controller.step()
        return {"local": local.detach(), **{name: term.detach() for name, term in terms.items()}}, hits

    def _losses(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], views: Tensor, labels: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One client's named losses, as vmap sees it: without the first dimension."""
        network, objective = self.first.network, self.first.objective
        features = functional_call(network, (dict(parameters), dict(buffers)), (views,))
        prototypes = parameters["prototypes"]
        batch = Batch(features, labels, prototypes, objective.supcon_temperature, objective.proto_temperature)
        return local_terms(objective.terms, batch), (batch.logits.detach().argmax(1) == labels).sum()

    @torch.no_grad()
    def _descend(self, progress: float) -> None:
        """Clip every client's own gradient norm, then SGD with momentum."""
        config = self.first.train
        gradients = {name: tensor.grad for name, tensor in self.parameters.items() if tensor.grad is not None}
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()])
        factor = (config.clip / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        lr = self.first.lr(progress)
        for name, gradient in gradients.items():
            parameter, momentum = self.parameters[name], self.momentum[name]
            gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))
            if config.weight_decay:
                gradient.add_(parameter, alpha=config.weight_decay)
            momentum.mul_(config.momentum).add_(gradient)
            parameter.sub_(momentum, alpha=lr)
            parameter.grad = None

    def _unstack(self) -> None:
        """Give every client's network its slice."""
        stacked = {**self.parameters, **self.buffers}
        for index, training in enumerate(self.trainings):
            training.network.load_state_dict({name: tensor[index].detach() for name, tensor in stacked.items()})
