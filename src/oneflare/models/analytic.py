"""Models that rest on summed statistics: a linear classifier on fixed features, alone or corrected by members."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.core.threads import in_threads
from oneflare.models.base import BATCH, Cost, GlobalModel, Task
from oneflare.models.members import Member, MemberModel, Rule
from oneflare.nn import build_feature_map


class FeatureModel(GlobalModel):
    """A classifier of features phi(x) that need no training; how it classifies them is up to the subclass."""

    kind = "features"

    def __init__(self, task: Task, feature_map: Mapping[str, Any], bound: float | None) -> None:
        """feature_map: its spec; bound: largest norm of features"""
        super().__init__(task)
        self.spec, self.bound = dict(feature_map), bound
        self.features = build_feature_map(self.spec, task.image.channels, task.image.size, bound)

    @abstractmethod
    def classify(self, phi: Tensor) -> Tensor:
        """Logits `(n, C)` of features `(n, D)`."""

    def logits(self, images: Tensor, batch_size: int = BATCH) -> Tensor:
        images = self.inputs(images)
        parts = in_threads(lambda batch: self.classify(self.features(batch)), images.split(batch_size))
        return torch.cat(parts) if parts else torch.empty(0, len(self.task.classes))


class AnalyticModel(FeatureModel):
    """phi(x) W + bias, with features phi that need no training."""

    kind = "analytic"

    def __init__(
        self, task: Task, feature_map: Mapping[str, Any], bound: float | None, weight: Tensor, bias: Tensor
    ) -> None:
        """weight `(D, C)`, bias `(C,)`; the rest as in `FeatureModel`"""
        super().__init__(task, feature_map, bound)
        self.weight, self.bias = weight, bias

    @property
    def cost(self) -> Cost:
        return Cost(self.features.parameters + self.weight.numel() + self.bias.numel(), 1)

    def classify(self, phi: Tensor) -> Tensor:
        return phi @ self.weight + self.bias

    def state(self, reference_from: Path | None) -> dict[str, Any]:
        del reference_from
        return {"feature_map": self.spec, "bound": self.bound, "weight": self.weight, "bias": self.bias}

    @classmethod
    def from_state(
        cls, task: Task, state: Mapping[str, Any], encoder: Callable[[], nn.Module], source: Path
    ) -> AnalyticModel:
        del encoder, source
        return cls(task, state["feature_map"], state["bound"], state["weight"], state["bias"])


class AnalyticMemberModel(MemberModel):
    """An analytic model whose posterior every client's network corrects among the classes it has seen."""

    kind = "analytic_members"

    def __init__(
        self, task: Task, members: Sequence[Member], rule: Rule, encoder: nn.Module, analytic: AnalyticModel
    ) -> None:
        super().__init__(task, members, rule, encoder)
        self.analytic = analytic

    @property
    def cost(self) -> Cost:
        deep, own = super().cost, self.analytic.cost
        return Cost(deep.parameters + own.parameters, deep.forward_passes + own.forward_passes)

    def start(self, images: Tensor, batch_size: int) -> Tensor:
        state = super().start(images, batch_size)
        state[:, 0] = self.analytic.logits(images, batch_size).log_softmax(1)
        return state

    def state(self, reference_from: Path | None) -> dict[str, Any]:
        return super().state(reference_from) | {"analytic": self.analytic.state(reference_from)}

    @classmethod
    def from_state(
        cls, task: Task, state: Mapping[str, Any], encoder: Callable[[], nn.Module], source: Path
    ) -> AnalyticMemberModel:
        analytic = AnalyticModel.from_state(task, state["analytic"], encoder, source)
        return cls(task, *cls.parts(state, source), encoder(), analytic)
