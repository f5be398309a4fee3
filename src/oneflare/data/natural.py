"""Digits from several sources, each the images of one member: a federation that nobody has drawn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from oneflare.core.config import DataConfig
from oneflare.data.dataset import Dataset, ImageSpec, Split, draw_rows
from oneflare.data.sources import SOURCES, digits, folder, svhn
from oneflare.errors import DataError

SIZE = 16
LUMINANCE = (0.299, 0.587, 0.114)
"""ITU-R BT.601, as Pillow turns colour into grey"""


@SOURCES.register("digit_sources")
def digit_sources(config: DataConfig) -> Dataset:
    """Handwritten digits, house numbers and, with data.path, digits of your own: one member each, grey, 16x16.

    `data.train_size` and `data.test_size` are the most that are taken of each source. `data.path` is a folder of
    images in class folders named 0 to 9.
    """
    size = config.image_size or SIZE
    plain = config.model_copy(update={"train_size": None, "test_size": None, "public": None, "path": None})
    sources = [digits(plain), svhn(plain.model_copy(update={"image_size": size}))]
    if config.path is not None:
        sources.append(folder(plain.model_copy(update={"path": config.path, "image_size": size})))
    names = tuple(str(digit) for digit in range(10))
    for source in sources:
        if source.classes != names:
            found = ", ".join(source.classes[:12])
            raise DataError(f"{config.path}: class folders must be named 0 to 9, found {found}")
    train = [_grey(_drawn(source.train, config.train_size, config.seed, "train"), size) for source in sources]
    test = [_grey(_drawn(source.test, config.test_size, config.seed, "test"), size) for source in sources]
    ends = np.cumsum([len(part.labels) for part in train])
    owners = tuple(np.arange(end - len(part.labels), end) for end, part in zip(ends, train, strict=True))
    image = ImageSpec.default(1, size)
    return Dataset("digit_sources", _joined(train), _joined(test), names, image, flip=False, owners=owners)


def _drawn(split: Split, size: int | None, seed: int, purpose: str) -> Split:
    available = len(split.labels)
    return split.take(draw_rows(available, None if size is None else min(size, available), seed, purpose))


def _grey(split: Split, size: int) -> Split:
    """Brightness alone, at one size, stored as bytes."""
    images: Tensor = split.images.float()
    if images.shape[1] == 3:
        images = (images * torch.tensor(LUMINANCE).view(1, 3, 1, 1)).sum(1, keepdim=True)
    if images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=True)
    return Split(images.round().clamp(0, 255).to(torch.uint8), split.labels)


def _joined(parts: list[Split]) -> Split:
    return Split(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
