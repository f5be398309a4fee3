"""Feature maps: fixed functions of an image that every client and the server build from a seed alone.

No image, public data or trained weight is involved, so statistics of the features add up over clients whatever the
split (`oneflare.client.statistics`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.registry import Options, Registry
from oneflare.errors import ConfigError
from oneflare.nn.network import signed_root
from oneflare.nn.synthetic_filters import WEIGHT_GRID, synthetic_filters

CONTRAST_EPS = 10.0
"""added to a patch's variance, in grey levels squared"""
CELL_SOFTNESS = 0.08
CENTRE_WIDTH = 0.06
BATCH = 8
"""images at a time: activations stay in the processor's cache, and every call has the same shape"""
FILTER_BLOCK = 64
ALIGNED_ROWS = 16
"""Rows of a matrix product come in multiples of this, so that every image's part begins on a cache line."""


class FeatureMap(Protocol):
    """Images `(n, c, h, w)`, uint8 or floats in [0, 1] -> features `(n, D)` float32.

    On one machine an image's features are the same bit for bit whichever images are beside it. Processors round
    differently: between two machines the features agree to about 1e-6 of their size.
    """

    dim: int
    parameters: int

    def __call__(self, images: Tensor) -> Tensor: ...

    def fingerprint(self) -> str:
        """Digest of everything the features depend on; client and server compare it."""


def feature_range(features: FeatureMap) -> tuple[Tensor, Tensor]:
    """Least and largest value `(D,)` of each feature for any image whatever, float64.

    A map says so itself in a method `range`; of one that does not, nothing is assumed.
    """
    stated = getattr(features, "range", None)
    if stated is None:
        limit = torch.full((features.dim,), math.inf, dtype=torch.float64)
        return -limit, limit
    low, high = stated()
    return low.double(), high.double()


FEATURE_MAPS: Registry[FeatureMap | None] = Registry("feature map")


def build_feature_map(spec: Mapping[str, Any], channels: int, size: int, bound: float | None = None) -> FeatureMap:
    made = FEATURE_MAPS.build(spec, channels, size)
    if made is None:
        raise ConfigError("analytic=none has no features; set analytic=random_conv")
    return made if bound is None else Bounded(made, bound)


class Bounded:
    """Features of norm at most `bound`: x = phi - mean(phi), shortened where it is longer.

    The mean over an image's own features is most of their length and says little; without it the same noise hides
    less (`oneflare.core.privacy`).
    """

    def __init__(self, features: FeatureMap, bound: float) -> None:
        self.features = features
        self.bound = bound
        self.dim, self.parameters = features.dim, features.parameters

    def __call__(self, images: Tensor) -> Tensor:
        return self.shorten(self.features(images))

    def shorten(self, phi: Tensor) -> Tensor:
        """phi: `(n, D)`, overwritten"""
        phi -= phi.mean(1, keepdim=True)
        shortened: Tensor = phi * (self.bound / phi.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1)
        return shortened

    def range(self) -> tuple[Tensor, Tensor]:
        limit = torch.full((self.dim,), self.bound)
        return -limit, limit

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.features.fingerprint()}/{self.bound}".encode()).hexdigest()


@FEATURE_MAPS.register("none")
def none(channels: int, size: int) -> None:
    """no statistics"""
    del channels, size


@FEATURE_MAPS.register("identity")
class Identity:
    """a backbone's features as they are"""

    name = "identity"

    def __init__(self, channels: int, size: int) -> None:
        if size != 1:
            raise ConfigError(
                f"analytic={self.name} takes the features of a backbone; set backbone, or analytic=random_conv"
            )
        self.dim, self.parameters = channels, 0

    def __call__(self, images: Tensor) -> Tensor:
        """Features `(n, D, 1, 1)` -> `(n, D)`, a copy."""
        return images.flatten(1).float().clone()

    def traced(self, images: Tensor) -> Tensor:
        """The same for ONNX."""
        return images.flatten(1)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.name}/{self.dim}".encode()).hexdigest()


