"""A feature map of filters at two scales and of products of their responses, as large as may be uploaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.registry import Options
from oneflare.core.seeds import torch_generator
from oneflare.errors import ConfigError
from oneflare.nn.blocks import block_order, block_sizes
from oneflare.nn.feature_maps import FEATURE_MAPS, Patches, colour_features, in_batches
from oneflare.nn.filter_banks import CELLS, FILTER_OUTPUTS, PAIRED_FILTERS, Bank, FilterBank, PairBank, View
from oneflare.nn.multi_scale_maps import BUDGET_IMAGES, SEED_STRIDE, Seconds, largest, scale_reductions

DEFAULT_FEATURES = 1150
"""the size of `random_conv`"""
MOST_FEATURES = 12_000
"""in one block, beyond which the server's time grows faster than what features bring"""
MOST_IN_BLOCKS = 40_000
"""in all blocks together, beyond which the clients' time does"""
MOST_BLOCKS = 64
SMALL_SIDE = 16
"""pixels below which patches are small ones alone"""
SMALL_KERNEL = 3
OPERATIONS_PER_SECOND = 3.0e10
"""of one core in a convolution and what follows it. A constant, so that every member finds the same map for a budget"""
PAIR_POSITIONS_PER_SECOND = 5.0e8
"""of one core in products of responses"""
PRODUCTS_PER_SECOND = 2.0e10
"""of one core in the sums of products"""


@dataclass(frozen=True)
class Part:
    """A bank before it is built."""

    kind: str
    """filters | pairs"""
    kernel: int
    scale: int
    """0: the image as it is, 1: at half its size"""
    weight: int
    """its share in the features, relative to those of others of its group"""
    contrast: float = 100.0
    """grey levels squared, added to the variance of each patch"""
    group: int = 0
    """parts of another group are in blocks of their own, which the server weighs by themselves"""


PATCHES = {
    "even": (Part("filters", 5, 0, 3), Part("pairs", 5, 0, 3), Part("filters", 5, 1, 2)),
    "small": (
        Part("filters", 5, 0, 8, contrast=1000.0),
        Part("pairs", 5, 0, 5),
        Part("pairs", 5, 0, 5, contrast=1000.0),
        Part("filters", 5, 1, 4, contrast=1000.0),
        Part("filters", 3, 0, 8, contrast=1000.0),
        Part("pairs", 3, 0, 5),
        Part("pairs", 3, 0, 5, contrast=1000.0),
    ),
    "large": (
        Part("filters", 5, 1, 1, contrast=10.0),
        Part("pairs", 5, 1, 1, contrast=10.0),
        Part("filters", 7, 1, 1, contrast=10.0),
    ),
    "both": (
        Part("filters", 5, 0, 1, contrast=1000.0),
        Part("pairs", 5, 0, 1),
        Part("filters", 3, 0, 1, contrast=1000.0),
        Part("pairs", 3, 0, 1),
        Part("filters", 5, 1, 1, contrast=10.0, group=1),
        Part("pairs", 5, 1, 1, contrast=10.0, group=1),
        Part("filters", 7, 1, 1, contrast=10.0, group=1),
    ),
}
"""What the features look at; docs/analytic.md says why. Two banks of pairs have twice the filters to choose from."""


@dataclass(frozen=True)
class Size(Options):
    """How large `paired` is, what it looks at, and how its features are divided."""

    features: int | None = None
    """beside those of colours; by default as many as budget and upload.limit allow, or 1,150 where neither is given"""
    budget: Seconds | None = None
    """time of one core for 10,000 images, by a fixed table: the same map for all members, whatever their machines; with
    no upload.limit beside it, uploads have at most 100 MB"""
    kept: int = 5
    """of the ten outputs of a filter (two signs, five cells), drawn anew for each filter"""
    patches: Literal["small", "large", "both"] | None = None
    """small: of 3 and 5 pixels, and some of 10, for photographs; large: of 10 and 14 pixels, for digits, signs and
    other shapes that fill the image; both: small ones in one half of the blocks and large ones in the other, and the
    server weighs the blocks by what the sums say of them. Default: of 5 and 10 pixels"""
    blocks: int | None = None
    """sum products of two features only where both are in the same of so many blocks; the server solves for each block
    and averages the scores, each by its weight, and for the same upload more features fit. Default: products of all
    features, or where upload.limit decides how many features there are, as many blocks as suit its size"""
    contrast: float | None = None
    """grey levels squared, added to the variance of each patch before its contrast is divided out: patches that
    vary less count for less. Lower where all images are pale. Default: what suits photographs of full contrast, 100,
    1,000 for some of the small patches, and 10 for the large ones"""
    moved: int | None = None
    """features are means over the image and copies of it that are moved by so many pixels along a diagonal; fusion
    analytic.moved does it for the model alone. Default: features of the image"""
    copies: Literal[2, 3] | None = None
    """how many images those means are over, and how many times as long they take: 2 has the image and a copy that is
    moved up and to the right, 3 has one that is moved down and to the left as well (default)"""


