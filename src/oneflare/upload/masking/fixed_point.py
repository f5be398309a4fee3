"""Sums in fixed point: whole numbers that add up over members without rounding and without overflow.

A feature phi is kept as the whole number round(2^bits phi), cut at the largest feature in the terms. Class counts n,
class sums b and the upper triangle of G = sum phi phi^T are then whole numbers, in steps of 1, 2^-bits and 4^-bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from oneflare.errors import ConfigError, TrainingError
from oneflare.upload.statistics import Statistics
from oneflare.upload.symmetric import triangle, triangle_size, unpack_symmetric

FIXED = "fixed"
"""name of the tensor with all sums, one after the other"""
WORD_BITS = 63
"""the total lies between -2^63 and 2^63, where whole numbers modulo 2^64 are told apart"""
EXACT_BITS = 22
"""a feature has at most 2^22 steps, so that float64 adds up products over 512 images without rounding"""


@dataclass(frozen=True)
class FixedPoint:
    """How finely features are rounded, and how large one may be."""

    bits: int
    """a feature is a whole multiple of 2^-bits"""
    clip: float
    """largest absolute value of a feature; larger ones are cut"""

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= 1 << EXACT_BITS:
            raise ConfigError(
                f"upload.masked: features up to {self.clip:g} in steps of 2^-{self.bits} have {self.limit} steps, not "
                f"1 to 2^{EXACT_BITS}; choose another upload.masked.bits or upload.masked.clip"
            )

    @classmethod
    def of(cls, content: Any) -> FixedPoint:
        """From a manifest; anything else than its two fields is a ValueError."""
        if not isinstance(content, Mapping) or set(content) != {"bits", "clip"} or type(content["bits"]) is not int:
            raise ValueError("fixed")
        return cls(content["bits"], float(content["clip"]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def limit(self) -> int:
        """The largest feature in steps."""
        return math.floor(math.ldexp(self.clip, self.bits))

    def round(self, phi: Tensor) -> Tensor:
        """Features `(n, D)` in steps, float64."""
        if not bool(torch.isfinite(phi).all()):
            raise TrainingError("the features are not finite; check the client's images for NaN or infinite pixels")
        return (phi.double() * 2.0**self.bits).round().clamp(-self.limit, self.limit)

    def largest(self, images: int, dim: int) -> int:
        """A bound on the size of every sum over so many images: n <= N, |b| <= N L, |G| <= N L^2."""
        return images * (self.limit**2 if dim else 1)

    def check_room(self, images: int, dim: int) -> None:
        """Refuse so many images that a total could reach 2^63, where it could be mistaken for a negative number."""
        if self.largest(images, dim) >= 1 << WORD_BITS:
            most = ((1 << WORD_BITS) - 1) // self.largest(1, dim)
            raise ConfigError(
                f"sums over {images} images could overflow: with upload.masked.bits={self.bits} and features up to "
                f"{self.clip:g}, all members together may have {most}; another federation with fewer bits allows more"
            )


def vector_size(classes: int, dim: int) -> int:
    """Numbers in the vector: n, b and the upper triangle of G; D = 0 where only classes are counted."""
    return classes + classes * dim + triangle_size(dim)


def to_vector(counts: Tensor, sums: Tensor, gram: Tensor) -> Tensor:
    """n `(C,)`, b `(C, D)` and G `(D, D)`, all int64, as one vector; below its diagonal, G is not looked at."""
    return torch.cat([counts, sums.flatten(), gram.masked_select(triangle(len(gram)))])


def counts_of(vector: Tensor, classes: int) -> Tensor:
    """n_c `(C,)`, int64"""
    return vector[:classes]


def from_vector(vector: Tensor, classes: int, dim: int, fixed: FixedPoint) -> Statistics:
    """The statistics whose sums the vector holds."""
    end = classes + classes * dim
    gram = unpack_symmetric(vector[end:].double() * 4.0**-fixed.bits)
    sums = vector[classes:end].view(classes, dim).double() * 2.0**-fixed.bits
    return Statistics(gram, sums, counts_of(vector, classes).double())
