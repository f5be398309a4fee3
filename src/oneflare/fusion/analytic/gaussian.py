"""Classifiers from the covariances of every class: quadratic discriminants, and a head trained on Gaussian samples.

Features are centred and divided by their deviations; S_w is their covariance within classes, S_c that of class c, m_c
its mean, r a ridge, and p_c = n_c / n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.fusion.analytic.calibration import inverse_temperature
from oneflare.fusion.analytic.published import FamilyFusion, check_range, linear_model, oas_shrinkage
from oneflare.fusion.analytic.solver import CAUTION, Spectrum
from oneflare.fusion.base import FUSIONS, UploadSet
from oneflare.models.analytic import AnalyticModel
from oneflare.models.quadratic import QuadraticModel
from oneflare.nn import check_size
from oneflare.nn.optimisers import minimise
from oneflare.upload.class_statistics import ClassStatistics

IMPOSSIBLE = -1e8
"""logit of a class without a single image"""
NEGLIGIBLE = 1e-9
"""of the largest: between-class variance of a direction in which classes do not differ"""


@dataclass(frozen=True)
class Space:
    """A linear map of features, z = (phi - mean) P, in which S_w + r is the identity."""

    basis: Tensor
    """`(D, k)` float64: the directions, in standardised features"""
    inverse: Tensor
    """`(D,)` 1/deviation of each feature, 0 for one that does not vary"""
    mean: Tensor
    """`(D,)` of all images"""
    ridge: float
    """r"""

    @property
    def projection(self) -> Tensor:
        """P `(D, k)`, in the features' own units"""
        return self.inverse[:, None] * self.basis

    def means(self, statistics: ClassStatistics) -> Tensor:
        """Class means in z, `(C, k)`."""
        own = statistics.sums / statistics.counts.clamp(min=1)[:, None]
        means: Tensor = (own - self.mean) @ self.projection
        return means

    def covariance(self, statistics: ClassStatistics, label: int) -> Tensor:
        """P^T (S_c + r) P `(k, k)`; weighted by p_c these add up to the identity."""
        projection = self.projection
        own = projection.T @ statistics.scatter(label) @ projection
        return own / float(statistics.counts[label]) + self.ridge * self.basis.T @ self.basis


def whitened_space(spectrum: Spectrum, ridge: float) -> Space:
    """All directions: the basis is L^-T with L L^T = S_w + r."""
    within = _within(spectrum) + ridge * torch.eye(len(spectrum.values), dtype=torch.float64)
    factor = torch.linalg.cholesky(within)
    eye = torch.eye(len(within), dtype=torch.float64)
    root = torch.linalg.solve_triangular(factor, eye, upper=False).T
    return Space(root, spectrum.inverse, spectrum.mean, ridge)


def _within(spectrum: Spectrum) -> Tensor:
    """S_w = K - M diag(p) M^T of standardised features `(D, D)`"""
    covariance = (spectrum.vectors * spectrum.values) @ spectrum.vectors.T
    means = spectrum.vectors @ spectrum.means
    within: Tensor = covariance - (means * spectrum.prior) @ means.T
    return (within + within.T) / 2


def fisher_space(spectrum: Spectrum, ridge: float) -> Space:
    """Fisher's directions, at most C - 1: those in which classes differ, each with unit variance within classes.

    They span (S_w + r)^-1 M, which by Woodbury is the span of A = (K + r)^-1 M. With H = A^T (S_w + r) A = U e U^T the
    directions are A U e^-1/2, for the eigenvalues e that are not negligible.
    """
    solved = spectrum.means / (spectrum.values + ridge)[:, None]  # A in the eigenbasis of K
    overlap = spectrum.means.T @ solved
    gram = overlap - (overlap * spectrum.prior) @ overlap  # A^T (K + r) A - A^T M diag(p) M^T A
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    kept = values > NEGLIGIBLE * values[-1].clamp(min=1e-300)
    basis = spectrum.vectors @ (solved @ (vectors[:, kept] / values[kept].sqrt()))
    return Space(basis, spectrum.inverse, spectrum.mean, ridge)


def shrunk(covariance: Tensor, images: float, shrinkage: float | None) -> Tensor:
    """(1 - a) S + a I; a by `oas_shrinkage` unless it is given"""
    if shrinkage is None:
        trace, square = float(covariance.trace()), float(covariance.square().sum())
        shrinkage = oas_shrinkage(trace, square, len(covariance), images)
    return (1 - shrinkage) * covariance + shrinkage * torch.eye(len(covariance), dtype=covariance.dtype)


