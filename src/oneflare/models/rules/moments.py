"""Rules by moments of features that members measured on their own images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.models.members import rule

SMALLEST = 1e-6
"""least deviation that a feature is divided by"""


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
        centred = self.given(features) - self.means[member]
        state[rows] += self.weights[member] * centred / self.deviations[member]

    @staticmethod
    def given(features: Tensor) -> Tensor:
        """The features whose moments the rule has."""
        return F.normalize(features, dim=1)

    def finish(self, state: Tensor) -> Tensor:
        return F.normalize(state, dim=1) @ self.anchors.T


@rule
@dataclass(frozen=True)
class RawStandardisedSum(StandardisedSum):
    """z = unit(sum_i w_i (f_i - m_i)/s_i), logits z A^T, with raw features f_i and client i's own mean m_i and
    deviation s_i of them"""

    @staticmethod
    def given(features: Tensor) -> Tensor:
        return features


@rule
@dataclass(frozen=True)
class BatchStandardisedSum:
    """z = unit(sum_i w_i (f_i - m_i)/s_i), logits z A^T, with raw features f_i, and with m_i and s_i their mean and
    deviation over all images that are asked about together; a single image says nothing then"""

    remark: ClassVar[str] = (
        "the model standardises features over the images of one call, so an answer depends on which others are asked "
        "about together with it"
    )
    weights: Tensor
    anchors: Tensor
    """`(C, d)`"""

    def start(self, images: int) -> Tensor:
        return torch.zeros(images, len(self.weights), self.anchors.shape[1])

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        state[rows, member] = features

    def finish(self, state: Tensor) -> Tensor:
        """state `(n, N, d)`"""
        centred = state - state.mean(0)
        deviation = centred.square().mean(0).sqrt().clamp(min=SMALLEST)
        return F.normalize(((centred / deviation) * self.weights[:, None]).sum(1), dim=1) @ self.anchors.T


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
