"""Closed-form heads from summed statistics as others published them: least squares, Gaussian rules, nearest means.

G, b and n are the sums over all clients (`oneflare.upload.statistics`), m_c = b_c / n_c, and p_c = n_c / n.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.fusion.analytic.published import (
    FamilyFusion,
    calibrated,
    check_range,
    linear_model,
    oas_shrinkage,
    present_classes,
    solve_symmetric,
    within_scatter,
)
from oneflare.fusion.base import FUSIONS, UploadSet
from oneflare.models.analytic import AnalyticModel
from oneflare.upload.statistics import Statistics


def least_squares(statistics: Statistics, ridge: float) -> Tensor:
    """W = (G + ridge I)^-1 b^T `(D, k)`, of least norm where that is singular; k classes have images."""
    return solve_symmetric(statistics.gram, statistics.sums[statistics.counts > 0].T, ridge)


@FUSIONS.register("afl")
class Afl(FamilyFusion):
    """AFL: least squares on one-hot labels, W = (G + ridge I)^-1 b, without an intercept

    Zhuang et al., "Analytic Federated Learning" (CVPR 2025). Its clients send their own solutions and regularised
    Gram matrices, and its server removes the regularisation again (the "RI process"), so that what comes out is
    ordinary least squares on all images: ridge=0 here, from the sums G and b that give the same W. Needs more images
    than features; `ridge` is in units of G.
    """

    def __init__(self, *, ridge: float = 0.0) -> None:
        check_range("afl", {"ridge": ridge}, 0, math.inf, open_low=False)
        self.ridge = ridge

    def solved(self, uploads: UploadSet) -> AnalyticModel:
        statistics = uploads.statistics()
        weight = least_squares(statistics, self.ridge)
        zero = torch.zeros(weight.shape[1], dtype=weight.dtype)
        return linear_model(uploads, *calibrated(weight, zero, statistics), statistics.counts)


def ridge_with_intercept(statistics: Statistics, ridge: float) -> tuple[Tensor, Tensor]:
    """(A^T A + ridge I)^-1 A^T Y for A = [phi, 1]: W `(D, k)` and intercept `(k,)`"""
    present = statistics.counts > 0
    total = statistics.sums.sum(0)
    gram = torch.cat([statistics.gram, total[None]])
    gram = torch.cat([gram, torch.cat([total, torch.tensor([statistics.samples], dtype=total.dtype)])[:, None]], 1)
    right = torch.cat([statistics.sums[present].T, statistics.counts[present][None]])
    solution = solve_symmetric(gram, right, ridge)
    return solution[:-1], solution[-1]


@FUSIONS.register("fed3r")
class Fed3r(FamilyFusion):
    """Fed3R: ridge regression on one-hot labels with an intercept, each class's weights brought to length 1

    [W; w_0] = ([G, s; s^T, n] + ridge I)^-1 [b; n_c] with s the sum of all features; then W_c and w_0c are divided by
    |W_c|. Fani et al., "Accelerating Heterogeneous Federated Learning with Closed-form Classifiers" (ICML 2024), with
    its ridge of 0.01. On random Fourier features (method fed3r) it is the paper's Fed3R-RF.
    """

    def __init__(self, *, ridge: float = 0.01, unit: bool = True) -> None:
        """unit: whether the weights of a class are brought to length 1"""
        check_range("fed3r", {"ridge": ridge}, 0, math.inf, open_low=True)
        self.ridge, self.unit = ridge, unit

    def solved(self, uploads: UploadSet) -> AnalyticModel:
        statistics = uploads.statistics()
        present_classes(statistics.counts)
        weight, bias = ridge_with_intercept(statistics, self.ridge)
        if self.unit:
            length = weight.norm(dim=0).clamp(min=1e-12)
            weight, bias = weight / length, bias / length
        return linear_model(uploads, *calibrated(weight, bias, statistics), statistics.counts)


def gaussian_rule(covariance: Tensor, statistics: Statistics, ridge: float = 0.0) -> tuple[Tensor, Tensor]:
    """W_c = S^-1 m_c `(D, k)` and log p_c - m_c.W_c/2 `(k,)`: the posterior of Gaussians with one covariance S"""
    present = present_classes(statistics.counts)
    counts = statistics.counts[present]
    means = (statistics.sums[present] / counts[:, None]).T
    weight = solve_symmetric(covariance, means, ridge)
    return weight, (counts / counts.sum()).log() - 0.5 * (means * weight).sum(0)


@FUSIONS.register("fedcgs")
class FedCgs(FamilyFusion):
    """FedCGS: the posterior of Gaussians that share the covariance of all images together

    W_c = S^-1 m_c and bias_c = log p_c - m_c.W_c/2 with S = (G - n m m^T)/(n - 1), m the mean of all images. Guan,
    Zhou and Gu, "Capture Global Feature Statistics for One-Shot Federated Learning" (AAAI 2025), who call it Gaussian
    naive Bayes with a shared covariance. S holds the differences between classes too, so the scores are smaller than
    those of linear discriminant analysis and weigh the prior more. `ridge` is added to S; the authors use 0.
    """

    def __init__(self, *, ridge: float = 0.0) -> None:
        check_range("fedcgs", {"ridge": ridge}, 0, math.inf, open_low=False)
        self.ridge = ridge

    def solved(self, uploads: UploadSet) -> AnalyticModel:
        statistics = uploads.statistics()
        weight, bias = gaussian_rule(total_covariance(statistics), statistics, self.ridge)
        return linear_model(uploads, *calibrated(weight, bias, statistics), statistics.counts)


def total_covariance(statistics: Statistics) -> Tensor:
    """(G - n m m^T)/(n - 1) `(D, D)`"""
    total = statistics.sums.sum(0)
    scatter = statistics.gram - torch.outer(total, total / max(statistics.samples, 1.0))
    return scatter / max(statistics.samples - 1, 1.0)


def pooled_covariance(statistics: Statistics, shrinkage: float | None) -> tuple[Tensor, float]:
    """(1 - a) S + a tr(S)/D I with S the covariance within classes, and a, by `oas_shrinkage` unless it is given."""
    classes = int(present_classes(statistics.counts).sum())
    covariance = within_scatter(statistics) / max(statistics.samples - classes, 1.0)
    dim, trace = len(covariance), float(covariance.trace())
    if shrinkage is None:
        shrinkage = oas_shrinkage(trace, float(covariance.square().sum()), dim, statistics.samples - classes)
    eye = torch.eye(dim, dtype=covariance.dtype)
    return (1 - shrinkage) * covariance + shrinkage * trace / dim * eye, shrinkage


@FUSIONS.register("gh_lda")
class GhLda(FamilyFusion):
    """GH-OFL's linear discriminant analysis: Gaussians that share the covariance within classes, shrunk

    W_c = S^-1 m_c and bias_c = log p_c - m_c.W_c/2 with S = (1 - a) sum_c S_c/(n - C) + a s I, s the mean variance.
    Turazza, Picone and Mamei, "The Gaussian-Head OFL Family" (ICLR 2026). Inferred: a is the oracle approximating
    shrinkage (Chen et al. 2010) unless `shrinkage` gives it; the abstract and its reviews do not say how it is chosen.
    """

    def __init__(self, *, shrinkage: float | None = None) -> None:
        check_range("gh_lda", {"shrinkage": shrinkage}, 0, 1, open_low=False)
        self.shrinkage = shrinkage

    def solved(self, uploads: UploadSet) -> AnalyticModel:
        statistics = uploads.statistics()
        weight, bias = gaussian_rule(pooled_covariance(statistics, self.shrinkage)[0], statistics)
        return linear_model(uploads, *calibrated(weight, bias, statistics), statistics.counts)


@FUSIONS.register("fedncm")
class FedNcm(FamilyFusion):
    """FedNCM: the class whose mean is nearest; uploads hold class sums and counts and nothing else

    distance=cosine: the largest phi.m_c/|m_c|, a linear classifier of class means brought to length 1, as in Legate et
    al., "Guiding The Last Layer in Federated Learning with Pre-Trained Models" (NeurIPS 2023). distance=euclidean: the
    least |phi - m_c|. Without covariances nothing is known of the spread of scores, so the probabilities are not
    calibrated.
    """

    needs = frozenset({"class_means"})

    def __init__(self, *, distance: Literal["cosine", "euclidean"] = "cosine") -> None:
        self.distance = distance

    def solved(self, uploads: UploadSet) -> AnalyticModel:
        held = uploads.class_means()
        means = held.means[present_classes(held.counts)]
        if self.distance == "cosine":
            weight, bias = F.normalize(means, dim=1).T, torch.zeros(len(means), dtype=means.dtype)
        else:
            weight, bias = means.T, -0.5 * means.square().sum(1)
        return linear_model(uploads, weight, bias, held.counts)