LEAST_CONTRAST = 0.01
"""grey levels squared; less would divide by next to nothing where an image is even"""
MOST_MOVED = 4
"""pixels; and not more than an eighth of the image's side"""


@dataclass(frozen=True)
class FittedPart:
    """A part for images of one size."""

    kind: str
    kernel: int
    reduce: int
    """by how much the image is made smaller first"""
    weight: int
    contrast: float
    group: int


def parts_of(size: int, patches: str | None, contrast: float | None = None) -> list[FittedPart]:
    """The banks for images of so many pixels.

    Where the image at half its size would be too small, parts that look at it are left out, or look at the whole image
    if there are no others. On less than 16 pixels patches have two pixels less, but three at least.
    """
    wanted = PATCHES[patches or "even"]
    reductions = scale_reductions(size, 1 + max(part.scale for part in wanted))
    possible = [part for part in wanted if part.scale < len(reductions)]
    found = []
    for part in possible or wanted:
        reduce = reductions[min(part.scale, len(reductions) - 1)]
        small = size // reduce < SMALL_SIDE
        kernel = max(SMALL_KERNEL, part.kernel - 2) if small else part.kernel
        own = part.contrast if contrast is None else contrast
        found.append(FittedPart(part.kind, kernel, reduce, part.weight, own, part.group))
    return found


