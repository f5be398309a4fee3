"""Blocks of features: products of two features are summed where both are in one block, and nowhere else.

A map of D features in K equal blocks has D^2 / (2 K) such products, so that for the same upload sqrt(K) times as many
features fit. Each block gives a classifier of its own, and the answer is a weighed mean of theirs: a committee.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.nn.feature_maps import Bounded, FeatureMap


def block_sizes(dim: int, blocks: int | None) -> tuple[int, ...]:
    """How many of D features are in each block, as equal as can be; one block where none are asked for."""
    number = blocks or 1
    return tuple(dim // number + (block < dim % number) for block in range(number))


def block_order(dim: int, blocks: int, groups: Sequence[int] | None = None) -> Tensor:
    """`(D,)`: which features stand in which order, so that block follows block.

    Features are dealt to the blocks at random, the same for everybody, so that every block holds some of each kind;
    within a block they keep their order.

    groups: how many features, one group after the other, are dealt among the next blocks alone, which they must fill
    """
    sizes = list(block_sizes(dim, blocks))
    generator = torch_generator(0, "blocks", dim, blocks)
    found: list[Tensor] = []
    start = 0
    for length in groups or [dim]:
        own: list[int] = []
        while sum(own) < length:
            own.append(sizes.pop(0))
        dealt = start + torch.randperm(length, generator=generator)
        found += [part.sort().values for part in dealt.split(own)]
        start += length
    return torch.cat(found)


def blocks_of(features: FeatureMap) -> tuple[int, ...]:
    """The sizes of the blocks in which a map gives its features; a map that does not say so has one."""
    inner = features.features if isinstance(features, Bounded) else features
    stated: tuple[int, ...] = getattr(inner, "blocks", (inner.dim,))
    return stated
