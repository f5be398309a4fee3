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

from oneflare.core.threads import in_threads

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
AT_A_TIME = 64
"""pictures that are drawn together"""

Array = np.ndarray[Any, Any]


def dead_leaves(count: int, channels: int, size: int, seed: int = 0) -> Tensor:
    """`(count, channels, size, size)` uint8, the same for every machine but for rare roundings of single pixels."""
    rng = np.random.RandomState(seed)
    mix = np.linalg.cholesky((1 - CORRELATION) * np.eye(channels) + CORRELATION)

    def colours() -> Array:
        drawn: Array = GREY + CONTRAST * (rng.standard_normal((count, channels)) @ mix.T)
        return drawn.clip(0, 255)[:, :, None, None].astype(np.float32)

    def drawn(low: float, high: float) -> Array:
        return rng.uniform(low, high, size=(count, 1, 1))

    picture = np.broadcast_to(colours(), (count, channels, size, size)).copy()
    small, large = (1 / (part * size) ** 2 for part in RADII)
    leaves = []
    for _ in range(LEAVES):
        radius = 1 / np.sqrt(large + drawn(0, 1) * (small - large))
        x, y = size * drawn(-MARGIN, 1 + MARGIN), size * drawn(-MARGIN, 1 + MARGIN)
        shape, angle = np.exp(STRETCH * rng.standard_normal((count, 1, 1))), drawn(0, math.pi)
        leaves.append((radius, x, y, shape, angle, colours()))
    noise = rng.standard_normal(picture.shape)

    def draw(part: slice) -> None:
        for leaf in leaves:
            _lay(picture[part], *(values[part] for values in leaf))

    in_threads(draw, [slice(start, start + AT_A_TIME) for start in range(0, count, AT_A_TIME)])
    picture += NOISE * noise.astype(np.float32)
    return torch.from_numpy(picture.clip(0, 255).round().astype(np.uint8))


def _lay(picture: Array, radius: Array, x: Array, y: Array, shape: Array, angle: Array, colour: Array) -> None:
    """Lays one leaf onto each picture `(n, channels, size, size)`; the rest has a number for each."""
    yy, xx = np.meshgrid(np.arange(picture.shape[2]), np.arange(picture.shape[3]), indexing="ij")
    dx, dy = xx - x, yy - y
    along = (dx * np.cos(angle) + dy * np.sin(angle)) * shape
    across = (dy * np.cos(angle) - dx * np.sin(angle)) / shape
    outside = np.sqrt(along**2 + across**2) - radius
    mask = (1 / (1 + np.exp(np.clip(outside / SOFTNESS, -30, 30))))[:, None].astype(np.float32)
    picture *= 1 - mask
    picture += colour * mask
