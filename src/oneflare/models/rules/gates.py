"""Rules in which one score says how well a member knows an image, and the member's own softmax says which class it is.

The scores are published ones for telling known from unknown images, here as gates over members:
log sum_i g_i(x) p_i(c | x) with g_i = exp(knowledge_i(x)) and p_i the softmax of member i over the classes that it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.models.members import BESIDE, rule
from oneflare.models.rules.density import StudentDensities
from oneflare.nn.network import signed_root

LIMIT = 80.0
"""no member's knowledge counts for more than exp(LIMIT) in either direction, so that sums stay within float32"""


@rule
@dataclass(frozen=True)
class EnergyGate:
    """knowledge = log sum_c exp(z P_c^T): the free energy of the logits (Liu et al. 2020), times `sharpness`"""

    own_features: ClassVar[str] = BESIDE

    prototypes: Tensor
    """`(N, C, d)`"""
    held: Tensor
    """`(N, C)` 1 where a member has images of the class, else 0"""
    sharpness: Tensor
    """`()` factor of the knowledge"""

    def start(self, images: int) -> Tensor:
        return torch.zeros(images, self.held.shape[1])

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        dim = self.prototypes.shape[2]
        own = features[:, dim:] if features.shape[1] > dim else features
        logits = F.normalize(features[:, :dim], dim=1) @ self.prototypes[member].T
        logits = torch.where(self.held[member] > 0, logits, -torch.inf)
        weight = (self.sharpness * self.knowledge(member, own, logits)).clamp(-LIMIT, LIMIT).exp()
        state[rows] += weight[:, None] * logits.softmax(1)

    def finish(self, state: Tensor) -> Tensor:
        return state.clamp(min=1e-37).log()

    def knowledge(self, member: int, features: Tensor, logits: Tensor) -> Tensor:
        """How well a member knows images `(n,)`, from its logits `(n, C)` and its raw features `(n, d)`, which are
        those before a projection that widens them"""
        return logits.logsumexp(1)


@rule
@dataclass(frozen=True)
class LengthGate(EnergyGate):
    """knowledge = log |f|: networks answer images that they know with longer features"""

    def knowledge(self, member: int, features: Tensor, logits: Tensor) -> Tensor:
        knowledge: Tensor = features.norm(dim=1).clamp(min=1e-12).log()
        return knowledge


@rule
@dataclass(frozen=True)
class RatioGate(EnergyGate):
    """knowledge = max_c log t(u; m_c, S) - log t(u; b, B), divided by sqrt(d)

    With b, B of destroyed images it is the density ratio; with those of the member's own images, whatever their class,
    it is the relative Mahalanobis distance (Ren et al. 2021) with Student instead of Gaussian densities.
    """

    classes_whitening: Tensor
    """`(N, d, d)` and so on: `StudentDensities` of the classes"""
    classes_centres: Tensor
    classes_spread: Tensor
    classes_level: Tensor
    against_whitening: Tensor
    """`(N, d, d)` and so on: `StudentDensities` of what the classes are compared with, one centre"""
    against_centres: Tensor
    against_spread: Tensor
    against_level: Tensor

    def knowledge(self, member: int, features: Tensor, logits: Tensor) -> Tensor:
        roots = signed_root(features)
        classes = StudentDensities(
            self.classes_whitening, self.classes_centres, self.classes_spread, self.classes_level
        )
        against = StudentDensities(
            self.against_whitening, self.against_centres, self.against_spread, self.against_level
        )
        own = torch.where(self.held[member] > 0, classes.log_densities(member, roots), -torch.inf).amax(1)
        knowledge: Tensor = (own - against.log_densities(member, roots)[:, 0]) / features.shape[1] ** 0.5
        return knowledge


@rule
@dataclass(frozen=True)
class VirtualLogitGate(EnergyGate):
    """knowledge = log sum_c exp(logit_c) - alpha |R (u - m)|: the virtual logit of ViM (Wang et al. 2022)

    R projects on the directions in which the member's own features vary least; alpha brings the residual to the size of
    a logit.
    """

    residual: Tensor
    """`(N, d, d)` alpha R"""
    middle: Tensor
    """`(N, d)` m, the mean of the member's features"""

    def knowledge(self, member: int, features: Tensor, logits: Tensor) -> Tensor:
        beside = (signed_root(features) - self.middle[member]) @ self.residual[member].T
        knowledge: Tensor = logits.logsumexp(1) - beside.norm(dim=1)
        return knowledge
