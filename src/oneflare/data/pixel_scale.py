"""Scales the numbers of an image file, 16-bit and floating ones too, to brightness by the rule of the terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from oneflare.core.config import Pixels

Array = np.ndarray[Any, Any]
Shade = Callable[[Array], Array]
"""values -> brightness from 0 (black) to 1 (white)"""
MOST_PIXELS = 80_000_000
"""of one image; it is refused before it is decoded"""
MOST_BYTES = 1 << 30
"""of one file, or of one volume before it was compressed"""


class Refusal(Exception):
    """Why an image cannot be used, in words that follow its name."""


class TooLarge(Refusal):
    """The image has more pixels than are ever decoded."""


class Scan(NamedTuple):
    """One image as a scanner's file shows it, not yet resized."""

    pixels: Array
    """`(height, width)` float32 from 0 to 255, or `(height, width, 3)` uint8"""
    kind: str


class Stored(NamedTuple):
    """Grey values as a file holds them, and what the file itself says about them."""

    values: Array
    """`(height, width)` of floats, in the units of the file"""
    kind: str
    """such as "16-bit", for messages"""
    shade: Shade | None = None
    """how the file asks to be shown"""
    shallow: bool = False
    """whole numbers of at most 8 bits, whose `shade` no rule replaces"""
    white_is_least: bool = False

    def span(self) -> str:
        return f"{self.kind} values ({float(self.values.min()):g} to {float(self.values.max()):g})"


def check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise Refusal(f"its header states {width}x{height} pixels")
    if width * height > MOST_PIXELS:
        raise TooLarge(f"its {width}x{height} pixels exceed the limit of {MOST_PIXELS:,}; reduce it")


def window(low: float, high: float) -> Shade:
    """Low and everything below is black, high and everything above is white; where both are equal, a step."""

    def shade(values: Array) -> Array:
        if low == high:
            return (values > low).astype(np.float32)
        return ((values - low) / (high - low)).clip(0, 1).astype(np.float32)

    return shade


def brightness(stored: Stored, rule: Pixels | None, changes: set[str]) -> Array:
    """`(height, width)` float32 from 0 to 255: by the rule of the terms, or else as the file asks to be shown."""
    values = stored.values
    if not np.isfinite(values).all():
        raise Refusal("it holds numbers that are not finite")
    if rule is None:
        raise Refusal(f"this model was trained without a rule for {stored.span()}; give it an 8-bit image")
    shade = stored.shade
    if rule.covers_deep and not stored.shallow:
        _check_fit(stored, rule, changes)
        shade = window(*rule.window)
    elif shade is None:
        raise Refusal(
            f"no rule says how its {stored.span()} become brightness; before training, set pixels.bits for whole "
            "numbers, or pixels.low and pixels.high (data.pixels of a run, image.pixels of a federation); a model that "
            "was trained without such a rule takes 8-bit images"
        )
    elif not stored.shallow:
        changes.add("own window")
    unit = shade(values)
    if stored.white_is_least:
        changes.add("inverted")
        unit = 1 - unit
    return unit * np.float32(255)


def _check_fit(stored: Stored, rule: Pixels, changes: set[str]) -> None:
    low, high = rule.window
    outside = bool((stored.values.min() < low) or (stored.values.max() > high))
    if rule.bits is not None and stored.kind == "floating-point":
        raise Refusal(f"pixels.bits does not cover {stored.span()}; set pixels.low and pixels.high instead")
    if rule.bits is not None and outside:
        raise Refusal(f"its {stored.span()} do not fit in pixels.bits={rule.bits}, which holds {low:g} to {high:g}")
    changes.update({"scaled", "clipped"} if outside else {"scaled"})


def chosen_page(pages: int, rule: Pixels | None, changes: set[str], *, what: str = "page or frame") -> int:
    """Which of several pages, frames or slices is read, from 0."""
    page = 1 if rule is None else rule.page_of(pages)
    if page is None and pages > 1:
        raise Refusal(f"it has more than one {what}; split it, or agree on one (pixels.page=1, pixels.page=middle)")
    page = page or 1
    if page > pages:
        raise Refusal(f"it has fewer than {page} pages, and pixels.page={page} was agreed")
    if pages > 1:
        changes.add("page")
    return page - 1
