"""The closed-form head of `analytic`: solved from summed statistics, ridge and temperature chosen without data.

Features are centred and divided by their deviations, both from the summed statistics, so that their covariance is the
correlation matrix K; classes have prior p, means M `(D, C)`, and y is the centred one-hot label.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.errors import UploadError
from oneflare.upload.statistics import Statistics

RIDGES: tuple[float, ...] = tuple(10.0 ** (e / 4) for e in range(-16, 9))
TEMPERATURES = (2.0**-6, 2.0**7)
"""between which calibration looks for the inverse temperature"""
SIMULATED = 4096
"""pseudo images per calibration"""
FREEDOM = 8
"""degrees of freedom of their distribution (Student's t): photographs have heavier tails than a Gaussian"""
CAUTION = 0.65
"""what is left of the inverse temperature because classes also differ in shape; measured, see docs/analytic.md"""
NEVER = -1e4
"""logit of a class without a single image"""


@dataclass(frozen=True)
class LinearClassifier:
    """logits = phi W + bias"""

    weight: Tensor
    """`(D, C)` float32"""
    bias: Tensor
    """`(C,)` float32"""
    ridge: float


class Spectrum:
    """K = V diag(e) V^T: one costly step, after which every ridge is cheap."""

    def __init__(self, statistics: Statistics) -> None:
        self.n = statistics.samples
        self.present = statistics.counts > 0
        if not bool(self.present.any()):
            raise UploadError("the statistics hold no images; collect more uploads or use a larger epsilon")
        self.mean = statistics.sums.sum(0) / self.n
        self.prior = statistics.counts[self.present] / self.n
        covariance = statistics.gram / self.n - torch.outer(self.mean, self.mean)
        deviation = covariance.diagonal().clamp(min=0).sqrt()
        alive = deviation > 1e-6 * deviation.max()
        self.inverse = torch.where(alive, 1 / deviation.clamp(min=1e-30), torch.zeros(()))
        covariance *= self.inverse[:, None] * self.inverse
        values, self.vectors = torch.linalg.eigh(covariance)
        self.noise = max(0.0, -float(values[0]))
        """rounding and privacy noise make K indefinite; they bound the ridge from below"""
        self.values = values.clamp(min=0)
        class_sums = statistics.sums[self.present].T / self.n - torch.outer(self.mean, self.prior)
        self.rotated = self.vectors.T @ (class_sums * self.inverse[:, None])
        """`(D, C)` covariance of features and labels in the eigenbasis: M diag(p)"""
        self.means = self.rotated / self.prior

    @cached_property
    def labels(self) -> Tensor:
        """cov(y, y) `(C, C)`"""
        return torch.diag(self.prior) - torch.outer(self.prior, self.prior)

    def leverage(self, ridge: float) -> float:
        """h = (df + 1)/n, df = sum_i e_i/(e_i + r): the mean influence of an image on its own prediction"""
        return (float((self.values / (self.values + ridge)).sum()) + 1) / self.n

    def moments(self, ridge: float) -> tuple[Tensor, Tensor]:
        """cov(f, y) and cov(f, f), both `(C, C)`, of the ridge regression's predictions f = b^T (K + r)^-1 x"""
        solved = self.rotated / (self.values + ridge)[:, None]
        return self.rotated.T @ solved, solved.T @ (self.values[:, None] * solved)

    def left_out(self, ridge: float) -> tuple[Tensor, Tensor] | None:
        """The same moments of g = (f - h y)/(1 - h), what generalised cross-validation takes for predictions of
        left-out images; None where nothing would be left."""
        h = self.leverage(ridge)
        if h > 0.999:
            return None
        fy, ff = self.moments(ridge)
        return (fy - h * self.labels) / (1 - h), (ff - 2 * h * fy + h * h * self.labels) / (1 - h) ** 2

    def criterion(self, ridge: float) -> float:
        """Cosine-GCV: tr cov(g, y) / sqrt(tr cov(g, g) tr cov(y, y)), the larger the better.

        Unlike the squared error of plain GCV it ignores the overall scale of the predictions, which does not matter
        to an argmax but makes GCV prefer far too strong a ridge when there are many classes.
        """
        moments = self.left_out(ridge)
        if moments is None:
            return -math.inf
        gy, gg = moments
        return float(gy.trace()) / math.sqrt(max(float(gg.trace() * self.labels.trace()), 1e-300))

    def choose_ridge(self) -> float:
        """The best by `criterion` among those above the noise."""
        floor = 2 * self.noise
        scores = {ridge: self.criterion(ridge) for ridge in (max(floor, RIDGES[0]), *RIDGES) if ridge >= floor}
        return max(scores, key=lambda ridge: (scores[ridge], ridge))

    def regression(self, ridge: float) -> tuple[Tensor, Tensor]:
        """f + p as a function of f: least squares on one-hot labels. `(C, C)`, `(C,)`"""
        del ridge
        return torch.eye(len(self.prior), dtype=torch.float64), self.prior

    def discriminant(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Linear discriminant analysis as a function f T + bias of the regression. `(C, C)`, `(C,)`

        With the pooled within-class covariance S = K - M diag(p) M^T it is w_c = (S + r)^-1 m_c and
        bias_c = log p_c - m_c.w_c/2. By Woodbury (S + r)^-1 M = A (I - diag(p) M^T A)^-1 with A = (K + r)^-1 M, and
        f = diag(p) A^T x, so T = (diag(p) - diag(p) M^T A diag(p))^-1: no second decomposition.
        """
        overlap = self.means.T @ (self.means / (self.values + ridge)[:, None])  # M^T A
        prior = self.prior
        transform: Tensor = torch.linalg.inv(torch.diag(prior) - prior[:, None] * overlap * prior)
        return transform, prior.log() - 0.5 * (overlap @ (prior[:, None] * transform)).diagonal()

    def in_features(self, ridge: float, transform: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """W `(D, C)` and bias `(C,)` in the features' own units, of a function f T + bias."""
        weight = (self.vectors @ (self.rotated / (self.values + ridge)[:, None] @ transform)) * self.inverse[:, None]
        return weight, bias - self.mean @ weight

    def simulate(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Left-out predictions g `(SIMULATED, C)` of pseudo images, and their labels.

        The means of g in each class and its covariance within classes follow from the moments of `left_out`; the
        shape is Student's t.
        """
        gy, gg = self.left_out(ridge) or self.moments(ridge)
        means = gy / self.prior  # column c: mean of g in class c
        return simulated_scores(means.T, gg - means @ (self.prior[:, None] * means.T), self.prior)


def simulated_scores(means: Tensor, within: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Scores `(SIMULATED, k)` of pseudo images from Student's t, and their labels.

    means: `(C, k)` of each class; within: `(k, k)` covariance within classes; prior: `(C,)`
    """
    values, vectors = torch.linalg.eigh((within + within.T) / 2)
    generator = torch_generator(0, "simulated images")
    labels = torch.multinomial(prior, SIMULATED, replacement=True, generator=generator)
    normal = torch.randn(SIMULATED, means.shape[1] + FREEDOM, dtype=torch.float64, generator=generator)
    noise, chi = normal[:, FREEDOM:], normal[:, :FREEDOM].square().sum(1, keepdim=True)
    noise = noise * math.sqrt(FREEDOM - 2) / chi.sqrt()  # unit variance
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T  # symmetric, so that the sign of a vector is no matter
    return means[labels] + noise @ root, labels


def inverse_temperature(logits: Tensor, labels: Tensor) -> float:
    """The beta for which softmax(beta logits) fits the labels best: cross-entropy is convex in beta, so by sections."""
    low, high = (math.log(beta) for beta in TEMPERATURES)
    for _ in range(30):
        left, right = low + (high - low) * 0.382, low + (high - low) * 0.618
        losses = [float(F.cross_entropy(math.exp(middle) * logits, labels)) for middle in (left, right)]
        low, high = (low, right) if losses[0] < losses[1] else (left, high)
    return math.exp((low + high) / 2)


def solve(statistics: Statistics, *, kind: str = "lda", ridge: float | None = None) -> LinearClassifier:
    """The calibrated classifier of the summed statistics; its ridge strength is chosen unless it is given."""
    spectrum = Spectrum(statistics)
    strength = spectrum.choose_ridge() if ridge is None else ridge
    transform, offset = (spectrum.discriminant if kind == "lda" else spectrum.regression)(strength)
    weight, bias = spectrum.in_features(strength, transform, offset)
    predictions, labels = spectrum.simulate(strength)
    beta = CAUTION * inverse_temperature(predictions @ transform + offset, labels)
    present = spectrum.present
    full_weight = torch.zeros(len(weight), len(present))
    full_bias = torch.full((len(present),), NEVER)
    full_weight[:, present] = (beta * weight).float()
    full_bias[present] = (beta * bias).float()
    return LinearClassifier(full_weight, full_bias, strength)
