"""Rules that mix the members' predicted probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.models.members import rule


@rule
@dataclass(frozen=True)
class ProbabilityMean:
    """log sum_i w_i softmax(z_i P_i^T) with unit features z_i, as in training"""

    weights: Tensor
    """`(N,)` of clients, or `(N, C)` of their classes"""
    prototypes: Tensor
    """`(N, C, d)`"""

    def start(self, images: int) -> Tensor:
        return torch.zeros(images, self.prototypes.shape[1])

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        logits = F.normalize(features, dim=1) @ self.prototypes[member].T
        state[rows] += self.weights[member] * logits.softmax(1)

    def finish(self, state: Tensor) -> Tensor:
        return state.clamp(min=1e-30).log()
