"""The rule by which a member speaks about an image as far as its own feature space knows the image."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from oneflare.models.members import rule
from oneflare.nn.network import signed_root

FREEDOM = 10.0
"""degrees of freedom of the Student densities: photographs have heavier tails than a Gaussian"""
NEVER = -1e4
"""score of a class that nobody has"""


def room_like(one: Tensor, members: int) -> Tensor:
    """`(members, ...)` numbers yet to be written, for members of whom one is given as `(1, ...)`"""
    return torch.empty((members, *one.shape[1:]), dtype=one.dtype)


@dataclass(frozen=True)
class StudentDensities:
    """Student densities of several members, each with one scale matrix S_i and several centres m_ik.

    log t(u; m, s S) = -(v + d)/2 log(1 + |W(u - m)|^2/(v s)) + level, with W^T W = S^-1 and v = FREEDOM; constants that
    all densities of one d share are left out.
    """

    whitening: Tensor
    """`(N, d, d)` W"""
    centres: Tensor
    """`(N, K, d)` W m_ik"""
    spread: Tensor
    """`(N, K)` s"""
    level: Tensor
    """`(N, K)` -(log det S_i + d log s)/2"""

    @classmethod
    def of(cls, means: Tensor, covariances: Tensor, spread: Tensor) -> StudentDensities:
        """means `(N, K, d)`, covariances `(N, d, d)` positive definite, spread `(N, K)`; computed in the covariances'
        own precision"""
        factor = torch.linalg.cholesky(covariances)
        whitening = torch.linalg.solve_triangular(
            factor, torch.eye(factor.shape[1], dtype=factor.dtype).expand_as(factor), upper=False
        )
        determinant = 2 * factor.diagonal(dim1=1, dim2=2).double().log().sum(1, keepdim=True)
        level = -(determinant + factor.shape[1] * spread.double().log()) / 2
        centres = torch.einsum("nij,nkj->nki", whitening, means.to(factor.dtype))
        return cls(whitening.float(), centres.float(), spread.float(), level.float())

    def take(self, rows: Tensor) -> StudentDensities:
        """Those of some members. rows: `(N,)` whether each is among them"""
        return StudentDensities(self.whitening[rows], self.centres[rows], self.spread[rows], self.level[rows])

    def room(self, members: int) -> StudentDensities:
        """Room for so many members like this one, to be filled by `put`."""
        return StudentDensities(*(room_like(value, members) for value in vars(self).values()))

    def put(self, row: int, one: StudentDensities) -> None:
        """Writes a single member's into a row."""
        for name, value in vars(self).items():
            value[row] = getattr(one, name)[0]

    def log_densities(self, member: int, roots: Tensor) -> Tensor:
        """`(n, d)` -> `(n, K)`"""
        z, centres = roots @ self.whitening[member].T, self.centres[member]
        squares = z.square().sum(1, keepdim=True) - 2 * z @ centres.T + centres.square().sum(1)
        half = (FREEDOM + roots.shape[1]) / 2
        return self.level[member] - half * torch.log1p(squares.clamp(min=0) / (FREEDOM * self.spread[member]))


@rule
@dataclass(frozen=True)
class DensityRatio:
    """score_c = beta sum_i w_ic r_ic / sqrt(d), with r_ic = log t(u_i; m_ic, s_ic S_i) - log t(u_i; b_i, B_i)

    u_i = root(f_i(x)); r_ic says by how much likelier member i's feature is for an image of class c than for one of
    which the network knows nothing. No member's ratio counts for more than `bound` in either direction. Where a
    projection widens the features to d, f_i and d are those before it.
    """

    own_features: ClassVar[bool] = True

    weights: Tensor
    """`(N, C)` w, 0 where a member has no image of the class; each class that somebody has sums to 1"""
    classes_whitening: Tensor
    """`(N, d, d)` and so on: `StudentDensities` of the classes"""
    classes_centres: Tensor
    classes_spread: Tensor
    classes_level: Tensor
    background_whitening: Tensor
    """`(N, d, d)` and so on: `StudentDensities` of the background, with one centre"""
    background_centres: Tensor
    background_spread: Tensor
    background_level: Tensor
    bound: Tensor
    """`()`"""
    sharpness: Tensor
    """`()` beta, which decides how sure the answers are and never which class they name"""

    @classmethod
    def of(
        cls,
        weights: Tensor,
        classes: StudentDensities,
        background: StudentDensities,
        bound: float,
        sharpness: float = 1.0,
    ) -> Self:
        return cls(
            weights.float(),
            **{f"classes_{name}": value for name, value in vars(classes).items()},
            **{f"background_{name}": value for name, value in vars(background).items()},
            bound=torch.tensor(bound),
            sharpness=torch.tensor(sharpness),
        )

    @property
    def classes(self) -> StudentDensities:
        return StudentDensities(self.classes_whitening, self.classes_centres, self.classes_spread, self.classes_level)

    @property
    def background(self) -> StudentDensities:
        return StudentDensities(
            self.background_whitening, self.background_centres, self.background_spread, self.background_level
        )

    def ratios(self, member: int, features: Tensor) -> Tensor:
        """r of one member, `(n, d)` raw features -> `(n, C)`, bounded."""
        roots = signed_root(features)
        ratios = self.classes.log_densities(member, roots) - self.background.log_densities(member, roots)
        return torch.minimum(torch.maximum(ratios, -self.bound), self.bound)

    def start(self, images: int) -> Tensor:
        nobody = self.weights.sum(0) <= 0
        return torch.zeros(images, self.weights.shape[1]) + NEVER * nobody

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        state[rows] += self.weights[member] * self.ratios(member, features) / features.shape[1] ** 0.5

    def finish(self, state: Tensor) -> Tensor:
        return self.sharpness * state

    def familiarity(self, state: Tensor) -> Tensor:
        """max_c sum_i w_ic r_ic / sqrt(d), `(n,)`: how much likelier the best class is than an image of nothing."""
        return state.amax(1)

    @property
    def familiarity_bound(self) -> float:
        """No r_ic is larger than `bound`, and the weights of a class sum to 1."""
        return float(self.bound) / math.sqrt(self.classes_whitening.shape[1])


@rule
@dataclass(frozen=True)
class Corroboration(DensityRatio):
    """(log p_c + log softmax(t score)_c) / (1 + o t): two opinions, the analytic posterior p and the members' ratios.

    The sharpness t says how much the members count. The overlap o makes the answers less sure, because two opinions on
    one image are not independent; it never decides which class they name.
    """

    overlap: Tensor = field(default_factory=lambda: torch.tensor(0.0))
    """`()` o, 0 in files that do not have it"""

    def start(self, images: int) -> Tensor:
        """`(n, 2, C)`: the analytic log posterior, which the model fills in, and the members' scores"""
        scores = super().start(images)
        return torch.stack([torch.zeros_like(scores), scores], dim=1)

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        state[rows, 1] += self.weights[member] * self.ratios(member, features) / features.shape[1] ** 0.5

    def finish(self, state: Tensor) -> Tensor:
        together = state[:, 0] + (self.sharpness * state[:, 1]).log_softmax(1)
        return together / (1 + self.overlap * self.sharpness)

    def familiarity(self, state: Tensor) -> Tensor:
        return super().familiarity(state[:, 1])
