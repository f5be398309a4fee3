"""Decodes image files to pixels, for training, measuring, predicting and serving alike.

What an image's numbers mean is stated by a `Pixels` rule, which is part of a federation's terms and of a model's file.
Nothing is guessed: an image that the rule does not cover is refused with the reason, and every change is counted.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from oneflare.core.config import Pixels
from oneflare.data import dicom, nifti
from oneflare.data.dataset import ImageSpec
from oneflare.data.pixel_scale import MOST_PIXELS, Array, Refusal, Stored, brightness, check_size, chosen_page
from oneflare.data.square import square
from oneflare.data.tiff import NOT_READ, is_tiff, refuse_misread, refuse_wrapped

if TYPE_CHECKING:
    from PIL import Image as Pillow

Source = bytes | Path
"""an encoded image, or the file that holds it"""
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".dcm", ".nii"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
KINDS = "png, jpg, bmp, gif, webp, tif, dcm, nii"
HEAD = 1024
"""bytes that tell what kind of file it is"""
ORIENTATION = 0x0112
PHOTOMETRIC = 262
FEW = 2
"""sizes that a note tells one by one"""
GREY_MODES = ("1", "L", "LA", "La", "F")


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
    kind: str
    """of the file, such as PNG"""


@dataclass(frozen=True)
class ImageFiles:
    """Encoded images that are read together."""

    sources: Sequence[Source]
    names: Sequence[str]
    """what messages call them"""
    refuse_constant: bool = False
    """whether an image cannot be used if all its pixels are the same"""


def decode_all(
    files: ImageFiles, image: ImageSpec, tally: Tally | None = None
) -> tuple[torch.Tensor, dict[int, Damaged]]:
    """Images `(n, channels, size, size)` uint8 that can be used, in their order, and the others by row.

    tally: counts what was done to them
    """

    def one(row: int) -> Decoded | Damaged:
        try:
            decoded = _decode_one(files.sources[row], image)
            if files.refuse_constant and not np.ptp(decoded.pixels, axis=(0, 1)).any():
                shades = ", ".join(str(value) for value in decoded.pixels[0, 0])
                raise Refusal(f"every pixel is the same ({shades} of 255), so it shows nothing")
            return decoded
        except Exception as error:  # foreign bytes make decoders raise many kinds
            return Damaged(files.names[row], _reason(error))

    result: list[Array] = []
    damaged: dict[int, Damaged] = {}
    with _quiet(), ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for row, answer in enumerate(pool.map(one, range(len(files.sources)))):
            if isinstance(answer, Damaged):
                damaged[row] = answer
                continue
            result.append(answer.pixels)
            if tally is not None:
                tally.add(answer)
    shape = (len(result), image.size, image.size, image.channels)
    stacked = np.stack(result) if result else np.empty(shape, dtype=np.uint8)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous(), damaged


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Decoders warn about damage in fields that nobody reads."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # beyond our own limit, which refuses it
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def is_image_file(path: Path) -> bool:
    """Whether a file counts as an image: by the end of its name, or because it begins as DICOM whatever its name is."""
    name = path.name.lower()
    if name[0] == "." or not path.is_file():
        return False
    if path.suffix.lower() in IMAGE_SUFFIXES or name.endswith(".nii.gz"):
        return True
    try:
        return path.name != dicom.DIRECTORY and dicom.is_dicom(_head(path))
    except OSError:
        return False


def is_grey(source: Source) -> bool | None:
    """Whether an encoded image has no colour; None where it cannot be read."""
    try:
        return shape_of(source)[2]
    except Exception:  # foreign bytes; decoding says what is wrong with them
        return None


def shape_of(source: Source) -> tuple[int, int, bool]:
    """Width, height and whether it is grey, from the header alone. Foreign bytes raise many kinds of exception."""
    head = _head(source)
    if dicom.is_dicom(head):
        return dicom.summary(source)
    if nifti.is_nifti(head):
        volume = nifti.summary(source)
        return volume.width, volume.height, True
    with _opened(source) as image:
        return *image.size, _has_no_colour(image.mode)


def _head(source: Source) -> bytes:
    if isinstance(source, bytes):
        return source[:HEAD]
    with source.open("rb") as file:
        return file.read(HEAD)


def _has_no_colour(mode: str) -> bool:
    return mode in GREY_MODES or mode.startswith("I")


def _opened(source: Source) -> Pillow.Image:
    from PIL import Image, UnidentifiedImageError

    if not (source if isinstance(source, bytes) else source.stat().st_size):
        raise Refusal("it is empty")
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except UnidentifiedImageError:
        raise Refusal(NOT_READ if is_tiff(_head(source)) else f"it is damaged or not an image ({KINDS})") from None
    check_size(*image.size)
    return image


def _decode_one(source: Source, spec: ImageSpec) -> Decoded:

    changes = set[str]()
    flat, grey, kind = _flat(source, spec, changes)
    size = flat.size
    flat = square(flat, spec)
    pixels = np.asarray(flat)
    if flat.mode == "F":
        pixels = pixels.round().clip(0, 255).astype(np.uint8)
        pixels = np.repeat(pixels[:, :, None], spec.channels, axis=2)
    return Decoded(pixels.reshape(spec.size, spec.size, spec.channels), size, grey, frozenset(changes), kind)


def _flat(source: Source, spec: ImageSpec, changes: set[str]) -> tuple[Pillow.Image, bool, str]:
    """The image as a viewer shows it, of floats from 0 to 255 where it had more than 8 bits; whether it is grey; its
    kind."""
    from PIL import Image

    head, reader = _head(source), None
    if dicom.is_dicom(head):
        reader = dicom.read
    elif nifti.is_nifti(head):
        reader = nifti.read
    if reader is not None:
        scan = reader(source, spec.pixels, changes)
        shown = Image.fromarray(scan.pixels)
        grey = scan.pixels.ndim == 2
        return shown if grey or spec.channels == 3 else shown.convert("L"), grey, scan.kind
    with _opened(source) as image:
        kind = image.format or ""
        return *_flat_picture(image, spec, changes), kind


def _flat_picture(image: Pillow.Image, spec: ImageSpec, changes: set[str]) -> tuple[Pillow.Image, bool]:
    rule = spec.pixels
    _turn_to_page(image, rule, changes)
    refuse_misread(image)
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
    return flat, grey


def _turn_to_page(image: Pillow.Image, rule: Pixels | None, changes: set[str]) -> None:
    if rule is None or image.format == "MPO":  # cameras put a preview behind the photograph
        return
    image.seek(chosen_page(int(getattr(image, "n_frames", 1)), rule, changes))


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

    values: Array = np.asarray(image).astype(np.float64 if image.mode == "I" else np.float32)
    refuse_wrapped(image, values)
    white_is_least = getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0
    stored = Stored(values, "floating-point" if image.mode == "F" else "16-bit", white_is_least=white_is_least)
    return Image.fromarray(brightness(stored, rule, changes))


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
    """One line."""
    from PIL import Image

    if isinstance(error, Refusal):
        return str(error)
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
    "own window": "have more than 8 bits and are shown by the window in their own files; pixels.low and pixels.high "
    "would show all members' images alike",
    "annotated": "say that text is burned into their pixels; look whether it names a patient",
    "inverted": "store white as the smallest value and were inverted",
    "turned": "were turned upright by their EXIF tag",
    "transparent": "have transparent places, which were given the colour {background}",
    "page": "have several pages, frames or slices, of which {page} was read",
    "cmyk": "are in CMYK and were turned to RGB without their colour profile",
}


@dataclass
class Tally:
    """Counts what was done to images, for whoever owns them."""

    image: ImageSpec
    images: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reduced: set[tuple[int, int]] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)
    sizes: set[tuple[int, int]] = field(default_factory=set)

    def add(self, decoded: Decoded) -> None:
        (width, height), size = decoded.size, self.image.size
        self.images += 1
        self.kinds[decoded.kind] += 1
        self.sizes.add((width, height))
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

    def span(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """The smallest and the largest size."""
        ordered = sorted(self.sizes, key=lambda size: (math.prod(size), size))
        return (ordered[0], ordered[-1]) if ordered else None

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
            "oblong": "are not square and were squeezed; crop them if that matters"
            if self.image.crop is None
            else "are not square, and only their middle was used; crop them if that matters",
            "colour": "are in colour and were turned grey",
            "grey": "are grey and were given three equal channels",
            **CHANGES,
        }
        if self.counts["scaled"]:
            texts["shallow"] = f"have 8 bits and keep their own 0 to 255; the others follow {rule.words}"
        page = "the middle one" if rule.page == "middle" else f"page {rule.page or 1}"
        for kind, text in texts.items():
            if self.counts[kind]:
                yield kind, text.format(rule=rule.words, background=list(rule.background), page=page)
