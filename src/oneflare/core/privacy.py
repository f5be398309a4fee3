"""The discrete Gaussian mechanism for sums over images, and its privacy cost.

Neighbours differ in one image with its label (replaced by any other), so the number of images is public.

What is released lies on a lattice before noise is added: features are whole multiples of B/2^q (q: `Privacy.bits`),
so G, b and n are integers that are summed without rounding, and the noise is an integer too. With noise of scale s_j on
coordinate j, the release has rho-concentrated differential privacy with

    rho = 1/2 max over neighbours of sum_j (difference_j / s_j)^2,

whatever the number of coordinates: discrete Gaussian noise of scale s on an integer that moves by at most D costs
rho = D^2/(2 s^2), as continuous noise does (Canonne, Kamath and Steinke 2020, arXiv:2004.00010), and the Renyi
divergences of independent coordinates add up. Section 2.3 of the same paper turns rho into (epsilon, delta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

SENSITIVITY = math.sqrt(4.5)
"""of (G/B^2, b/B, n/2) in Euclidean norm, for features of norm at most B.

Replace image (a, c) by (b, d) with unit features at angle t = cos(a, b). |aa^T - bb^T|_F^2 = 2 - 2t^2. Same class:
|a - b|^2 = 2 - 2t, counts unchanged, together 4 - 2t - 2t^2 <= 4.5 (t = -1/2). Different classes: 2 - 2t^2 from G,
1 + 1 from b, 2/4 from the counts, together <= 4.5 (t = 0). Shorter features change less.
"""
FINEST = 20
"""bits of a feature: 2^20 steps from 0 to the bound"""
SCALE_BITS = 50
"""the noise on G has a scale below 2^50 steps, so that 64-bit integers hold it"""
UP = 1 + 2.0**-40
"""scales are rounded up, by more than floating-point can be wrong"""


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

    @property
    def bits(self) -> int:
        """q: a feature is a whole multiple of clip/2^q."""
        return min(FINEST, int((SCALE_BITS - math.log2(max(1.0, self.noise))) // 2))

    def steps(self, size: float) -> int:
        """The scale of the discrete noise, for a standard deviation of `size` times `noise`, in steps."""
        return math.ceil(size * self.noise * UP)


def gaussian_noise(epsilon: float, delta: float) -> float:
    """Smallest sigma for sensitivity 1 whose `gaussian_delta` is at most delta, by bisection."""
    low, high = 1e-6, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gaussian_delta(middle, epsilon) > delta else (low, middle)
    return high


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """The delta that (discrete) Gaussian noise of this size gives at epsilon, for sensitivity 1: rho = 1/(2 sigma^2),

    delta = min over alpha > 1 of exp((alpha - 1)(alpha rho - epsilon)) / (alpha - 1) (1 - 1/alpha)^alpha

    Every alpha gives a valid delta, so a search that misses the minimum only adds noise.
    """
    rho = 0.5 / sigma**2

    def log_delta(position: float) -> float:
        rest = math.exp(position)  # alpha - 1
        alpha = 1 + rest
        return rest * (alpha * rho - epsilon) - position + alpha * (position - math.log1p(rest))

    low, high = -20.0, 60.0
    for _ in range(150):
        third = (high - low) / 3
        if log_delta(low + third) < log_delta(high - third):
            high -= third
        else:
            low += third
    return math.exp(min(0.0, log_delta(low)))
