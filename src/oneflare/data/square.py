"""Brings an image to the square that a network is fed: squeezed, or cut out of its middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneflare.data.dataset import ImageSpec

if TYPE_CHECKING:
    from PIL import Image as Pillow


def square(flat: Pillow.Image, spec: ImageSpec) -> Pillow.Image:
    """The image with the network's size: squeezed, or the middle of it as the crop says."""
    from PIL import Image

    side, crop = spec.size, spec.crop
    if crop is None:
        return flat if flat.size == (side, side) else flat.resize((side, side), Image.Resampling.BILINEAR)
    kept = crop.part * min(flat.size)
    left, top = (flat.width - kept) / 2, (flat.height - kept) / 2
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    return flat.resize((side, side), filters[crop.resample], (left, top, left + kept, top + kept))
