"""A feature map of several scales that keeps a part of each filter's outputs, and how large it may be."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import Tensor

from oneflare.core.registry import Options
from oneflare.core.seeds import torch_generator
from oneflare.errors import ConfigError
from oneflare.nn.feature_maps import FEATURE_MAPS, FILTER_BLOCK, Patches, RandomConv, colour_features, default_reduction

OUTPUTS = 10
"""of a filter: two signs in five cells"""
DEFAULT_FILTERS = 230
MOST_FILTERS = 4096
LEAST_SIDE = 12
"""pixels of an image below which a coarser scale holds too few patches"""
OPERATIONS_PER_SECOND = 3.0e10
"""of one core in a convolution. A constant, so that every member finds the same map for a budget"""
PRODUCTS_PER_SECOND = 2.0e10
"""of one core in the sums of products, which are in double precision"""
BUDGET_IMAGES = 10_000
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


def _seconds(value: Any) -> Any:
    """60, "60s", "2min" or "1h" in seconds."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9.]+)\s*(s|min|h|)\s*", value)
    if found is None:
        raise ValueError("must be a duration such as 60s or 2min")
    return float(found[1]) * _UNITS[found[2]]


Seconds = Annotated[float, BeforeValidator(_seconds)]


@dataclass(frozen=True)
class Scales(Options):
    """How large `multi_scale` is, and how its features are divided."""

    filters: int | None = None
    """of all scales together; by default as many as budget and upload.limit allow, or 230 where neither is given"""
    budget: Seconds | None = None
    """time of one core for 10,000 images, by a fixed table: the same map for all members, whatever their machines; with
    no upload.limit beside it, uploads have at most 100 MB"""
    scales: int = 2
    """each sees the image at half the size of the one before; small images have fewer"""
    kept: int = 5
    """of the ten outputs of a filter (two signs, five cells), drawn anew for each filter"""
    shifted: bool = True
    """whether features are means over several windows that cut a little off the image, instead of the whole image"""


@FEATURE_MAPS.register("multi_scale")
class MultiScale:
    """`random_conv` at several scales, with a part of each filter's outputs: more filters for the same upload

    phi = (colours, outputs of the filters on the image, outputs of other filters on the image at half the size, ...).
    Every scale has equally many filters. Of the ten outputs of a filter (two signs, five cells) `kept` are drawn from
    the seed; the rest says little more than those, and twice the filters say more. Both choices were made on held-out
    training images (docs/analytic.md).

    The map keeps what `random_conv` promises: a function of one image, symmetrised where mirrored images keep their
    label, with a known range of each feature.
    """

    def __init__(
        self,
        channels: int,
        size: int,
        *,
        mirror: bool | None = None,
        colour_grid: int = 4,
        threshold: float = Patches.threshold,
        seed: int = 0,
        parts: Scales = Scales(),
    ) -> None:
        self.shape = MapShape(channels, size, bool(mirror), min(colour_grid, size), parts)
        filters = self.shape.filters
        self.maps, kept = [], []
        offset = 0
        for scale, (reduce, number) in enumerate(zip(self.shape.reductions, self.shape.shares(filters), strict=True)):
            own = RandomConv(
                channels,
                size,
                filters=number,
                mirror=mirror,
                colour_grid=colour_grid if scale == 0 else 0,
                patches=Patches(
                    reduce=reduce, threshold=threshold, seed=seed + scale * SEED_STRIDE, shifted=parts.shifted
                ),
            )
            colours = own.dim - OUTPUTS * number
            chosen = kept_outputs(number, parts.kept, seed, scale) + colours
            kept += [torch.arange(colours) + offset, chosen + offset]
            offset += own.dim
            self.maps.append(own)
        self.kept = torch.cat(kept)
        self.dim = len(self.kept)
        self.parameters = sum(own.parameters for own in self.maps)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        return torch.cat([own(images) for own in self.maps], 1)[:, self.kept]

    def traced(self, images: Tensor) -> Tensor:
        """The same features in one piece, for exporters; rounding may differ."""
        return torch.cat([own.traced(images) for own in self.maps], 1)[:, self.kept]

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = zip(*(own.range() for own in self.maps), strict=True)
        return torch.cat(low)[self.kept], torch.cat(high)[self.kept]

    def fingerprint(self) -> str:
        digest = hashlib.sha256("/".join(own.fingerprint() for own in self.maps).encode())
        digest.update(self.kept.numpy().tobytes())
        return digest.hexdigest()


SEED_STRIDE = 1_000_003
"""between the seeds of two scales, whose filters should differ"""


