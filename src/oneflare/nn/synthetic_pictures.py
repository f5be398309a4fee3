"""Synthetic pictures: overlapping soft ellipses in random colours, drawn from a seed, as stand-ins for photographs.

Dead leaves of many sizes have edges, occlusion and the correlations of natural images at all scales (Lee, Mumford and
Huang 2001). They stand in where something is to be known of images in general and nobody's images may be looked at.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAVES = 40
RADII = (0.05, 0.75)
"""least and largest radius of a leaf, in sides of the picture; their density falls as r^-3"""
MARGIN = 0.125
"""how far outside the picture a leaf's centre may lie, in sides"""
GREY, CONTRAST, NOISE = 128.0, 55.0, 4.0
"""mean of colours, their deviation, and the deviation of each pixel, in grey levels"""
CORRELATION = 0.75
"""of two channels of a colour"""
STRETCH = 0.4
"""deviation of the logarithm of an ellipse's shape"""
SOFTNESS = 0.3
"""of edges, in pixels"""

Array = np.ndarray[Any, Any]


def dead_leaves(count: int, channels: int, size: int, seed: int = 0) -> Tensor:
    """`(count, channels, size, size)` uint8, the same for every machine but for rare roundings of single pixels."""
    rng = np.random.RandomState(seed)
    mix = np.linalg.cholesky((1 - CORRELATION) * np.eye(channels) + CORRELATION)
    yy, xx = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")

    def colours() -> Array:
        drawn: Array = GREY + CONTRAST * (rng.standard_normal((count, channels)) @ mix.T)
        return drawn.clip(0, 255)[:, :, None, None].astype(np.float32)

    def drawn(low: float, high: float) -> Array:
        return rng.uniform(low, high, size=(count, 1, 1))

    picture = np.broadcast_to(colours(), (count, channels, size, size)).copy()
    small, large = (1 / (part * size) ** 2 for part in RADII)
    for _ in range(LEAVES):
        radius = 1 / np.sqrt(large + drawn(0, 1) * (small - large))
        dx, dy = (axis - size * drawn(-MARGIN, 1 + MARGIN) for axis in (xx, yy))
        shape, angle = np.exp(STRETCH * rng.standard_normal((count, 1, 1))), drawn(0, math.pi)
        along = (dx * np.cos(angle) + dy * np.sin(angle)) * shape
        across = (dy * np.cos(angle) - dx * np.sin(angle)) / shape
        outside = np.sqrt(along**2 + across**2) - radius
        mask = (1 / (1 + np.exp(np.clip(outside / SOFTNESS, -30, 30))))[:, None].astype(np.float32)
        picture = picture * (1 - mask) + colours() * mask
    picture += NOISE * rng.standard_normal(picture.shape).astype(np.float32)
    return torch.from_numpy(picture.clip(0, 255).round().astype(np.uint8))
