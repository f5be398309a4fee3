"""The Gaussian mechanism for sums over images.

Neighbours differ in one image with its label (replaced by any other), so the number of images is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SENSITIVITY = math.sqrt(4.5)
"""of (G/B^2, b/B, n/2) in Euclidean norm, for features of norm at most B.

Replace image (a, c) by (b, d) with unit features at angle t = cos(a, b). |aa^T - bb^T|_F^2 = 2 - 2t^2. Same class:
|a - b|^2 = 2 - 2t, counts unchanged, together 4 - 2t - 2t^2 <= 4.5 (t = -1/2). Different classes: 2 - 2t^2 from G,
1 + 1 from b, 2/4 from the counts, together <= 4.5 (t = 0). Shorter features change less.
"""


@dataclass(frozen=True)
class Privacy:
    """(epsilon, delta)-differential privacy of one client's statistics, features clipped to norm `clip`."""

    epsilon: float
    delta: float
    clip: float

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the noise on (G/B^2, b/B, n/2)."""
        return SENSITIVITY * gaussian_noise(self.epsilon, self.delta)


def gaussian_noise(epsilon: float, delta: float) -> float:
    """Smallest sigma for sensitivity 1 (the analytic Gaussian mechanism, Balle and Wang 2018), by bisection:

    Phi(1/(2 sigma) - epsilon sigma) - e^epsilon Phi(-1/(2 sigma) - epsilon sigma) <= delta
    """
    low, high = 1e-6, 1e6
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gaussian_delta(middle, epsilon) > delta else (low, middle)
    return high


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """The delta that noise of this size gives at epsilon, for sensitivity 1."""
    first = _normal(0.5 / sigma - epsilon * sigma)
    tail = _normal(-0.5 / sigma - epsilon * sigma)
    return first - (math.exp(epsilon) * tail if tail > 0 else 0.0)


def _normal(x: float) -> float:
    """Phi(x)"""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def symmetric_noise(dim: int, generator: torch.Generator) -> Tensor:
    """`(dim, dim)` symmetric, variance 1 on the diagonal and 1/2 off it: isotropic in the Frobenius norm."""
    upper = torch.randn(dim, dim, dtype=torch.float64, generator=generator).triu(1) / math.sqrt(2)
    return upper + upper.T + torch.diag(torch.randn(dim, dtype=torch.float64, generator=generator))
