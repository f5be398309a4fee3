"""Two random views per image, computed for the whole batch at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.config import AugmentConfig
from oneflare.data.dataset import ImageSpec, normalise, to_unit

LUMA = (0.299, 0.587, 0.114)
DRAWS = 11
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
        if image.backbone is not None:
            kind = "none"
        return cls(image, kind, flip_allowed if config.flip is None else config.flip, config)

    @property
    def one_view(self) -> bool:
        """Whether both views are the image as it is, and so dear to compute that they are computed once.

        Features of a backbone that is frozen as a whole are cheap, and are computed twice as they always were, because
        sums would be rounded in another order.
        """
        backbone = self.image.backbone
        return self.kind == "none" and backbone is not None and backbone.tune is not None

    @staticmethod
    def draw(images: int, generator: torch.Generator) -> Tensor:
        """All random numbers for the two views of this many images: `(2 images, DRAWS)`, uniform in [0, 1)."""
        return torch.rand(2 * images, DRAWS, generator=generator)

    def two_views(self, images: Tensor, draws: Tensor) -> Tensor:
        """images `(B, c, h, w)` -> `(2B, c, h, w)`: all first views, then all second views."""
        views = to_unit(images).repeat(2, 1, 1, 1)
        if self.kind != "none":
            theta = self._geometry(draws[:, :5].T).to(views.device)
            views = F.grid_sample(
                views, F.affine_grid(theta, list(views.shape), align_corners=False), align_corners=False
            )
        if self.kind == "crop" and self.image.channels == 3:
            matrix, offset = self._colour(views.mean((2, 3)).cpu(), draws[:, 5:].T[..., None, None])
            flat = torch.baddbmm(offset.to(views.device), matrix.to(views.device), views.flatten(2))
            views = flat.view_as(views)
        else:
            views = normalise(views, self.image)
        return views.contiguous(memory_format=torch.channels_last)

    def _geometry(self, draw: Tensor) -> Tensor:
        """draw `(5, n)` -> `(n, 2, 3)` maps from output to input coordinates in [-1, 1]."""
        theta = torch.zeros(draw.shape[1], 2, 3)
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
            theta[draw[4] < 0.5, :, 0] *= -1
        return theta

    def _colour(self, means: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Hue, saturation, brightness, contrast about the image's mean grey, sometimes plain grey, and the pixel
        constants, as one map M x + b. means `(n, 3)`, draw `(6, n, 1, 1)` -> M `(n, 3, 3)`, b `(n, 3, 1)`."""
        strength = self.config.jitter
        hue, saturation, brightness, contrast = 2 * draw[:4] - 1
        identity, luma, to_yiq = torch.eye(3), torch.tensor(LUMA), torch.tensor(TO_YIQ)
        grey = luma.expand(3, 3)

        angle = 2 * math.pi * self.config.hue * hue.view(-1)
        rotation = torch.eye(3).repeat(len(means), 1, 1)
        rotation[:, 1, 1] = rotation[:, 2, 2] = angle.cos()
        rotation[:, 1, 2], rotation[:, 2, 1] = -angle.sin(), angle.sin()
        turned = torch.linalg.inv(to_yiq) @ rotation @ to_yiq

        saturation, brightness, contrast = (1 + strength * part for part in (saturation, brightness, contrast))
        matrix = brightness * contrast * (saturation * identity + (1 - saturation) * grey) @ turned
        offset = (1 - contrast) * (brightness * (means @ luma).view(-1, 1, 1)).expand(-1, 3, 1)

        untouched, to_grey = draw[4] >= 0.8, draw[5] < self.config.grayscale
        matrix = torch.where(untouched, identity, matrix)
        offset = torch.where(untouched, torch.zeros(()), offset)
        matrix = torch.where(to_grey, grey @ matrix, matrix)
        mean, std = torch.tensor(self.image.mean).view(-1, 1), torch.tensor(self.image.std).view(-1, 1)
        return matrix / std, (offset - mean) / std
