"""Decodes image files to pixels, for training, measuring, predicting and serving alike.

What an image's numbers mean is stated by a `Pixels` rule, which is part of a federation's terms and of a model's file.
Nothing is guessed: an image that the rule does not cover is refused with the reason, and every change is counted.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oneflare.core.config import Pixels
from oneflare.data.dataset import ImageSpec
from oneflare.errors import DataError

if TYPE_CHECKING:
    from PIL import Image as Pillow

    Array = np.ndarray[Any, Any]

Source = bytes | Path
"""an encoded image, or the file that holds it"""
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
MOST_PIXELS = 80_000_000
"""of one image; it is refused before it is decoded"""
ORIENTATION = 0x0112
PHOTOMETRIC = 262
FEW = 2
"""sizes that a note tells one by one"""
GREY_MODES = ("1", "L", "LA", "La", "F")


class Refusal(Exception):
    """Why an image cannot be used, in words that follow its name."""


class Damaged(NamedTuple):
    """An image that cannot be used."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"cannot read image {self.name}: {self.reason}"


class Decoded(NamedTuple):
    """One image as the network is fed, and what was done to it."""

    pixels: Array
    """`(size, size, channels)` uint8"""
    size: tuple[int, int]
    """width and height before it was resized, after it was turned"""
    grey: bool
    changes: frozenset[str]


def decode(sources: Sequence[Source], names: Sequence[str], image: ImageSpec) -> torch.Tensor:
    """Encoded images -> `(n, channels, size, size)` uint8. The first that cannot be used is a DataError."""
    images, damaged = decode_all(sources, names, image)
    if damaged:
        raise DataError(str(damaged[min(damaged)]))
    return images


def decode_all(
    sources: Sequence[Source],
    names: Sequence[str],
    image: ImageSpec,
    tally: Tally | None = None,
    *,
    refuse_constant: bool = False,
) -> tuple[torch.Tensor, dict[int, Damaged]]:
    """Those images that can be used, in their order, and the others by row; `tally` counts what was done."""

    def one(row: int) -> Decoded | Damaged:
        try:
            decoded = _decode_one(sources[row], image)
            if refuse_constant and not np.ptp(decoded.pixels, axis=(0, 1)).any():
                shades = ", ".join(str(value) for value in decoded.pixels[0, 0])
                raise Refusal(f"every pixel is the same ({shades} of 255), so it shows nothing")
            return decoded
        except Exception as error:  # foreign bytes make decoders raise many kinds
            return Damaged(names[row], _reason(error))

    from PIL import Image

    result: list[Array] = []
    damaged: dict[int, Damaged] = {}
    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # beyond our own limit, which refuses it
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about damage in fields that nobody reads
        for row, answer in enumerate(pool.map(one, range(len(sources)))):
            if isinstance(answer, Damaged):
                damaged[row] = answer
                continue
            result.append(answer.pixels)
            if tally is not None:
                tally.add(answer)
    shape = (len(result), image.size, image.size, image.channels)
    stacked = np.stack(result) if result else np.empty(shape, dtype=np.uint8)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous(), damaged


def is_grey(source: Source) -> bool | None:
    """Whether an encoded image has no colour; None where it cannot be read."""
    try:
        with _opened(source) as image:
            return _has_no_colour(image.mode)
    except Exception:  # foreign bytes; decoding says what is wrong with them
        return None


def _has_no_colour(mode: str) -> bool:
    return mode in GREY_MODES or mode.startswith("I")


def _opened(source: Source) -> Pillow.Image:
    from PIL import Image

    if not (source if isinstance(source, bytes) else source.stat().st_size):
        raise Refusal("it is empty")
    image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise Refusal(f"its {width}x{height} pixels exceed the limit of {MOST_PIXELS:,}; reduce it")
    return image


