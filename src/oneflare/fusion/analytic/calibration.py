"""How sure a closed-form classifier may be: pseudo images from its moments, and the temperature that fits them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.seeds import torch_generator

TEMPERATURES = (2.0**-6, 2.0**7)
"""between which calibration looks for the inverse temperature"""
SIMULATED = 4096
"""pseudo images per calibration"""
FREEDOM = 8
"""degrees of freedom of their distribution (Student's t): photographs have heavier tails than a Gaussian"""


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
