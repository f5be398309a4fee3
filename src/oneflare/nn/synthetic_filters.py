"""Filters that come from a seed alone: patches of synthetic pictures, whitened."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAVES = 2
"""discs per synthetic patch"""
RADIUS = (2.0, 100.0)
"""of the discs in pixels; the density of boundaries falls as r^-2"""
EDGE = (0.20, 0.60)
"""softness of an edge in pixels"""
CHANNEL_CORRELATION = 0.75
PATCH_NOISE = 0.02
PATCHES = 20_000
"""patches behind the covariance"""
WHITEN_EPS = 0.1
WEIGHT_GRID = 4096.0
"""filters are rounded to multiples of 1/4096, so that machines agree on them"""


@functools.lru_cache(maxsize=8)
def synthetic_filters(filters: int, channels: int, kernel: int, seed: int) -> Tensor:
    """`(filters, c, k, k)`: dead-leaves patches, whitened with the covariance of such patches."""
    rng = np.random.RandomState(seed)
    patches = _dead_leaves(max(PATCHES, filters), kernel, channels, rng)
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    whiten = (vectors / np.sqrt(np.maximum(values, 0) + WHITEN_EPS)) @ vectors.T
    code = patches[:filters] @ whiten
    code /= np.linalg.norm(code, axis=1, keepdims=True)
    weight = code @ whiten
    weight -= weight.mean(1, keepdims=True)  # subtracts the patch mean implicitly
    weight = np.round(weight * WEIGHT_GRID) / WEIGHT_GRID
    return torch.from_numpy(weight.reshape(filters, channels, kernel, kernel)).float()


def _dead_leaves(count: int, kernel: int, channels: int, rng: np.random.RandomState) -> np.ndarray[Any, Any]:
    """Tiny pictures of overlapping soft discs in random colours, `(count, c k k)`, contrast-normalised.

    They have the sparse, oriented, colour-opponent edges of natural images (Lee, Mumford and Huang 2001).
    """
    axis = np.arange(kernel) - (kernel - 1) / 2
    yy, xx = np.meshgrid(axis, axis, indexing="ij")
    mix = np.linalg.cholesky((1 - CHANNEL_CORRELATION) * np.eye(channels) + CHANNEL_CORRELATION)

    def colours() -> np.ndarray[Any, Any]:
        drawn: np.ndarray[Any, Any] = (rng.standard_normal((count, channels)) @ mix.T)[:, :, None, None]
        return drawn

    image = np.broadcast_to(colours(), (count, channels, kernel, kernel)).copy()
    softness = rng.uniform(*EDGE, size=(count, 1, 1))
    low, high = 1 / RADIUS[0], 1 / RADIUS[1]
    for _ in range(LEAVES):  # each disc's border passes through a random point of the patch
        point = rng.uniform(-kernel / 2, kernel / 2, size=(count, 2, 1, 1))
        angle = rng.uniform(0, 2 * math.pi, size=(count, 1, 1))
        radius = 1 / (low + rng.uniform(size=(count, 1, 1)) * (high - low))
        dx = xx - (point[:, 0] + radius * np.cos(angle))
        dy = yy - (point[:, 1] + radius * np.sin(angle))
        outside = np.sqrt(dx * dx + dy * dy) - radius
        mask = (1 / (1 + np.exp(np.clip(1.7 * outside / softness, -50, 50))))[:, None]
        image = image * (1 - mask) + colours() * mask
    image += PATCH_NOISE * rng.standard_normal(image.shape)
    patch = image.reshape(count, -1)
    patch -= patch.mean(1, keepdims=True)
    normalised: np.ndarray[Any, Any] = patch / np.sqrt(patch.var(1, keepdims=True) + 1e-3)
    return normalised
