"""Packed statistics whose products are summed within blocks of features alone (`oneflare.nn.blocks`).

Sums and counts of classes are sent as ever. Of block k there are `scatter.k` and, where it is rounded to deviations,
`scatter.k#scale`; each block by itself is what statistics of one block are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, cat

from oneflare.errors import ConfigError
from oneflare.nn import FeatureMap
from oneflare.nn.blocks import blocks_of
from oneflare.upload.limits import FeatureLimits

SCATTER, SUMS, COUNTS, SCALE = "scatter", "sums", "counts", "#scale"
OWN = (SCATTER, SCATTER + SCALE)
"""tensors of which each block has its own"""


def checked_blocks(features: FeatureMap, plain: bool) -> tuple[int, ...]:
    """The sizes of a map's blocks; several are refused where sums are not plain ones over all classes."""
    sizes = blocks_of(features)
    if len(sizes) > 1 and not plain:
        raise ConfigError(
            "analytic.blocks: is for sums of products over all classes without noise; leave it out where statistics "
            "are noised, or hold class_covariances or mixtures"
        )
    return sizes


def limits_apart(limits: FeatureLimits, sizes: Sequence[int]) -> list[FeatureLimits]:
    """The limits of the features of each block, of these sizes."""
    both = zip(limits.low.split(list(sizes)), limits.high.split(list(sizes)), strict=True)
    return [replace(limits, low=low, high=high) for low, high in both]


def block_name(name: str, block: int) -> str:
    """What a tensor of `OWN` is called where there are several blocks."""
    return name.replace(SCATTER, f"{SCATTER}.{block}", 1)


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The packed statistics of all blocks in one; of a single block they are as they were."""
    if len(parts) == 1:
        return dict(parts[0])
    found = {SUMS: cat([part[SUMS] for part in parts], 1), COUNTS: parts[0][COUNTS]}
    for block, part in enumerate(parts):
        found |= {block_name(name, block): part[name] for name in OWN if name in part}
    return found


def apart(packed: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """The packed statistics of each block, of these sizes."""
    if len(sizes) == 1:
        return [dict(packed)]
    found: list[dict[str, Tensor]] = []
    for block, sums in enumerate(packed[SUMS].split(list(sizes), 1)):
        own = {name: packed[block_name(name, block)] for name in OWN if block_name(name, block) in packed}
        found.append({SUMS: sums, COUNTS: packed[COUNTS], **own})
    return found
