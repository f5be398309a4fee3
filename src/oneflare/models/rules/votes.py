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


@rule
@dataclass(frozen=True)
class OpenSetVotes:
    """log sum_i p_i(c) over the members with the smallest p_i(unknown), where p_i = softmax(z_i P_i^T, z_i u_i) has C+1
    classes; what a member gives to the classes together is 1 - p_i(unknown)"""

    prototypes: Tensor
    """`(N, C, d)`"""
    unknown: Tensor
    """`(N, d)` u"""
    experts: Tensor
    """`()` how many members vote on an image"""

    def start(self, images: int) -> Tensor:
        """`(n, N, C+1)`: a member that has not answered takes the image for unknown"""
        members, classes, _ = self.prototypes.shape
        silent = torch.zeros(images, members, classes + 1)
        silent[..., -1] = 1
        return silent

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        heads = torch.cat([self.prototypes[member], self.unknown[member, None]])
        state[rows, member] = (F.normalize(features, dim=1) @ heads.T).softmax(1)

    def finish(self, state: Tensor) -> Tensor:
        surest = state[..., -1].topk(int(self.experts), dim=1, largest=False).indices
        votes = state[..., :-1].gather(1, surest[..., None].expand(-1, -1, state.shape[2] - 1))
        return votes.sum(1).clamp(min=1e-30).log()
