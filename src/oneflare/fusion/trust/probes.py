"""Synthetic images, the same for everybody, on which members' networks are compared without data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.data import ImageSpec, prepare
from oneflare.fusion.base import UploadSet
from oneflare.nn.encoders import Features

PROBES = 128
GRIDS = (2, 3, 4)
"""sides of the coarse noise that is enlarged to blobs; the last part is noise pixel by pixel"""


def probe_images(image: ImageSpec, number: int = PROBES, seed: int = 0) -> Tensor:
    """`(number, c, h, w)` in [0, 1]: random blobs of several sizes, and plain noise."""
    generator = torch_generator(seed, "probe images")
    sides = (*GRIDS, image.size)
    parts = []
    for index, side in enumerate(sides):
        share = number // len(sides) + (index < number % len(sides))
        coarse = torch.rand(share, image.channels, side, side, generator=generator)
        parts.append(F.interpolate(coarse, size=(image.size, image.size), mode="bilinear", align_corners=True))
    return torch.cat(parts)


def probe_features(uploads: UploadSet, seed: int = 0) -> Features:
    """`(N, probes, d)` raw features of the same probes, one encoder in memory at a time."""
    image = uploads.contract.image
    pixels = prepare(probe_images(image, seed=seed), image)
    return Features.stacked(list(uploads.features(pixels)))
