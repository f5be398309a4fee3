"""Fusions of task vectors: what each client added to the shared start, tau_i = theta_i - theta_0.

theta holds the encoder's parameters and the prototypes. Running statistics of batch normalisation are no parameters
and have no meaningful start: they are averaged by client size.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.errors import ConfigError
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.base import SingleModel


def trimmed(vector: Tensor, density: float) -> Tensor:
    """The `density` part of the entries with the largest magnitudes; the others 0. `(n,)` -> `(n,)`"""
    keep = round(density * len(vector))
    if keep >= len(vector):
        return vector
    if keep == 0:
        return torch.zeros_like(vector)
    magnitudes = vector.abs()
    threshold = magnitudes.kthvalue(len(vector) - keep + 1).values
    return torch.where(magnitudes >= threshold, vector, torch.zeros_like(vector))


def dropped(vector: Tensor, drop: float, generator: torch.Generator) -> Tensor:
    """m * tau / (1 - p), with m = 0 at random for a part p of the entries: the expectation stays tau."""
    kept = torch.rand(len(vector), generator=generator) >= drop
    return torch.where(kept, vector / (1 - drop), torch.zeros_like(vector))


class Merge(Protocol):
    """Takes task vectors one by one, so that no two clients need be in memory."""

    def add(self, vector: Tensor, share: float) -> None: ...

    def result(self) -> Tensor: ...


class MeanMerge:
    """sum_i w_i tau_i"""

    def __init__(self, size: int) -> None:
        self.total = torch.zeros(size, dtype=torch.float64)

    def add(self, vector: Tensor, share: float) -> None:
        self.total += share * vector

    def result(self) -> Tensor:
        return self.total


class SignMerge:
    """Elect a sign, gamma = sgn(sum_i tau_i), then the mean of the entries that have it (a disjoint mean).

    Sums and numbers of both signs are kept apart, so one pass over the clients is enough.
    """

    def __init__(self, size: int, density: float) -> None:
        self.density = density
        self.sums = torch.zeros(2, size, dtype=torch.float64)
        self.numbers = torch.zeros(2, size, dtype=torch.float64)

    def add(self, vector: Tensor, share: float) -> None:
        del share
        vector = trimmed(vector, self.density)
        for index, part in enumerate((vector.clamp(min=0), vector.clamp(max=0))):
            self.sums[index] += part
            self.numbers[index] += part != 0

    def result(self) -> Tensor:
        means = self.sums / self.numbers.clamp(min=1)
        elected = self.sums.sum(0)
        return torch.where(elected > 0, means[0], torch.where(elected < 0, means[1], torch.zeros_like(elected)))


class TaskVectors(Fusion):
    """theta_0 + scale * merge(tau_1, ..., tau_N)"""

    single_network = True

    scale: float = 1.0

    @abstractmethod
    def merge(self, size: int) -> Merge:
        """How the vectors `(size,)` become one."""

    def prepare(self, vector: Tensor, client: int) -> Tensor:
        """What becomes of one client's task vector before it is merged."""
        del client
        return vector

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        network = copy.deepcopy(uploads.template)
        names = [name for name, _ in network.encoder.named_parameters()]
        start = _flat(network.encoder.state_dict(), network.prototypes.detach(), names)
        merge = self.merge(len(start))
        buffers: dict[str, Tensor] = {}
        for share, upload, prototypes in zip(uploads.size_weights, uploads, uploads.prototypes, strict=True):
            state = upload.weights()
            vector = _flat(state, prototypes, names) - start
            merge.add(self.prepare(vector, upload.client), float(share))
            for name in state.keys() - set(names):
                part = share * state[name].double()
                buffers[name] = part if name not in buffers else buffers[name] + part
        _fill(network.encoder.state_dict(), network.prototypes.data, names, start + self.scale * merge.result())
        for name, tensor in network.encoder.state_dict().items():
            if name in buffers:
                tensor.copy_(buffers[name])
        return Fused(SingleModel(uploads.task, network))


def _flat(state: Mapping[str, Tensor], prototypes: Tensor, names: list[str]) -> Tensor:
    return torch.cat([*(state[name].double().flatten() for name in names), prototypes.double().flatten()])


def _fill(state: Mapping[str, Tensor], prototypes: Tensor, names: list[str], vector: Tensor) -> None:
    """The inverse of `_flat`, in place."""
    targets = [*(state[name] for name in names), prototypes]
    for target, part in zip(targets, vector.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view_as(target))


@FUSIONS.register("ties")
class Ties(TaskVectors):
    """TIES: trim every client's change by magnitude, elect a sign per weight, average those that agree

    tau_i trimmed to its largest `density` part; gamma = sgn(sum_i tau_i); tau = mean of the tau_i with that sign;
    theta = theta_0 + scale tau (Yadav et al. 2023).
    """

    def __init__(self, *, density: float = 0.2, scale: float = 1.0) -> None:
        self.density = _part("ties.density", density)
        self.scale = scale

    def merge(self, size: int) -> Merge:
        return SignMerge(size, self.density)


@FUSIONS.register("dare")
class Dare(TaskVectors):
    """DARE: drop a random part of every client's change, rescale the rest, then average or ties

    tau_i <- m_i tau_i / (1 - p), m_i ~ Bernoulli(1 - p) seeded per client (Yu et al. 2024). The paper drops 0.9 of
    the small changes of fine-tuning; changes from a random start are large, hence the milder default.
    """

    def __init__(
        self,
        *,
        drop: float = 0.5,
        then: Literal["average", "ties"] = "average",
        density: float = 0.2,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not 0 <= drop < 1:
            raise ConfigError(f"fusion dare.drop: must be at least 0 and less than 1 (got {drop})")
        self.drop = drop
        self.then = then
        self.density = _part("dare.density", density)
        self.scale = scale
        self.seed = seed

    def merge(self, size: int) -> Merge:
        return MeanMerge(size) if self.then == "average" else SignMerge(size, self.density)

    def prepare(self, vector: Tensor, client: int) -> Tensor:
        return dropped(vector, self.drop, torch_generator(self.seed, client, "dare"))


def _part(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ConfigError(f"fusion {name}: must be greater than 0 and at most 1 (got {value})")
    return value
