"""The words in which rounded sums of products are kept: the largest directions apart from what they leave.

    products = F^T F + R,    F = w Q `(r, D)`,    R = u P `(D, D)`,    Q and P whole numbers

The rows of F are the r largest eigenvectors of the products, times the roots of their eigenvalues, rounded to w; R is
what these rounded rows leave, so that the products lose half a step u by rounding and nothing by w or r. In a few
directions natural images vary far more than chance makes sums of products vary. Without those the numbers in R are of
the size of chance, and take about three bits fewer than the products would (docs/analytic.md).

F follows from the products, so it reveals what they reveal. The products of few images may be all in F
(`oneflare.upload.factors`); R is then left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.upload.rice import decode_into, decode_rows, encode_rows, encode_triangle
from oneflare.upload.symmetric import mirrored_

PER_OCTAVE = 4
"""steps are powers of 2^(1/4)"""
STEPS = range(-160, 241)
"""logarithms that a step may have, in quarters of an octave"""
NO_REST = 1000
"""in place of the logarithm of u where there is no R"""
HEADER = 4
"""words: the logarithms of u and w, r, and the number of words in which Q is"""
SHARE = 16
"""features for each row of F"""
SPARE = 16
"""directions that are looked for beyond those that are kept, which are then found sooner"""
ROUNDS = 3
"""of the search for directions"""
OFF = 1 / 4
"""of sqrt(n): by how much rounding F may move its products"""
LARGEST = 1e12
"""that no row of products of images has"""


def step_of(logarithm: int) -> float:
    """u"""
    return 2.0 ** (logarithm / PER_OCTAVE)


def logarithm_of(step: float) -> int:
    """Of the step nearest to this one that there is."""
    return min(max(round(PER_OCTAVE * math.log2(step)), STEPS[0]), STEPS[-1])


@dataclass(frozen=True)
class Rows:
    """Q in words, and w."""

    logarithm: int
    number: int
    code: Tensor

    @classmethod
    def of(cls, whole: Tensor, logarithm: int) -> Rows:
        """whole: Q `(r, D)`"""
        return cls(logarithm, len(whole), encode_rows(list(whole)) if len(whole) else torch.zeros(0, dtype=torch.int64))

    def words(self, rest: int = NO_REST) -> Tensor:
        """Header and rows; rest: the logarithm of u, if R follows"""
        return torch.cat([torch.tensor([rest, self.logarithm, self.number, len(self.code)]), self.code])


def split_off(products: Tensor, chance: float) -> tuple[Rows, Tensor]:
    """F of products `(D, D)` float32, which are both triangles, and R before it is rounded.

    chance: sqrt(n). The products of rows that are rounded to w are off by about w sqrt(s/6), s the mean of the squares
    that a feature has in F.
    """
    rows = leading(products, len(products) // SHARE)
    size = float(rows.square().sum(0).mean()) if len(rows) else 0.0
    logarithm = logarithm_of(OFF * chance * math.sqrt(6 / max(size, 1e-12)))
    whole = (rows / step_of(logarithm)).round_()
    return Rows.of(whole, logarithm), torch.addmm(products, whole.T, whole, alpha=-(step_of(logarithm) ** 2))


def leading(products: Tensor, number: int) -> Tensor:
    """About the largest eigenvectors of symmetric products, times the roots of their eigenvalues, `(number, D)`.

    By subspace iteration (Halko, Martinsson and Tropp 2011) from a start that is always the same.
    """
    if number == 0:
        return products[:0]
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(len(products), min(number + SPARE, len(products)), generator=generator)
    for _ in range(ROUNDS):
        basis, _ = torch.linalg.qr(products @ basis)
    values, vectors = torch.linalg.eigh(basis.T @ (products @ basis))
    found: Tensor = (basis @ vectors[:, -number:] * values[-number:].clamp(min=0).sqrt()).T
    return found


def with_rest(rows: Rows, rest: Tensor, logarithm: int) -> Tensor:
    """All words; rest: R before it is rounded"""
    return torch.cat([rows.words(logarithm), encode_triangle((rest / step_of(logarithm)).round_())])


@dataclass(frozen=True)
class Parsed:
    """What words of products of D features say, before R is read."""

    rows: Tensor
    """F `(r, D)` float32"""
    width: float
    """w"""
    step: float | None
    """u, None where there is no R"""
    rest: Tensor
    """the words of R"""

    @classmethod
    def of(cls, words: Tensor, dim: int, most: int) -> Parsed:
        """A ValueError where the words are no code; most: rows that there may be"""
        if len(words) < HEADER:
            raise ValueError("it is shorter than its header")
        step, width, number, length = words[:HEADER].tolist()
        if step != NO_REST and step not in STEPS:
            raise ValueError("it begins with no step")
        if width not in STEPS or not 0 <= number <= most or not 0 <= length <= len(words) - HEADER:
            raise ValueError(f"a factor has {number} rows in {length} words")
        code, rest = words[HEADER : HEADER + length], words[HEADER + length :]
        if step == NO_REST and (number == 0 or len(rest)):
            raise ValueError("it has neither products nor a factor alone")
        rows = _rows(code, [dim] * number) * step_of(width)
        if len(rows) and not float(rows.abs().max()) < LARGEST:
            raise ValueError("a factor has numbers that no images give")
        return cls(rows.view(number, dim), step_of(width), None if step == NO_REST else step_of(step), rest)

    def products_into(self, products: Tensor) -> Tensor:
        """F^T F + R, in memory `(D, D)` that is overwritten."""
        wide = self.rows.to(products.dtype)
        if self.step is None:
            return torch.mm(wide.T, wide, out=products)
        decode_into(products, self.rest)
        return mirrored_(products).mul_(self.step).addmm_(wide.T, wide)


def _rows(code: Tensor, counts: Sequence[int]) -> Tensor:
    if not counts:
        if len(code):
            raise ValueError("the stream goes on behind its last row")
        return torch.zeros(0)
    return torch.stack([torch.from_numpy(row).float() for row in decode_rows(code, counts)])
