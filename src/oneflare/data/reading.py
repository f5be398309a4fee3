"""Readers of image files: what a source of data makes of its files, pixels or a backbone's features of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from oneflare.data.dataset import ImageSpec
from oneflare.data.images import Damaged, ImageFiles, Source, Tally, decode_all
from oneflare.errors import DataError


class Reader(Protocol):
    """How a source of data reads image files: as pixels, or as a backbone's features of them."""

    block: int
    """files that are read together"""

    def image(self, default: ImageSpec, chosen: int | None, native: int | None = None) -> ImageSpec:
        """What files are brought to.

        default: for a reader of pixels. chosen: the side in pixels that the user asked for. native: the side that the
        files have, where it is known.
        """

    def read(
        self, files: ImageFiles, image: ImageSpec, tally: Tally | None = None
    ) -> tuple[torch.Tensor, dict[int, Damaged]]:
        """As `decode_all`: `image` is what the method of that name returned."""


class Decoder:
    """Reads image files as pixels."""

    block = 1024

    def image(self, default: ImageSpec, chosen: int | None, native: int | None = None) -> ImageSpec:
        del native
        return replace(default, size=chosen or default.size)

    read = staticmethod(decode_all)


PIXELS = Decoder()


def as_files(images: torch.Tensor) -> list[bytes]:
    """Images `(n, c, h, w)`, uint8 or floats in [0, 1], as PNG files of 8 bits, for readers of files."""
    from PIL import Image

    levels = images if images.dtype == torch.uint8 else (images * 255).round().to(torch.uint8)
    files = []
    for pixels in levels.permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, "PNG", compress_level=1)
        files.append(buffer.getvalue())
    return files


def read_all(
    sources: Sequence[Source], names: Sequence[str], image: ImageSpec, reader: Reader = PIXELS
) -> torch.Tensor:
    """Encoded images -> pixels `(n, channels, size, size)` uint8, or what else the reader makes of them.

    The first image that cannot be used is a DataError.
    """
    images, damaged = reader.read(ImageFiles(sources, names), image)
    if damaged:
        raise DataError(str(damaged[min(damaged)]))
    return images