@FEATURE_MAPS.register("paired")
class Paired:
    """filters on the image and on the image at half its size, and products of neighbouring responses

    phi = (colours, outputs of each bank). By default (`patches: even`) the banks are a `FilterBank` and a `PairBank` of
    the image, and a `FilterBank` of the image at half its size where that leaves at least 12 pixels; three quarters of
    the features see the image as it is.

    Where mirrored images keep their label, phi is the mean of the features of the image and of its mirror image,
    which equals adding all mirrored images at no cost (`RandomConv`).

    With `blocks` the features are dealt to so many blocks at random (`oneflare.nn.blocks`), and stand in their order.
    With `moved` they are means over the image and moved copies of it.
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
        parts: Size = Size(),
    ) -> None:
        if colour_grid < 0 or threshold < 0:
            raise ConfigError("analytic: colour_grid and threshold must not be negative")
        self.shape = PairedShape(channels, size, bool(mirror), min(colour_grid, size), parts)
        self.mirror, self.colour_grid = bool(mirror), min(colour_grid, size)
        self.moved, self.copies = parts.moved, self.shape.copies
        self.banks: list[Bank] = []
        self.kept: list[Tensor] = []
        for place, (part, share) in enumerate(self.shape.shares(self.shape.features)):
            view = View(channels, size, part.kernel, part.reduce, threshold, part.contrast)
            own = seed + place * SEED_STRIDE
            if part.kind == "filters":
                bank = FilterBank(view, members(part, share, parts.kept), own)
                self.kept.append(kept_outputs(bank.filters, parts.kept, own)[:share].sort().values)
                self.banks.append(bank)
            else:
                self.banks.append(PairBank(view, members(part, share, parts.kept), own))
                self.kept.append(torch.arange(share))
        self.dim = self.shape.dim(self.shape.features)
        self.blocks = block_sizes(self.dim, parts.blocks)
        groups = self.shape.groups(self.shape.features)
        self.order = None if len(self.blocks) == 1 else block_order(self.dim, len(self.blocks), groups)
        self.columns = self._ordered(self._kept_columns())
        self.parameters = sum(bank.parameters for bank in self.banks)

    def _kept_columns(self) -> Tensor:
        """`(D,)`: which columns of the colours and all outputs of all banks, in a row, are features"""
        found, start = [torch.arange(self.shape.colours)], self.shape.colours
        for bank, kept in zip(self.banks, self.kept, strict=True):
            found.append(start + kept)
            start += bank.dim
        return torch.cat(found)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        return in_batches(images, self.dim, self._features)

    def traced(self, images: Tensor) -> Tensor:
        """The same features of floats in [0, 1] in one piece, for exporters; rounding may differ."""
        return self._features(images * 255.0)

    def _features(self, x: Tensor) -> Tensor:
        """x: `(n, c, h, w)` in grey levels 0 to 255"""
        if self.moved is None:
            return self._of_image(x)
        total = self._of_image(x).add_(self._of_image(moved_by(x, -self.moved, self.moved)))
        if self.copies > 2:
            total += self._of_image(moved_by(x, self.moved, -self.moved))
        return total.div_(self.copies)

    def _of_image(self, x: Tensor) -> Tensor:
        found = [self._colours(x / 255.0)] if self.colour_grid else []
        sides = [self._outputs(side) for side in ([x, x.flip(-1)] if self.mirror else [x])]
        found.append(sides[0] if len(sides) == 1 else sides[0].add_(sides[1]).mul_(0.5))
        return torch.cat(found, 1)[:, self.columns]

    def _outputs(self, x: Tensor) -> Tensor:
        """All outputs of all banks, bank after bank; banks of one view share what it shows."""
        shown = {view: view.seen(x) for view in {bank.view: None for bank in self.banks}}
        return torch.cat([bank.outputs(shown[bank.view]) for bank in self.banks], 1)

    def _ordered(self, features: Tensor) -> Tensor:
        """features: `(..., D)`, block after block"""
        return features if self.order is None else features[..., self.order]

    def _colours(self, x: Tensor) -> Tensor:
        """Means and deviations of each channel in each square of the grid."""
        mean = F.adaptive_avg_pool2d(x, self.colour_grid)
        deviation = (F.adaptive_avg_pool2d(x * x, self.colour_grid) - mean * mean).clamp_min(0).sqrt()
        maps = torch.cat([mean, deviation], 1)
        if self.mirror:
            maps = (0.5 * (maps + maps.flip(-1)))[..., : (self.colour_grid + 1) // 2]
        return maps.flatten(1)

    def range(self) -> tuple[Tensor, Tensor]:
        colours = torch.ones(self.shape.colours)
        colours[len(colours) // 2 :] = 0.5
        highest = [bank.highest()[kept] for bank, kept in zip(self.banks, self.kept, strict=True)]
        high = self._ordered(torch.cat([colours, *highest]))
        return torch.zeros_like(high), high

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.mirror}/{self.colour_grid}".encode())
        for bank, kept in zip(self.banks, self.kept, strict=True):
            digest.update(bank.fingerprint().encode())
            digest.update(kept.numpy().tobytes())
        if self.order is not None:
            digest.update(repr(self.blocks).encode() + self.order.numpy().tobytes())
        if self.moved is not None:
            digest.update(f"moved by {self.moved}{'' if self.copies == 3 else f', {self.copies} copies'}".encode())
        return digest.hexdigest()


def moved_by(x: Tensor, down: int, right: int) -> Tensor:
    """Images `(n, c, h, w)` moved by so many pixels; what comes in repeats the border."""
    margin = max(abs(down), abs(right))
    height, width = x.shape[-2:]
    wide = F.pad(x, (margin, margin, margin, margin), mode="replicate")
    return wide[..., margin - down : margin - down + height, margin - right : margin - right + width]


def members(part: FittedPart, share: int, kept: int) -> int:
    """The filters or pairs that so many features need."""
    return -(-share // (kept if part.kind == "filters" else CELLS))


def kept_outputs(filters: int, kept: int, seed: int) -> Tensor:
    """Columns of `kept` outputs of each filter among those of a `FilterBank`, filter after filter."""
    generator = torch_generator(seed, "kept outputs")
    drawn = [torch.randperm(FILTER_OUTPUTS, generator=generator)[:kept] * filters + own for own in range(filters)]
    return torch.cat(drawn)


class PairedShape:
    """What such a map measures and costs, without its filters."""

    def __init__(self, channels: int, size: int, mirror: bool, colour_grid: int, parts: Size) -> None:
        if not 1 <= parts.kept <= FILTER_OUTPUTS:
            raise ConfigError(f"analytic.kept: must lie between 1 and {FILTER_OUTPUTS} (got {parts.kept})")
        if parts.blocks is not None and not 1 <= parts.blocks <= MOST_BLOCKS:
            raise ConfigError(f"analytic.blocks: must lie between 1 and {MOST_BLOCKS} (got {parts.blocks})")
        if parts.moved is not None and not 1 <= parts.moved <= min(MOST_MOVED, max(1, size // 8)):
            raise ConfigError(f"analytic.moved: must lie between 1 and {MOST_MOVED} pixels (got {parts.moved})")
        self.channels, self.size, self.mirror, self.kept = channels, size, mirror, parts.kept
        if parts.contrast is not None and not LEAST_CONTRAST <= parts.contrast < math.inf:
            raise ConfigError(f"analytic.contrast: must be a number from {LEAST_CONTRAST:g} (got {parts.contrast})")
        if parts.copies is not None and parts.moved is None:
            raise ConfigError("analytic.copies: says how many moved copies there are; set analytic.moved as well")
        self.copies = 1 if parts.moved is None else parts.copies or 3
        self.blocks = parts.blocks or 1
        self.most = min(MOST_FEATURES * self.blocks, MOST_IN_BLOCKS)
        self.colours = colour_features(channels, colour_grid, mirror)
        self.parts = parts_of(size, parts.patches, parts.contrast)
        self.grouped = self.blocks > 1 and len({part.group for part in self.parts}) > 1
        self.least = max(len(self.parts), self.blocks)
        if self.grouped:
            self.least = 2 * (self.colours + self.least)
        self.features = self._number(parts)

    def _number(self, parts: Size) -> int:
        if parts.features is not None:
            if not self.least <= parts.features <= self.most:
                raise ConfigError(
                    f"analytic.features: must lie between {self.least} and {self.most} (got {parts.features})"
                )
            return parts.features
        if parts.budget is None:
            return DEFAULT_FEATURES
        budget = parts.budget
        fitting = largest(lambda features: self.seconds(features) <= budget, self.least, self.most)
        if fitting is None:
            raise ConfigError(
                f"analytic.budget: {parts.budget:g} s are too few for 10,000 images of {self.size} pixels; the "
                f"smallest map takes {self.seconds(self.least):.2g} s"
            )
        return fitting

    def groups(self, features: int) -> list[int]:
        """How many features there are in the blocks of each group, the colours among those of the first."""
        dim = self.dim(features)
        if not self.grouped:
            return [dim]
        first = sum(block_sizes(dim, self.blocks)[: (self.blocks + 1) // 2])
        return [first, dim - first]

    def shares(self, features: int) -> list[tuple[FittedPart, int]]:
        """The features of each bank by its weight in its group, at least one; a group's first takes what is left."""
        numbers = self.groups(features)
        numbers[0] -= self.colours
        found = []
        for group, number in enumerate(numbers):
            parts = [part for part in self.parts if part.group == group or not self.grouped]
            spare, whole = number - len(parts), sum(part.weight for part in parts)
            each = [1 + spare * part.weight // whole for part in parts]
            each[0] += number - sum(each)
            found += list(zip(parts, each, strict=True))
        return found

    def dim(self, features: int) -> int:
        return self.colours + features

    def seconds(self, features: int) -> float:
        """Of one core for 10,000 images, by the table above: convolutions, products of responses, sums of products."""
        operations, positions = 0.0, 0.0
        both = 2 if self.mirror else 1
        for part, share in self.shares(features):
            side = self.size // part.reduce - part.kernel + 1
            number = members(part, share, self.kept)
            filters = number if part.kind == "filters" else PAIRED_FILTERS
            operations += 2 * both * filters * self.channels * part.kernel**2 * side**2
            positions += 0 if part.kind == "filters" else both * number * side**2
        each = operations / OPERATIONS_PER_SECOND + positions / PAIR_POSITIONS_PER_SECOND
        each *= self.copies
        return BUDGET_IMAGES * (each + self.dim(features) ** 2 / self.blocks / PRODUCTS_PER_SECOND)


def fitted(spec: Mapping[str, Any], channels: int, size: int, fits: Callable[[int], bool]) -> dict[str, Any]:
    """The complete spec of a `paired` map with its number of features decided: the most that fit.

    fits: whether so many features do. A number that is given must fit; a budget is kept as well.
    """
    options = {field.name: spec[field.name] for field in fields(Size) if field.name in spec}
    shape = PairedShape(channels, size, bool(spec["mirror"]), min(spec["colour_grid"], size), Size(**options))
    given = spec["features"] is not None
    most = shape.features if given or spec["budget"] is not None else shape.most
    found = largest(lambda features: fits(shape.dim(features)), shape.least, most)
    if found is None:
        raise ConfigError(f"upload.limit: even the smallest map, of {shape.dim(shape.least)} features, does not fit")
    if given and found < most:
        raise ConfigError(f"upload.limit: {most} features do not fit; leave analytic.features out, or set {found}")
    return {**spec, "features": found, "budget": None}
