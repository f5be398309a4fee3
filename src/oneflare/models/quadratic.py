"""A model with one Gaussian per class on fixed features: its borders between classes are quadratic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.models.analytic import FeatureModel
from oneflare.models.base import Cost, Task


class QuadraticModel(FeatureModel):
    """-|(z - m_c) R_c|^2 / 2 + bias_c with z = phi(x) P, features phi that need no training."""

    kind = "quadratic"

    def __init__(
        self, task: Task, feature_map: Mapping[str, Any], bound: float | None, tensors: Mapping[str, Tensor]
    ) -> None:
        """tensors: projection P `(D, r)`, means m `(C, r)`, factors R `(C, r, r)`, bias `(C,)`, all float32"""
        super().__init__(task, feature_map, bound)
        self.projection, self.means = tensors["projection"], tensors["means"]
        self.factors, self.bias = tensors["factors"], tensors["bias"]

    @property
    def cost(self) -> Cost:
        own = sum(tensor.numel() for tensor in (self.projection, self.means, self.factors, self.bias))
        return Cost(self.features.parameters + own, 1)

    def classify(self, phi: Tensor) -> Tensor:
        z = phi @ self.projection
        distances = [
            ((z - mean) @ factor).square().sum(1) for mean, factor in zip(self.means, self.factors, strict=True)
        ]
        return self.bias - 0.5 * torch.stack(distances, 1)

    def state(self, reference_from: Path | None) -> dict[str, Any]:
        del reference_from
        tensors = {"projection": self.projection, "means": self.means, "factors": self.factors, "bias": self.bias}
        return {"feature_map": self.spec, "bound": self.bound, **tensors}

    @classmethod
    def from_state(
        cls, task: Task, state: Mapping[str, Any], encoder: Callable[[], nn.Module], source: Path
    ) -> QuadraticModel:
        del encoder, source
        return cls(task, state["feature_map"], state["bound"], state)
