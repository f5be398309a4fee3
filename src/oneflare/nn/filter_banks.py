"""Banks of fixed features of an image: thresholded responses of filters, and products of two such responses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.nn.feature_maps import ALIGNED_ROWS, block_length, soft_cells
from oneflare.nn.synthetic_filters import WEIGHT_GRID, synthetic_filters

CELLS = 5
FILTER_OUTPUTS = 2 * CELLS
"""of a filter: two signs in five cells"""
FILTERS_AT_A_TIME = 64
"""responses of so many filters stay in the processor's cache"""
PAIRED_FILTERS = 64
"""filters whose responses are multiplied"""
LEAST_PAIRED = 5
"""positions along a side from which on neighbours are multiplied as well, and not one position with itself alone"""
POSITIONS = 12
"""a side along which responses are averaged down, before they are averaged over cells, has at least so many"""


Seen = tuple[Tensor, Tensor]
"""images as a `View` shows them: without their means, and 1/sqrt(var + eps) of each patch `(n, 1, h', w')`"""


class Bank(Protocol):
    """A part of a feature map."""

    dim: int
    parameters: int
    view: View

    def outputs(self, seen: Seen) -> Tensor:
        """seen: images through the bank's view -> `(n, dim)`"""

    def highest(self) -> Tensor:
        """`(dim,)`: what each output never exceeds; none is negative"""

    def fingerprint(self) -> str:
        """Digest of everything the outputs depend on."""


@dataclass(frozen=True)
class View:
    """How filters look at an image."""

    channels: int
    size: int
    """pixels of the image's side"""
    kernel: int
    """side of a patch"""
    reduce: int
    """by how much the image is made smaller first"""
    threshold: float
    """below which a response counts as none"""
    eps: float
    """grey levels squared, added to the variance of a patch: one that varies much less counts for little"""

    def seen(self, x: Tensor) -> Seen:
        """x: `(n, c, h, w)` in grey levels 0 to 255"""
        return contrast(F.avg_pool2d(x, self.reduce) if self.reduce > 1 else x, self.kernel, self.eps)


def contrast(x: Tensor, kernel: int, eps: float) -> Seen:
    """The image without its mean, and 1/sqrt(var + eps) of each patch `(n, 1, h', w')`."""
    x = x - x.mean((1, 2, 3), keepdim=True)  # filters ignore it; better rounding
    mean = F.avg_pool2d(x.mean(1, keepdim=True), kernel, 1)
    square = F.avg_pool2d((x * x).mean(1, keepdim=True), kernel, 1)
    inverse = ((square - mean * mean).clamp_min(0) + eps).rsqrt()
    return x.contiguous(memory_format=torch.channels_last), inverse


class FilterBank:
    """Responses of whitened synthetic patches of one size, to the image at one scale.

    r = W x / sqrt(var(x) + eps) for each patch x; relu(r - t) and relu(-r - t), averaged over five soft cells, square
    root. Outputs are in the order (sign, cell, filter).
    """

    def __init__(self, view: View, filters: int, seed: int) -> None:
        self.view = view
        drawn = synthetic_filters(filters, view.channels, view.kernel, seed)
        self.parts = [part.contiguous(memory_format=torch.channels_last) for part in drawn.split(FILTERS_AT_A_TIME)]
        self.filters, self.dim, self.parameters = filters, FILTER_OUTPUTS * filters, drawn.numel()
        length = view.size // view.reduce - view.kernel + 1
        self.pool = block_length(length, POSITIONS)
        self.side = length // self.pool
        self.cells = soft_cells(self.side).flatten(1)

    def responses(self, seen: Seen) -> Iterator[tuple[Tensor, Tensor]]:
        """relu(r - t) and relu(-r - t), both `(n, f, side, side)` and averaged down, part after part of the filters"""
        threshold, (x, inverse) = self.view.threshold, seen
        for part in self.parts:
            response = F.conv2d(x, part).mul_(inverse)
            above = self._averaged(response.clamp_min(threshold))
            below = self._averaged(response.clamp_max_(-threshold))
            yield above.sub_(threshold).clamp_min_(0), below.add_(threshold).neg_().clamp_min_(0)

    def _averaged(self, maps: Tensor) -> Tensor:
        return maps if self.pool == 1 else F.avg_pool2d(maps, self.pool)

    def outputs(self, seen: Seen) -> Tensor:
        found = [torch.stack([self._cell_means(sign) for sign in both], 1) for both in self.responses(seen)]
        return torch.cat(found, 3).sqrt_().flatten(1)

    def _cell_means(self, maps: Tensor) -> Tensor:
        """Averages over cells: `(n, f, side, side)` in channels-last order -> `(n, 5, f)`.

        One product per image, of the same size for every image, so that each is rounded alike whatever is beside it.
        """
        return torch.bmm(self.cells.expand(maps.shape[0], -1, -1), maps.permute(0, 2, 3, 1).flatten(1, 2))

    def largest_responses(self) -> Tensor:
        """`(filters,)`, less the threshold.

        A filter w meets a patch x of K values with |x - mean| = sqrt(K var), so its response is at most |w| sqrt(K),
        plus what rounding left of the filter's own mean times the largest mean over sqrt(eps).
        """
        rows = torch.cat(self.parts).flatten(1)
        mean_part = rows.sum(1).abs() * 255.0 / math.sqrt(self.view.eps)
        largest: Tensor = rows.norm(dim=1) * math.sqrt(rows.shape[1]) + mean_part - self.view.threshold
        return largest.clamp(min=0)

    def highest(self) -> Tensor:
        return self.largest_responses().sqrt().repeat(FILTER_OUTPUTS)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.view, self.side)).encode())
        whole = (torch.cat(self.parts).contiguous() * WEIGHT_GRID).round().to(torch.int32)
        digest.update(whole.numpy().tobytes())
        return digest.hexdigest()