@FEATURE_MAPS.register("root")
class Root(Identity):
    """the signed square root of each of a backbone's features; behind a ReLU the roots are nearer to Gaussian"""

    name = "root"

    def __call__(self, images: Tensor) -> Tensor:
        return signed_root(super().__call__(images))

    def traced(self, images: Tensor) -> Tensor:
        return signed_root(super().traced(images))


@dataclass(frozen=True)
class Patches(Options):
    """Which patches of an image `random_conv` compares with its filters."""

    kernel: int | None = None
    """side of a patch; by default 3 in small images, else 5"""
    reduce: int | None = None
    """the image is first made smaller by this factor; by default to 32 pixels where that fits"""
    threshold: float = 0.35
    """below which a response counts as none"""
    seed: int = 0
    """of the filters"""
    shifted: bool = False
    """whether features are means over several windows that cut a little off the image, instead of the whole image"""


def in_batches(images: Tensor, dim: int, features: Callable[[Tensor], Tensor]) -> Tensor:
    """Features `(n, dim)` of images, uint8 or floats in [0, 1], in batches that all have the same size.

    features: of `(BATCH, c, h, w)` in grey levels 0 to 255
    """
    scale = 1.0 if images.dtype == torch.uint8 else 255.0
    result = torch.empty(len(images), dim)
    for start in range(0, len(images), BATCH):
        part = images[start : start + BATCH].float() * scale
        number = len(part)
        if number < BATCH:  # always the same shape, hence the same rounding for the same image
            part = torch.cat([part, part[-1:].expand(BATCH - number, -1, -1, -1)])
        result[start : start + number] = features(part)[:number]
    return result


