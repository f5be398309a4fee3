"""A generator of images from noise, for servers that have no images."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from oneflare.core.seeds import global_stream


class Generator(nn.Module):
    """Noise `(batch, noise)` -> images `(batch, channels, size, size)` in [0, 1].

    A quarter of the side, doubled twice by nearest neighbours with a convolution after each (Radford et al. 2016, with
    resizing in place of strided transposes). Batch normalisation knows only the present batch: nothing is remembered.
    """

    def __init__(self, noise: int, channels: int, size: int, width: int) -> None:
        super().__init__()
        self.side = math.ceil(size / 4)
        self.size = size
        self.width = width
        self.spread = nn.Linear(noise, 2 * width * self.side**2)
        self.first = _norm(2 * width)
        self.second = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, 1, 1), _norm(2 * width), nn.LeakyReLU(0.2))
        self.third = nn.Sequential(nn.Conv2d(2 * width, width, 3, 1, 1), _norm(width), nn.LeakyReLU(0.2))
        self.last = nn.Sequential(nn.Conv2d(width, channels, 3, 1, 1), _norm(channels, affine=False))

    def forward(self, noise: Tensor) -> Tensor:
        x = self.first(self.spread(noise).view(-1, 2 * self.width, self.side, self.side))
        x = self.second(F.interpolate(x, scale_factor=2))
        x = self.third(F.interpolate(x, size=(self.size, self.size)))
        images: Tensor = self.last(x).sigmoid()
        return images


def _norm(channels: int, affine: bool = True) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, affine=affine, track_running_stats=False)


def initial_generator(noise: int, channels: int, size: int, width: int, seed: int) -> Generator:
    """Weights depend on the seed alone."""
    with global_stream(seed, "generator"):
        return Generator(noise, channels, size, width)