def _runs(places: Tensor) -> Iterator[tuple[int, int, int]]:
    """Each value of a sorted row of numbers, where it begins, and how often it occurs."""
    values, lengths = places.unique_consecutive(return_counts=True)
    starts = lengths.cumsum(0) - lengths
    yield from zip(values.tolist(), starts.tolist(), lengths.tolist(), strict=True)


class PairBank:
    """Products of two responses near each other: whether two patterns occur together.

    With m = sqrt(relu(+-r - t)) of the responses r of few filters, averaged down, sqrt(mean of m_i(p) m_j(p + d)) over
    five soft cells. i, j and the neighbour d among nine are drawn from the seed. Such products of degree two are what
    the second layer of a convolutional kernel adds to the first (Bietti 2022), and they cost no convolution.
    Outputs are in the order (pair, cell); pairs are ordered by d.
    """

    def __init__(self, view: View, pairs: int, seed: int) -> None:
        self.view, self.base = view, FilterBank(view, PAIRED_FILTERS, seed)
        self.pairs, self.dim, self.parameters = pairs, CELLS * pairs, self.base.parameters
        self.reach = 1 if self.base.side >= LEAST_PAIRED else 0
        width = 2 * self.reach + 1
        generator = torch_generator(seed, "pairs")
        self.first, self.second = torch.randint(0, 2 * PAIRED_FILTERS, (2, pairs), generator=generator)
        self.places = torch.arange(pairs) * width**2 // pairs
        self.filled = F.pad(self.first, (0, -pairs % ALIGNED_ROWS))
        self.groups = [
            (divmod(place, width), own, own + length, self.second[own : own + length])
            for place, own, length in _runs(self.places)
        ]
        self.cells, self.positions = self._cells()

    def _cells(self) -> tuple[Tensor, int]:
        """The cells `(positions, 5)` of the middle of a map, and how many positions in a row it takes.

        Rows of the middle are as long as those of the whole map, so that the middle and each of its neighbours are a
        piece of the map as it lies in memory; the positions between two rows have no weight.
        """
        side = self.base.side - 2 * self.reach
        positions = side * self.base.side - 2 * self.reach
        cells = F.pad(soft_cells(side), (0, 2 * self.reach)).flatten(1)
        return cells[:, :positions].T.contiguous(), positions

    def outputs(self, seen: Seen) -> Tensor:
        maps = torch.cat([torch.cat(both, 1) for both in zip(*self.base.responses(seen), strict=True)], 1)
        maps = maps.contiguous(memory_format=torch.contiguous_format).flatten(2).sqrt_()
        products = self._piece(maps, self.reach, self.reach).index_select(1, self.filled)
        for (top, left), start, end, second in self.groups:
            products[:, start:end].mul_(self._piece(maps, top, left).index_select(1, second))
        means = torch.bmm(products, self.cells.expand(products.shape[0], -1, -1))
        return means[:, : self.pairs].flatten(1).sqrt_()

    def _piece(self, maps: Tensor, top: int, left: int) -> Tensor:
        """The positions from this one on, `(n, 2 f, positions)`"""
        start = top * self.base.side + left
        return maps[:, :, start : start + self.positions]

    def highest(self) -> Tensor:
        largest = self.base.largest_responses().repeat(2).sqrt()
        return (largest[self.first] * largest[self.second]).sqrt().repeat_interleave(CELLS)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.base.fingerprint().encode())
        for drawn in (self.first, self.second, self.places):
            digest.update(drawn.numpy().tobytes())
        return digest.hexdigest()