def _decode_one(source: Source, spec: ImageSpec) -> Decoded:
    from PIL import Image

    rule, changes = spec.pixels, set[str]()
    with _opened(source) as image:
        _turn_to_page(image, rule, changes)
        tag_before = getattr(image, "tag_v2", {}).get(ORIENTATION, 1)  # TIFF images are turned as they are loaded
        deep = _is_deep(image, rule, changes)
        image.load()
        grey = _has_no_colour(image.mode)
        if deep:
            flat = _scaled(image, rule, changes)
        else:
            if image.mode == "CMYK":
                changes.add("cmyk")
            shown = image if rule is None else _on_background(image, rule, changes)
            flat = shown.convert("RGB" if spec.channels == 3 else "L")
        if rule is not None:
            flat = _upright(flat, image, changes)
            if tag_before not in (0, 1):
                changes.add("turned")
        size = flat.size
        if size != (spec.size, spec.size):
            flat = flat.resize((spec.size, spec.size), Image.Resampling.BILINEAR)
    pixels = np.asarray(flat)
    if deep:
        pixels = pixels.round().clip(0, 255).astype(np.uint8)
        pixels = np.repeat(pixels[:, :, None], spec.channels, axis=2)
    return Decoded(pixels.reshape(spec.size, spec.size, spec.channels), size, grey, frozenset(changes))


def _turn_to_page(image: Pillow.Image, rule: Pixels | None, changes: set[str]) -> None:
    if rule is None or image.format == "MPO":  # cameras put a preview behind the photograph
        return
    page = rule.page or 1
    try:
        image.seek(1 if rule.page is None else page - 1)
    except EOFError:
        if page > 1:
            raise Refusal(f"it has fewer than {page} pages, and pixels.page={page} was agreed") from None
        return
    if rule.page is None:
        raise Refusal("it has more than one page or frame; split it, or agree on one (pixels.page=1)")
    if page > 1:
        changes.add("page")


def _is_deep(image: Pillow.Image, rule: Pixels | None, changes: set[str]) -> bool:
    """Whether the stored numbers need a rule: more than 8 bits, or floats. Looked at before the image is loaded."""
    if image.mode.startswith("I") or image.mode == "F":
        if "transparency" in image.info and rule is not None:
            raise Refusal("it has a transparent grey value and more than 8 bits; save it without transparency")
        return True
    tiles = getattr(image, "tile", None)
    arguments = tiles[0][3] if tiles else ""
    raw = arguments if isinstance(arguments, str) else str(arguments[0]) if arguments else ""
    if ";16" in raw:
        if rule is None or rule.bits != 16:
            raise Refusal("it has 16 bits per colour, which only pixels.bits=16 covers; save it with 8 bits per colour")
        changes.add("scaled")
    return False


def _scaled(image: Pillow.Image, rule: Pixels | None, changes: set[str]) -> Pillow.Image:
    """Numbers of more than 8 bits, or floats, as brightness from 0 to 255 (a float image)."""
    from PIL import Image

    floating = image.mode == "F"
    values: Array = np.asarray(image).astype(np.float64 if image.mode == "I" else np.float32)
    if not np.isfinite(values).all():
        raise Refusal("it holds numbers that are not finite")
    least, most = float(values.min()), float(values.max())
    span = f"{'floating-point' if floating else '16-bit'} values ({least:g} to {most:g})"
    if rule is None:
        raise Refusal(f"this model was trained without a rule for {span}; give it an 8-bit image")
    if rule.bits is None and rule.low is None:
        raise Refusal(
            f"no rule says how its {span} become brightness; before training, set pixels.bits for whole numbers, or "
            "pixels.low and pixels.high (data.pixels of a run, image.pixels of a federation); a model that was trained "
            "without such a rule takes 8-bit images"
        )
    if rule.bits is not None and floating:
        raise Refusal(f"pixels.bits does not cover {span}; set pixels.low and pixels.high instead")
    low, high = rule.window
    if rule.bits is not None and (least < low or most > high):
        raise Refusal(f"its {span} do not fit in pixels.bits={rule.bits}, which holds {low:g} to {high:g}")
    changes.add("scaled")
    if least < low or most > high:
        changes.add("clipped")
    unit = ((values - low) / (high - low)).clip(0, 1).astype(np.float32)
    if getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0:
        changes.add("inverted")
        unit = 1 - unit
    return Image.fromarray(unit * np.float32(255))


