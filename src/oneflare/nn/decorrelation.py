"""A linear change of features after which those of most images hardly correlate, known without anybody's images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.core.threads import in_threads
from oneflare.nn.blocks import blocks_of
from oneflare.nn.feature_maps import FeatureMap
from oneflare.nn.synthetic_pictures import dead_leaves

PICTURES = 1536
"""synthetic pictures whose features are looked at"""
BLOCK = 512
"""features that are decorrelated together; what correlates across blocks stays"""
AT_A_TIME = 128


@dataclass(frozen=True)
class Decorrelation:
    """z = A phi with a block-diagonal A, which is (K + r)^-1/2 diag(1/s) in each block.

    s and K are the deviations and correlations of the features of synthetic pictures. What is spread evenly over z is
    spread in phi like the features themselves with a ridge r: evenly where it matters to a ridge regression.
    """

    forward: tuple[Tensor, ...]
    """the blocks `(B, B)` of A, float32"""
    backward: tuple[Tensor, ...]
    """their inverses"""

    @classmethod
    def of(cls, features: FeatureMap, channels: int, size: int, ridge: float) -> Decorrelation:
        """From the pictures that this size has; the same for all members up to the rounding of their processors.

        Features of different blocks of the map (`oneflare.nn.blocks`) are never in one block of A.
        """
        pictures = dead_leaves(PICTURES, channels, size)
        phi = torch.cat(in_threads(features, pictures.split(AT_A_TIME))).double()
        parts = [part for block in phi.split(blocks_of(features), 1) for part in block.split(BLOCK, 1)]
        pairs = in_threads(lambda part: _roots(part, ridge), parts)
        return cls(tuple(there for there, _ in pairs), tuple(back for _, back in pairs))

    def apart(self, sizes: Sequence[int]) -> list[Decorrelation]:
        """The changes of features within each block of the map, of these sizes."""
        found, at = [], 0
        for size in sizes:
            start, length = at, 0
            while length < size:
                length += len(self.forward[at])
                at += 1
            found.append(Decorrelation(self.forward[start:at], self.backward[start:at]))
        return found

    def changed(self, phi: Tensor) -> Tensor:
        """z `(n, D)` of features `(n, D)`, in their precision"""
        parts = zip(self.forward, phi.split([len(block) for block in self.forward], 1), strict=True)
        return torch.cat([part @ block.to(phi).T for block, part in parts], 1)

    def original(self, z: Tensor) -> Tensor:
        """phi `(n, D)` of z `(n, D)`"""
        parts = zip(self.backward, z.split([len(block) for block in self.backward], 1), strict=True)
        return torch.cat([part @ block.to(z).T for block, part in parts], 1)

    def range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Between which numbers z lies where each phi lies between low and high, all `(D,)`."""
        middle, half = (low + high) / 2, (high - low) / 2
        centre = self.changed(middle[None])[0]
        sizes = [len(block) for block in self.forward]
        reach = torch.cat(
            [block.to(half).abs() @ part for block, part in zip(self.forward, half.split(sizes), strict=True)]
        )
        return centre - reach, centre + reach

    def weights(self, of_z: Tensor) -> Tensor:
        """A^T W `(D, C)`: the weights of phi that give the scores of weights W of z"""
        parts = zip(self.forward, of_z.split([len(block) for block in self.forward]), strict=True)
        return torch.cat([block.to(of_z).T @ part for block, part in parts])

    def decorrelate(self, products: Tensor) -> Tensor:
        """A S A^T `(D, D)` float32 of sums of products S of phi, of which the upper triangle counts"""
        return _congruent(self.forward, products)

    def restore(self, products: Tensor) -> Tensor:
        """S of `decorrelate`, float32"""
        return _congruent(self.backward, products)


def _roots(phi: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """(K + r)^-1/2 diag(1/s) and its inverse, of features `(n, B)`"""
    deviation = phi.std(0)
    deviation = torch.where(deviation > 1e-6 * deviation.max(), deviation, torch.ones(()))
    unit = (phi - phi.mean(0)) / deviation
    values, vectors = torch.linalg.eigh(unit.T @ unit / len(unit))
    root = (values.clamp(min=0) + ridge).sqrt()
    there = (vectors / root) @ vectors.T / deviation
    back = deviation[:, None] * ((vectors * root) @ vectors.T)
    return there.float(), back.float()


def _congruent(blocks: tuple[Tensor, ...], products: Tensor) -> Tensor:
    """A S A^T of a symmetric S, whose upper triangle is read: block by block, and those below from those above"""
    found = torch.empty(products.shape, dtype=torch.float32)
    start = 0
    for place, block in enumerate(blocks):
        end = start + len(block)
        rows = products[start:end, start:].float()
        rows[:, : len(block)] = rows[:, : len(block)].triu() + rows[:, : len(block)].triu(1).T
        rows = block @ rows
        at = start
        for other, part in zip(blocks[place:], rows.split([len(other) for other in blocks[place:]], 1), strict=True):
            torch.mm(part, other.T, out=found[start:end, at : at + len(other)])
            at += len(other)
        found[end:, start:end] = found[start:end, end:].T
        start = end
    return found
