"""Rules by moments of features that members measured on their own images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.models.members import rule


@rule
@dataclass(frozen=True)
class StandardisedSum:
    """z = unit(sum_i w_i (z_i - m_i)/s_i), logits z A^T, with unit features z_i and client i's own mean m_i and
    deviation s_i of them"""

    weights: Tensor
    means: Tensor
    """`(N, d)`"""
    deviations: Tensor
    """`(N, d)`"""
    anchors: Tensor
    """`(C, d)`"""

    def start(self, images: int) -> Tensor:
        return torch.zeros(images, self.anchors.shape[1])

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        centred = F.normalize(features, dim=1) - self.means[member]
        state[rows] += self.weights[member] * centred / self.deviations[member]

    def finish(self, state: Tensor) -> Tensor:
        return F.normalize(state, dim=1) @ self.anchors.T


@rule
@dataclass(frozen=True)
class NearestMean:
    """logits_c = -sum_i w_i |z_i - M_c|^2 = 2 (sum_i w_i z_i) M_c - |M_c|^2 - 1 with unit features z_i"""

    weights: Tensor
    means: Tensor
    """`(C, d)` M"""
    squares: Tensor
    """`(C,)` |M_c|^2"""

    def start(self, images: int) -> Tensor:
        return torch.zeros(images, self.means.shape[1])

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        state[rows] += self.weights[member] * F.normalize(features, dim=1)

    def finish(self, state: Tensor) -> Tensor:
        return 2 * state @ self.means.T - self.squares - 1