def _on_background(image: Pillow.Image, rule: Pixels, changes: set[str]) -> Pillow.Image:
    """What a viewer shows: transparent places have the agreed colour, whatever colour is hidden in them."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    layers = image.convert("RGBA")
    if layers.getchannel("A").getextrema()[0] == 255:
        return image
    changes.add("transparent")
    return Image.alpha_composite(Image.new("RGBA", image.size, (*rule.background, 255)), layers)


def _upright(flat: Pillow.Image, image: Pillow.Image, changes: set[str]) -> Pillow.Image:
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a damaged tag says nothing
        turn = None
    if turn is None:
        return flat
    changes.add("turned")
    return flat.transpose(turn)


def _reason(error: Exception) -> str:
    """One line; the decoder's words for bytes that are no image name an object in memory."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, Refusal):
        return str(error)
    if isinstance(error, UnidentifiedImageError):
        return "it is damaged or not an image (png, jpg, bmp, gif, webp, tif)"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"it has more pixels than the limit of {MOST_PIXELS:,}; reduce it"
    if isinstance(error, MemoryError):
        return "there is not enough memory to decode it; reduce it"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
    return f"it is damaged ({text})"


CHANGES = {
    "scaled": "were scaled from more than 8 bits to brightness by {rule}",
    "clipped": "have values outside {rule}, which were clipped",
    "inverted": "store white as 0 and were inverted",
    "turned": "were turned upright by their EXIF tag",
    "transparent": "have transparent places, which were given the colour {background}",
    "page": "have several pages, of which page {page} was read",
    "cmyk": "are in CMYK and were turned to RGB without their colour profile",
}


@dataclass
class Tally:
    """Counts what was done to images, for whoever owns them."""

    image: ImageSpec
    images: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reduced: set[tuple[int, int]] = field(default_factory=set)

    def add(self, decoded: Decoded) -> None:
        (width, height), size = decoded.size, self.image.size
        self.images += 1
        self.counts.update(decoded.changes)
        if min(width, height) < size:
            self.counts["enlarged"] += 1
        elif max(width, height) > size:
            self.counts["reduced"] += 1
            self.reduced.add((width, height))
        self.counts["oblong"] += width != height
        self.counts["colour"] += self.image.channels == 1 and not decoded.grey
        self.counts["grey"] += self.image.channels == 3 and decoded.grey
        ruled = self.image.pixels is not None and self.image.pixels.covers_deep
        self.counts["shallow"] += ruled and "scaled" not in decoded.changes

    def notes(self) -> tuple[str, ...]:
        """One sentence for every kind of change."""
        return tuple(f"{self.counts[kind]} of {self.images} images {text}" for kind, text in self._texts())

    def _texts(self) -> Iterator[tuple[str, str]]:
        size, rule = f"{self.image.size}x{self.image.size}", self.image.pixels or Pixels()
        from_sizes = ""
        if self.reduced:
            sizes = [
                f"{width}x{height}" for width, height in sorted(self.reduced, key=lambda size: (math.prod(size), size))
            ]
            few = " and ".join(sizes)
            from_sizes = f"from {few}" if len(sizes) <= FEW else f"from sizes between {sizes[0]} and {sizes[-1]}"
        texts = {
            "reduced": f"were reduced {from_sizes} to {size}",
            "enlarged": f"are smaller than {size} and were enlarged",
            "oblong": "are not square and were squeezed; crop them if that matters",
            "colour": "are in colour and were turned grey",
            "grey": "are grey and were given three equal channels",
            **CHANGES,
        }
        if self.counts["scaled"]:
            texts["shallow"] = f"have 8 bits and keep their own 0 to 255; the others follow {rule.words}"
        for kind, text in texts.items():
            if self.counts[kind]:
                yield kind, text.format(rule=rule.words, background=list(rule.background), page=rule.page)