def kept_outputs(filters: int, kept: int, seed: int, scale: int) -> Tensor:
    """Columns of `kept` outputs of each filter, among the `(OUTPUTS * filters)` that `RandomConv` gives, in order.

    `RandomConv` takes its filters in blocks of b and gives the outputs of a block as (sign, filter, cell).
    """
    generator = torch_generator(seed, "kept outputs", scale)
    columns = []
    for start in range(0, filters, FILTER_BLOCK):
        block = min(FILTER_BLOCK, filters - start)
        for number in range(block):
            drawn = torch.randperm(OUTPUTS, generator=generator)[:kept]
            columns.append(start * OUTPUTS + (drawn // 5) * 5 * block + number * 5 + drawn % 5)
    return torch.cat(columns).sort().values


class MapShape:
    """What a map of several scales measures and costs, without its filters."""

    def __init__(self, channels: int, size: int, mirror: bool, colour_grid: int, parts: Scales) -> None:
        if not 1 <= parts.scales <= 4 or not 1 <= parts.kept <= OUTPUTS:
            raise ConfigError(
                "analytic: scales must lie between 1 and 4 and kept between 1 and 10 "
                f"(got {parts.scales}, {parts.kept})"
            )
        self.channels, self.size, self.mirror = channels, size, mirror
        self.kept = parts.kept
        self.colours = colour_features(channels, colour_grid, mirror)
        self.reductions = scale_reductions(size, parts.scales)
        self.filters = self._number(parts)

    def _number(self, parts: Scales) -> int:
        least = len(self.reductions)
        if parts.filters is not None:
            if not least <= parts.filters <= MOST_FILTERS:
                raise ConfigError(
                    f"analytic.filters: must lie between {least} and {MOST_FILTERS} (got {parts.filters})"
                )
            return parts.filters
        if parts.budget is None:
            return DEFAULT_FILTERS
        budget = parts.budget
        fitting = largest(lambda filters: self.seconds(filters) <= budget, least, MOST_FILTERS)
        if fitting is None:
            raise ConfigError(
                f"analytic.budget: {parts.budget:g} s are too few for 10,000 images of {self.size} pixels; the "
                f"smallest map takes {self.seconds(least):.2g} s"
            )
        return fitting

    def shares(self, filters: int) -> list[int]:
        """The filters of each scale, as equal as can be."""
        scales = len(self.reductions)
        return [filters // scales + (scale < filters % scales) for scale in range(scales)]

    def dim(self, filters: int) -> int:
        return self.colours + self.kept * filters

    def seconds(self, filters: int) -> float:
        """Of one core for 10,000 images, by the table above: convolutions, then sums of products."""
        operations = 0.0
        for reduce, number in zip(self.reductions, self.shares(filters), strict=True):
            side = self.size // reduce
            kernel = 3 if side < 16 else 5
            both = 2 if self.mirror else 1
            operations += 2 * both * number * self.channels * kernel**2 * (side - kernel + 1) ** 2
        products = self.dim(filters) ** 2
        return BUDGET_IMAGES * (operations / OPERATIONS_PER_SECOND + products / PRODUCTS_PER_SECOND)


def fitted(spec: Mapping[str, Any], channels: int, size: int, fits: Callable[[int], bool]) -> dict[str, Any]:
    """The complete spec of a `multi_scale` map with its number of filters decided: the most whose features fit.

    fits: whether so many features do. A number that is given must fit; a budget is kept as well.
    """
    options = {field.name: spec[field.name] for field in fields(Scales)}
    shape = MapShape(channels, size, bool(spec["mirror"]), min(spec["colour_grid"], size), Scales(**options))
    least = len(shape.reductions)
    given = spec["filters"] is not None
    most = shape.filters if given or spec["budget"] is not None else MOST_FILTERS
    found = largest(lambda filters: fits(shape.dim(filters)), least, most)
    if found is None:
        raise ConfigError(f"upload.limit: even the smallest map, of {shape.dim(least)} features, does not fit")
    if given and found < most:
        raise ConfigError(f"upload.limit: {most} filters do not fit; leave analytic.filters out, or set {found}")
    return {**spec, "filters": found, "budget": None}


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest whole number from low to high that fits, where smaller ones fit as well; None if none does."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def scale_reductions(size: int, scales: int) -> list[int]:
    """By how much each scale makes the image smaller; the first is that of `random_conv`."""
    first = default_reduction(size)
    wanted = (first * 2**scale for scale in range(scales))
    return [factor for factor in wanted if factor == first or (size % factor == 0 and size // factor >= LEAST_SIDE)]
