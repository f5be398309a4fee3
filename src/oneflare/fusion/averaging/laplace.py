"""Fusion of Laplace posteriors with Kronecker-factored precision (FedLPA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.fusion.averaging.average import full_state, single_model, size_average
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.upload import Upload
from oneflare.upload.evidence import GRADIENTS, INPUTS, linear_maps, map_matrix, map_state
from oneflare.upload.symmetric import unpack_symmetric

TINY = 1e-20
"""keeps factors that are zero solvable"""


@dataclass(frozen=True)
class Precision:
    """w A (x) G: how sure one client is of W `(outputs, inputs)`, in every direction."""

    share: float
    inputs: Tensor
    """A"""
    gradients: Tensor
    """G"""

    @classmethod
    def damped(cls, share: float, inputs: Tensor, gradients: Tensor, damping: float) -> Precision:
        """Each factor plus `damping` times its mean diagonal."""
        return cls(share, _damp(inputs, damping), _damp(gradients, damping))

    def check(self) -> None:
        """Raise `LinAlgError` unless both factors are positive definite."""
        for factor in (self.inputs, self.gradients):
            torch.linalg.cholesky(factor)

    def times(self, matrix: Tensor) -> Tensor:
        """(w A (x) G) vec W = vec(w G W A)"""
        return self.share * (self.gradients @ matrix @ self.inputs)


def _damp(factor: Tensor, damping: float) -> Tensor:
    ridge = damping * factor.diagonal().mean() + TINY
    return factor + ridge * torch.eye(len(factor), dtype=factor.dtype)


def solve_posterior(
    precisions: Sequence[Precision], right: Tensor, start: Tensor, *, tolerance: float = 1e-8, steps: int = 500
) -> Tensor:
    """W with sum_i w_i G_i W A_i = right, by conjugate gradients.

    A sum of Kronecker products has no inverse in closed form, unless all A_i or all G_i are the same: then it is
    A (x) G of the means, which is the preconditioner, and the first step is the closed form.

    start: where to begin; a W that solves it is returned as it is.
    """
    total = sum(one.share for one in precisions)
    inputs, gradients = (
        torch.linalg.cholesky(sum((one.share * getattr(one, factor) for one in precisions), torch.zeros(())) / total)
        for factor in ("inputs", "gradients")
    )

    def times(matrix: Tensor) -> Tensor:
        return sum((one.times(matrix) for one in precisions), torch.zeros_like(matrix))

    def precondition(matrix: Tensor) -> Tensor:
        """G^-1 M A^-1 of the means"""
        half = torch.cholesky_solve(matrix, gradients)
        return torch.cholesky_solve(half.T, inputs).T / total

    solution = start.clone()
    residual = right - times(solution)
    goal = tolerance * float(right.norm())
    direction = step = precondition(residual)
    inner = float((residual * step).sum())
    for _ in range(steps):
        if not float(residual.norm()) > goal or not inner > 0:
            break
        image = times(direction)
        length = inner / float((direction * image).sum())
        solution = solution + length * direction
        residual = residual - length * image
        step = precondition(residual)
        inner, before = float((residual * step).sum()), inner
        direction = step + inner / before * direction
    return solution


@FUSIONS.register("laplace")
class Laplace(Fusion):
    """FedLPA: the product of the clients' Laplace posteriors, layer by layer; the rest averaged by size

    Client i's posterior of a layer is N(W_i, (n_i A_i (x) G_i)^-1) with the Kronecker factors of its Fisher
    information, each damped. Their product has its mode where

        sum_i n_i G_i W A_i = sum_i n_i G_i W_i A_i

    (Liu et al. 2024). Solving a layer needs all clients' factors of that layer at once, never two whole networks.
    """

    single_network = True
    needs = frozenset({"weights", "prototypes", "kronecker"})

    def __init__(self, *, damping: float = 1e-3) -> None:
        """damping: of each factor, as a part of its mean diagonal"""
        if not damping > 0:
            raise ConfigError(f"fusion laplace.damping: must be greater than 0 (got {damping})")
        self.damping = damping

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        shares = uploads.size_weights.tolist()
        right: dict[str, Tensor] = {}
        for share, upload in zip(shares, uploads, strict=True):
            state = full_state(upload)
            for name in linear_maps(uploads.template):
                pulled = self.precision(upload, name, share).times(map_matrix(state, name))
                right[name] = pulled if name not in right else right[name] + pulled
        fused = size_average(uploads)
        for name, wanted in right.items():
            precisions = [self.precision(upload, name, share) for share, upload in zip(shares, uploads, strict=True)]
            try:
                solved = solve_posterior(precisions, wanted, map_matrix(fused, name))
            except torch.linalg.LinAlgError:
                for upload, precision in zip(uploads, precisions, strict=True):
                    with upload.blamed():
                        precision.check()
                raise
            fused |= map_state(solved, name, fused)
        return Fused(single_model(uploads, fused))

    def precision(self, upload: Upload, name: str, share: float) -> Precision:
        inputs, gradients = (
            unpack_symmetric(upload.evidence(kind + name)[kind + name]) for kind in (INPUTS, GRADIENTS)
        )
        return Precision.damped(share, inputs, gradients, self.damping)