@FUSIONS.register("gh_qda")
class GhQda(FamilyFusion):
    """GH-OFL's quadratic discriminant analysis: a Gaussian for each class, its covariance shrunk to the pooled one

    log p_c - log det(S_c)/2 - (x - m_c)^T S_c^-1 (x - m_c)/2, with S_c = (1 - a_c) S_c + a_c S_w. Turazza, Picone and
    Mamei, "The Gaussian-Head OFL Family" (ICLR 2026). Inferred: a_c is the oracle approximating shrinkage of the class
    in coordinates in which S_w is the identity, unless `shrinkage` gives it, and the ridge on S_w is that of fusion
    `analytic`. space=fisher: the same in the directions in which class means differ, at most C - 1, for many classes.
    The probabilities are those of the Gaussians, which in many dimensions are too sure of themselves.
    """

    needs = frozenset({"statistics", "class_covariances"})

    def __init__(self, *, shrinkage: float | None = None, space: Literal["full", "fisher"] = "full") -> None:
        check_range("gh_qda", {"shrinkage": shrinkage}, 0, 1, open_low=False)
        self.shrinkage, self.space = shrinkage, space

    def solved(self, uploads: UploadSet) -> QuadraticModel:
        statistics = uploads.class_statistics()
        if self.space == "full":
            numbers = int((statistics.counts > 0).sum()) * uploads.plan.dim**2
            check_size("fusion gh_qda", numbers, "set its option space=fisher, or choose a map with fewer features")
        spectrum = Spectrum(statistics.pooled())
        ridge = spectrum.choose_ridge()
        space = (whitened_space if self.space == "full" else fisher_space)(spectrum, ridge)
        means, width = space.means(statistics), space.projection.shape[1]
        factors = torch.zeros(len(means), width, width)
        bias = torch.full((len(means),), IMPOSSIBLE)
        for label in (statistics.counts > 0).nonzero().flatten().tolist():
            images = float(statistics.counts[label])
            covariance = shrunk(space.covariance(statistics, label), images, self.shrinkage)
            factor, determinant = precision_factor(covariance)
            factors[label] = factor.float()
            bias[label] = math.log(images / spectrum.n) + determinant
        tensors = {
            "projection": space.projection.float(),
            "means": (means + space.mean @ space.projection).float(),
            "factors": factors,
            "bias": bias,
        }
        return QuadraticModel(uploads.task, uploads.plan.feature_map, uploads.plan.bound, tensors)


def precision_factor(covariance: Tensor) -> tuple[Tensor, float]:
    """R with R R^T = S^-1, and log det(R) = -log det(S)/2; a S that is singular to rounding gets a little ridge."""
    eye = torch.eye(len(covariance), dtype=covariance.dtype)
    little = 1e-10 * float(covariance.diagonal().mean().clamp(min=1e-300))
    while True:
        factor, info = torch.linalg.cholesky_ex(covariance + little * eye)
        if int(info) == 0:
            break
        little *= 10
    root = torch.linalg.solve_triangular(factor, eye, upper=False).T
    return root, -float(factor.diagonal().log().sum())


@FUSIONS.register("fisher_mix")
class FisherMix(FamilyFusion):
    """GH-OFL's FisherMix: a linear head with a cosine margin, trained on Gaussian samples in the Fisher subspace

    Samples z ~ N(m_c, (1 - a_c) S_c + a_c I) in Fisher's at most C - 1 directions, equally many of each class, train
    rows w_c by cross-entropy of s (cos(z, w_c) - margin [c is the label]); an image is then of the class with the
    largest cosine. Turazza, Picone and Mamei, "The Gaussian-Head OFL Family" (ICLR 2026). Inferred: the number of
    samples, s, the margin and a_c (oracle approximating shrinkage); the subspace and the margin are as published.
    """

    needs = frozenset({"statistics", "class_covariances"})

    def __init__(
        self, *, samples: int = 400, scale: float = 16.0, margin: float = 0.1, steps: int = 200, seed: int = 0
    ) -> None:
        """samples: of each class. steps: of L-BFGS at most"""
        check_range("fisher_mix", {"samples": samples, "scale": scale, "steps": steps}, 0, math.inf, open_low=True)
        check_range("fisher_mix", {"margin": margin}, 0, 1, open_low=False)
        self.samples, self.scale, self.margin, self.steps, self.seed = samples, scale, margin, steps, seed

    def solved(self, uploads: UploadSet) -> AnalyticModel:
        statistics = uploads.class_statistics()
        spectrum = Spectrum(statistics.pooled())
        space = fisher_space(spectrum, spectrum.choose_ridge())
        z, labels = self.drawn(statistics, space)
        head = self.trained(z, labels, space.means(statistics)[statistics.counts > 0])
        beta = CAUTION * inverse_temperature(z @ head.T, labels)
        weight = beta * space.projection @ head.T
        return linear_model(uploads, weight, -space.mean @ weight, statistics.counts)

    def drawn(self, statistics: ClassStatistics, space: Space) -> tuple[Tensor, Tensor]:
        """Samples `(n, k)` float64 in z and the positions of their classes among those with images."""
        means = space.means(statistics)
        generator = torch_generator(self.seed, "fisher_mix")
        rows = []
        held = (statistics.counts > 0).nonzero().flatten().tolist()
        for label in held:
            covariance = shrunk(space.covariance(statistics, label), float(statistics.counts[label]), None)
            values, vectors = torch.linalg.eigh(covariance)
            root = vectors * values.clamp(min=0).sqrt() @ vectors.T
            noise = torch.randn(self.samples, len(root), dtype=torch.float64, generator=generator)
            rows.append(means[label] + noise @ root)
        return torch.cat(rows), torch.arange(len(held)).repeat_interleave(self.samples)

    def trained(self, z: Tensor, labels: Tensor, means: Tensor) -> Tensor:
        """Rows `(k, d)` of length 1 that minimise the cosine-margin loss, from the class means."""
        head = F.normalize(means, dim=1).clone().requires_grad_()
        unit = F.normalize(z, dim=1)
        offset = self.margin * F.one_hot(labels, len(means))

        def loss() -> Tensor:
            return F.cross_entropy(self.scale * (unit @ F.normalize(head, dim=1).T - offset), labels)

        minimise(loss, [head], self.steps)
        return F.normalize(head.detach(), dim=1)