@FEATURE_MAPS.register("random_conv")
class RandomConv:
    """one convolution with whitened synthetic patches, thresholds, five soft cells, square root

    r = W x / sqrt(var(x) + eps) per patch; relu(r - t) and relu(-r - t), averaged over four soft quadrants and the
    centre, square root; beside them means and deviations of the colours on a coarse grid.

    Mirror symmetry: the bank is closed under left-right mirroring and so are the cells, so the features of a mirrored
    image are a permutation Q of the image's. Statistics of images *and* their mirror images are block diagonal in
    (phi + Q phi)/2 and (phi - Q phi)/2, and labels do not depend on the second half. Keeping only the first is
    therefore the same as mirror augmentation, with half the dimension and a quarter of the upload.
    """

    def __init__(
        self,
        channels: int,
        size: int,
        *,
        filters: int = 115,
        mirror: bool | None = None,
        colour_grid: int = 4,
        patches: Patches = Patches(),
    ) -> None:
        self.channels, self.size = channels, size
        self.threshold = patches.threshold
        self.mirror = bool(mirror)
        self.reduce = patches.reduce if patches.reduce is not None else default_reduction(size)
        self.kernel = patches.kernel if patches.kernel is not None else (3 if size // self.reduce < 16 else 5)
        self.colour_grid = min(colour_grid, size)
        if not 1 <= filters <= 4096:
            raise ConfigError(f"analytic.filters: must lie between 1 and 4096 (got {filters})")
        if self.reduce < 1 or size % self.reduce or not 1 <= self.kernel < size // self.reduce:
            raise ConfigError(
                f"analytic: kernel={self.kernel} and reduce={self.reduce} do not fit images of {size} pixels"
            )
        if colour_grid < 0 or self.threshold < 0:
            raise ConfigError("analytic: colour_grid and threshold must not be negative")
        free = synthetic_filters(filters, channels, self.kernel, patches.seed)
        self.banks = []
        for part in free.split(FILTER_BLOCK):
            bank = torch.cat([part, part.flip(-1)]) if self.mirror else part
            self.banks.append(bank.contiguous(memory_format=torch.channels_last))
        side = size // self.reduce - self.kernel + 1
        self.pool = block_length(side, 12 if patches.shifted else 7)
        self.windows = _windows(side // self.pool) if patches.shifted else [(0, 0)]
        cells = windowed_cells(side // self.pool, self.windows)
        self.cells = cells.flatten(1).T.contiguous()  # (positions, 5 windows)
        self.mirrored_cells = cells.flip(-1).flatten(1).T.contiguous()
        self.dim = 10 * filters + colour_features(channels, self.colour_grid, self.mirror)
        self.parameters = free.numel()

    def fingerprint(self) -> str:
        settings = (self.channels, self.size, self.threshold, self.mirror, self.reduce, self.kernel, self.colour_grid)
        windows = repr(self.windows) if len(self.windows) > 1 else ""
        digest = hashlib.sha256((repr(settings) + windows).encode())
        for bank in self.banks:
            digest.update((bank.contiguous() * WEIGHT_GRID).round().to(torch.int32).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        return in_batches(images, self.dim, self._features)

    def range(self) -> tuple[Tensor, Tensor]:
        """Bounds of every feature, in the order of `_features`.

        A filter w meets a patch x of K = c k k values with |x - mean| = sqrt(K var), so its response is at most
        |w| sqrt(K) plus what rounding left of the filter's own mean times the largest mean over sqrt(eps). Averages
        stay below the largest response, and so do square roots of them below its square root.
        """
        size = self.channels * self.kernel**2
        highs = []
        if self.colour_grid:
            each = colour_features(self.channels, self.colour_grid, self.mirror) // 2
            highs.append(torch.cat([torch.ones(each), torch.full((each,), 0.5)]))
        for bank in self.banks:
            rows = bank.flatten(1)[: len(bank) // 2] if self.mirror else bank.flatten(1)
            mean_part = rows.sum(1).abs() * 255.0 / math.sqrt(CONTRAST_EPS)
            response = (rows.norm(dim=1) * math.sqrt(size) + mean_part - self.threshold).clamp(min=0).sqrt()
            highs.append(response.repeat(2).repeat_interleave(5))
        high = torch.cat(highs)
        return torch.zeros_like(high), high

    def traced(self, images: Tensor) -> Tensor:
        """The same features of floats in [0, 1] in one piece, for exporters; rounding may differ."""
        return self._features(images * 255.0)

    def _features(self, x: Tensor) -> Tensor:
        """x: `(BATCH, c, h, w)` in grey levels 0 to 255"""
        parts = [self._colours(x)] if self.colour_grid else []
        if self.reduce > 1:
            x = F.avg_pool2d(x, self.reduce)
        x = x - x.mean((1, 2, 3), keepdim=True)  # filters ignore it; better rounding
        mean = F.avg_pool2d(x.mean(1, keepdim=True), self.kernel, 1)
        square = F.avg_pool2d((x * x).mean(1, keepdim=True), self.kernel, 1)
        inverse = ((square - mean * mean).clamp_min(0) + CONTRAST_EPS).rsqrt()
        x = x.contiguous(memory_format=torch.channels_last)
        for bank in self.banks:
            response = F.conv2d(x, bank).mul_(inverse)
            positive = F.avg_pool2d(response.clamp_min(self.threshold), self.pool)
            negative = F.avg_pool2d(response.neg_().clamp_min_(self.threshold), self.pool)
            maps = torch.stack([positive, negative], 1).contiguous().flatten(3) - self.threshold
            maps.clamp_min_(0)
            if self.mirror:
                half = maps.shape[2] // 2
                pooled = self._roots(maps[:, :, :half], self.cells)
                pooled += self._roots(maps[:, :, half:], self.mirrored_cells)
                pooled *= 0.5
            else:
                pooled = self._roots(maps, self.cells)
            parts.append(pooled)
        return torch.cat(parts, 1)

    def _roots(self, maps: Tensor, cells: Tensor) -> Tensor:
        """The square root of every cell's average, averaged over the windows: -> `(n, 10 filters)`"""
        roots = _pool(maps, cells).sqrt_()
        number = len(self.windows)
        return roots if number == 1 else roots.unflatten(1, (-1, number, 5)).mean(2).flatten(1)

    def _colours(self, x: Tensor) -> Tensor:
        """Means and deviations of each channel in each square of the grid, averaged over the windows."""
        x = x / 255.0
        if len(self.windows) == 1:
            return self._grid(x, None)
        step = self.pool * self.reduce
        side = self.size - step * max(top for top, _ in self.windows)
        parts = [
            self._grid(x[..., step * t : step * t + side, step * u : step * u + side], side) for t, u in self.windows
        ]
        return torch.stack(parts).mean(0)

    def _grid(self, x: Tensor, side: int | None) -> Tensor:
        mean = grid_means(x, side, self.colour_grid)
        deviation = (grid_means(x * x, side, self.colour_grid) - mean * mean).clamp_min(0).sqrt()
        maps = torch.cat([mean, deviation], 1)
        if self.mirror:
            maps = (0.5 * (maps + maps.flip(-1)))[..., : (self.colour_grid + 1) // 2]
        return maps.flatten(1)


def _pool(maps: Tensor, cells: Tensor) -> Tensor:
    """Averages over cells: maps `(n, 2, filters, positions)`, cells `(positions, k)` -> `(n, 2 k filters)`."""
    return averages(maps.flatten(1, 2), cells).flatten(1)


def averages(rows: Tensor, cells: Tensor) -> Tensor:
    """Averages over cells: rows `(n, r, positions)`, cells `(positions, k)` -> `(n, r, k)`.

    A matrix product rounds a row by where the row lies in its block, and a block by where it begins in memory. One
    product per image, with its rows filled up to whole cache lines, makes both the same for every image of a batch.
    """
    filled = F.pad(rows, (0, 0, 0, -rows.shape[1] % ALIGNED_ROWS))
    return torch.bmm(filled, cells.expand(rows.shape[0], -1, -1))[:, : rows.shape[1]]


def colour_features(channels: int, grid: int, mirror: bool) -> int:
    """How many means and deviations of colours there are on a grid; of mirrored squares one counts."""
    return 2 * channels * grid * ((grid + 1) // 2 if mirror else grid)


def default_reduction(size: int) -> int:
    """Images of 64 pixels are averaged down to 32: six times faster for half a point."""
    reduction = max(1, size // 32)
    while size % reduction:
        reduction -= 1
    return reduction


def block_length(length: int, cells: int = 7) -> int:
    """Largest divisor of length not above ceil(length / cells): the first pooling step."""
    return max(block for block in range(1, math.ceil(length / cells) + 1) if length % block == 0)


def grid_means(x: Tensor, side: int | None, grid: int) -> Tensor:
    """Means over the squares of a grid, as `adaptive_avg_pool2d` has them.

    Where the side is given and squares overlap, they are a product of matrices, which ONNX knows.
    """
    if side is None or side % grid == 0:
        return F.adaptive_avg_pool2d(x, grid)
    rows = torch.zeros(grid, side)
    for row in range(grid):
        rows[row, row * side // grid : -(-(row + 1) * side // grid)] = 1.0
    rows /= rows.sum(1, keepdim=True)
    return rows @ x @ rows.T


def _windows(side: int) -> list[tuple[int, int]]:
    """Where windows begin that leave out two rows and columns of at least ten, or one of at least five."""
    most = 2 if side >= 10 else 1 if side >= 5 else 0
    return [(top, left) for top in range(most + 1) for left in range(most + 1)]


def windowed_cells(side: int, windows: Sequence[tuple[int, int]]) -> Tensor:
    """`(5 windows, side, side)`: the soft cells of each window, window after window."""
    width = side - max(top for top, _ in windows)
    cells, parts = soft_cells(width), []
    for top, left in windows:
        part = torch.zeros(len(cells), side, side)
        part[:, top : top + width, left : left + width] = cells
        parts.append(part)
    return torch.cat(parts)


def soft_cells(side: int) -> Tensor:
    """`(5, side, side)` averaging weights: four soft quadrants and the centre."""
    axis = (torch.arange(side, dtype=torch.float64) + 0.5) / side - 0.5
    y, x = axis[:, None], axis[None]
    top, left = torch.sigmoid(-y / CELL_SOFTNESS), torch.sigmoid(-x / CELL_SOFTNESS)
    centre = torch.exp(-(x * x + y * y) / CENTRE_WIDTH)
    cells = torch.stack([top * left, top * (1 - left), (1 - top) * left, (1 - top) * (1 - left), centre])
    return (cells / cells.sum((1, 2), keepdim=True)).float()
