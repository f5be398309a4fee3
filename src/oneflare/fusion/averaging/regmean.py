"""Fusion of linear maps by regression on the clients' inputs (RegMean)."""

from __future__ import annotations

import torch
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.fusion.averaging.average import full_state, single_model, size_average
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.upload.evidence import INPUTS, linear_maps, map_matrix, map_state
from oneflare.upload.symmetric import unpack_symmetric

TINY = 1e-20
"""keeps a layer whose inputs are always zero solvable: there the plain average is left"""


class Regression:
    """W (sum_i H_i) = sum_i W_i H_i, which minimises sum_i |(W - W_i) X_i|^2 for H_i = X_i X_i^T.

    H_i = w_i (scale A_i + (1 - scale) diag A_i + damping mean(diag A_i) I), with A_i the client's second moments of
    inputs and w_i its share of all images.
    """

    def __init__(self, scale: float, damping: float) -> None:
        self.scale = scale
        self.damping = damping
        self.left: Tensor | None = None
        self.right: Tensor | None = None

    def term(self, gram: Tensor, share: float) -> Tensor:
        """H_i"""
        diagonal = gram.diagonal()
        damped = torch.diag((1 - self.scale) * diagonal + self.damping * diagonal.mean() + TINY)
        return share * (self.scale * gram + damped)

    def add(self, matrix: Tensor, gram: Tensor, share: float) -> None:
        """matrix: W_i `(outputs, inputs)`; gram: A_i `(inputs, inputs)`"""
        left = self.term(gram, share)
        right = matrix @ left
        self.left = left if self.left is None else self.left + left
        self.right = right if self.right is None else self.right + right

    def result(self) -> Tensor:
        assert self.left is not None
        assert self.right is not None
        solved: Tensor = torch.linalg.solve(self.left, self.right, left=False)
        return solved


@FUSIONS.register("regmean")
class RegMean(Fusion):
    """every linear map by least squares on the second moments of its inputs, the rest averaged by size

    W = (sum_i W_i G_i)(sum_i G_i)^-1, G_i = n_i A_i the Gram matrix of what enters the layer at client i, its
    off-diagonal part shrunk by `scale` (Jin et al. 2023). Convolutions act on patches.
    """

    single_network = True
    needs = frozenset({"weights", "prototypes", "gram"})

    def __init__(self, *, scale: float = 0.9, damping: float = 1e-6) -> None:
        """scale: what is left of the off-diagonal part; damping: ridge, as a part of the mean diagonal"""
        if not 0 <= scale <= 1:
            raise ConfigError(f"fusion regmean.scale: must lie between 0 and 1 (got {scale})")
        if not damping >= 0:
            raise ConfigError(f"fusion regmean.damping: must be at least 0 (got {damping})")
        self.scale = scale
        self.damping = damping

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        regressions = {name: Regression(self.scale, self.damping) for name in linear_maps(uploads.template)}
        for share, upload in zip(uploads.size_weights.tolist(), uploads, strict=True):
            state, grams = full_state(upload), upload.evidence(INPUTS)
            for name, regression in regressions.items():
                regression.add(map_matrix(state, name), unpack_symmetric(grams[INPUTS + name]), share)
        fused = size_average(uploads)
        for name, regression in regressions.items():
            try:
                solved = regression.result()
            except torch.linalg.LinAlgError:
                for upload in uploads:
                    with upload.blamed():
                        gram = unpack_symmetric(upload.evidence(INPUTS + name)[INPUTS + name])
                        torch.linalg.cholesky(regression.term(gram, 1.0))
                raise
            fused |= map_state(solved, name, fused)
        return Fused(single_model(uploads, fused))
