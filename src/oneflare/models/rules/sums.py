"""Rules that sum the members' raw features and look for the nearest global prototype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.models.members import rule

EVEN = 3.0
"""a member's features may be so many times as long as the median member's; honest ones of the digits stay below 1.8"""


STRETCH = 6.0
"""a feature may be so many times as long as those of pictures that show nothing; honest ones stay below 4"""


class UnitSum:
    """z = unit(a sum of features), logits z P^T; rules that differ in what they add extend it."""

    prototypes: Tensor
    """`(C, d)`"""

    def start(self, images: int) -> Tensor:
        return torch.zeros(images, self.prototypes.shape[1])

    def finish(self, state: Tensor) -> Tensor:
        return F.normalize(state, dim=1) @ self.prototypes.T


@rule
@dataclass(frozen=True)
class FeatureSum(UnitSum):
    """z = unit(sum_i w_i f_i(x)) with raw features f_i, logits z P^T"""

    weights: Tensor
    prototypes: Tensor

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        state[rows] += self.weights[member] * features


@rule
@dataclass(frozen=True)
class BoundedFeatureSum(FeatureSum):
    """`FeatureSum` with every feature of member i shortened to at most `longest[i]`.

    Whoever multiplies the output of its encoder by a thousand would otherwise answer every image alone.
    """

    longest: Tensor
    """`(N,)`"""

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        super().add(state, rows, member, shortened(features, self.longest[member]))

    @classmethod
    def of(cls, weights: Tensor, prototypes: Tensor, probes: Tensor) -> BoundedFeatureSum:
        """Bounds from the raw features that members give to the same pictures that show nothing, `(N, probes, d)`.

        A member's own length l_i is its median over the probes, and l the median over members, which no minority
        moves. A member whose l_i exceeds `EVEN` l is scaled down to it, and of what remains no feature is longer than
        `STRETCH` l.
        """
        own = probes.norm(dim=2).median(1).values
        usual = own.median()
        factor = (EVEN * usual / own.clamp(min=1e-12)).clamp(max=1)
        return cls(weights * factor, prototypes, STRETCH * usual / factor)


def shortened(features: Tensor, longest: Tensor) -> Tensor:
    """Rows `(n, d)` of at most this length, direction unchanged."""
    result: Tensor = features * (longest / features.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
    return result


@rule
@dataclass(frozen=True)
class InformativeSum(UnitSum):
    """z = unit(sum_i (1 - cos(f_i(x), n_i)) f_i(x)) with raw features f_i, logits z P^T; n_i is what client i sees in
    noise"""

    noise: Tensor
    """`(N, d)`"""
    prototypes: Tensor

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        state[rows] += informative_weights(features, self.noise[member])[:, None] * features


def informative_weights(features: Tensor, noise: Tensor) -> Tensor:
    """1 - cos(f_i(x), f_i(noise)) per sample: `(batch, d)`, `(d,)` -> `(batch,)`"""
    return 1 - F.cosine_similarity(features, noise[None], dim=1)
