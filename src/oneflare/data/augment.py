"""Two random views per image, vectorised over the batch: geometry as one sampling grid, colour as one affine map."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.config import AugmentConfig
from oneflare.data.dataset import ImageSpec, to_unit

LUMA = (0.299, 0.587, 0.114)
TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


@dataclass(frozen=True)
class Augmentation:
    """Stored images -> normalised views; every draw is per view and per image."""

    image: ImageSpec
    kind: str
    flip: bool
    config: AugmentConfig

    @classmethod
    def for_data(cls, config: AugmentConfig, image: ImageSpec, flip_allowed: bool) -> Augmentation:
        kind = config.kind if config.kind != "auto" else ("crop" if image.channels == 3 else "affine")
        return cls(image, kind, flip_allowed if config.flip is None else config.flip, config)

    def two_views(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """images `(B, c, h, w)` -> `(2B, c, h, w)`: all first views, then all second views."""
        views = to_unit(images).repeat(2, 1, 1, 1)
        if self.kind != "none":
            grid = F.affine_grid(
                self._geometry(len(views), generator).to(views.device), list(views.shape), align_corners=False
            )
            views = F.grid_sample(views, grid, align_corners=False)
        matrix, offset = self._colour(views, generator)
        flat = torch.baddbmm(offset, matrix, views.flatten(2))
        return flat.view_as(views).contiguous(memory_format=torch.channels_last)

    def _geometry(self, number: int, generator: torch.Generator) -> Tensor:
        """`(number, 2, 3)` maps from output to input coordinates in [-1, 1]."""
        draw = torch.rand(4, number, generator=generator)
        theta = torch.zeros(number, 2, 3)
        if self.kind == "crop":
            area = self.config.min_scale + (1 - self.config.min_scale) * draw[0]
            aspect = torch.exp((2 * draw[1] - 1) * (math.log(4 / 3) / 2))
            width, height = (area.sqrt() * aspect).clamp(max=1), (area.sqrt() / aspect).clamp(max=1)
            theta[:, 0, 0], theta[:, 1, 1] = width, height
            theta[:, 0, 2], theta[:, 1, 2] = (1 - width) * (2 * draw[2] - 1), (1 - height) * (2 * draw[3] - 1)
        else:
            angle = math.radians(self.config.degrees) * (2 * draw[0] - 1)
            scale = 1 + 0.1 * (2 * draw[1] - 1)
            cosine, sine = scale * angle.cos(), scale * angle.sin()
            theta[:, 0, 0], theta[:, 0, 1], theta[:, 1, 0], theta[:, 1, 1] = cosine, -sine, sine, cosine
            theta[:, :, 2] = 2 * self.config.shift * (2 * draw[2:4].T - 1)
        if self.flip:
            mirrored = torch.rand(number, generator=generator) < 0.5
            theta[mirrored, :, 0] *= -1
        return theta

    def _colour(self, views: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Jitter and normalisation as one map `M x + b`: M `(n, c, c)`, b `(n, c, 1)`."""
        number, channels = len(views), self.image.channels
        matrix = torch.eye(channels).expand(number, -1, -1)
        offset = torch.zeros(number, channels, 1)
        if self.kind == "crop" and channels == 3:
            matrix, offset = self._jitter(views.mean((2, 3)).cpu(), generator)
        mean, std = torch.tensor(self.image.mean).view(-1, 1), torch.tensor(self.image.std).view(-1, 1)
        return (matrix / std).to(views.device), ((offset - mean) / std).to(views.device)

    def _jitter(self, means: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Hue, saturation, brightness, contrast about the image's mean grey; sometimes plain grey. means `(n, 3)`."""
        number, strength = len(means), self.config.jitter
        draw = 2 * torch.rand(4, number, 1, 1, generator=generator) - 1
        chance = torch.rand(2, number, 1, 1, generator=generator)
        identity, luma, to_yiq = torch.eye(3), torch.tensor(LUMA), torch.tensor(TO_YIQ)
        grey = luma.expand(3, 3)

        angle = 2 * math.pi * self.config.hue * draw[0].view(-1)
        rotation = torch.eye(3).repeat(number, 1, 1)
        rotation[:, 1, 1] = rotation[:, 2, 2] = angle.cos()
        rotation[:, 1, 2], rotation[:, 2, 1] = -angle.sin(), angle.sin()
        hue = torch.linalg.inv(to_yiq) @ rotation @ to_yiq

        saturation = 1 + strength * draw[1]
        colour = (saturation * identity + (1 - saturation) * grey) @ hue
        brightness, contrast = 1 + strength * draw[2], 1 + strength * draw[3]
        matrix = brightness * contrast * colour
        level = brightness * (means @ luma).view(-1, 1, 1)
        offset = (1 - contrast) * level.expand(-1, 3, 1)

        untouched = chance[0] >= 0.8
        matrix = torch.where(untouched, identity, matrix)
        offset = torch.where(untouched, torch.zeros(()), offset)
        to_grey = chance[1] < self.config.grayscale
        return torch.where(to_grey, grey @ matrix, matrix), offset
