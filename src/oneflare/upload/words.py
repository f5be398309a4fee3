"""The words in which rounded sums of products are kept: the largest directions apart from what they leave.

    products / u = [w^2/u Q^T Q] + P,    Q `(r, D)` and P `(D, D)` whole numbers, [ ] rounded

w Q are the r largest eigenvectors of the products, times the roots of their eigenvalues, rounded to w; P is what they
leave of the products that are rounded to u. Q^T Q is exact, so the reader has the products rounded to u, whatever Q is:
neither w nor r nor how the eigenvectors were found makes any difference to them. In a few directions natural images
vary far more than chance makes sums of products vary. Without those the numbers in P are of the size of chance, and
take about three bits fewer than the products would (docs/analytic.md).

Q follows from the products, so it reveals what they reveal. The products of few images may be all in Q, as w^2 Q^T Q
(`oneflare.upload.factors`); P is then left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from oneflare.upload.rice import decode_into, decode_rows, encode_rows, encode_triangle
from oneflare.upload.symmetric import mirrored_

PER_OCTAVE = 4
"""steps are powers of 2^(1/4)"""
STEPS = range(-160, 241)
"""logarithms that a step may have, in quarters of an octave"""
NO_REST = 1000
"""in place of the logarithm of u where there is no P"""
HEADER = 4
"""words: the logarithms of u and w, r, and the number of words in which Q is"""
SHARE = 16
"""features for each row of Q"""
SPARE = 16
"""directions that are looked for beyond those that are kept, which are then found sooner"""
ROUNDS = 3
"""of the search for directions"""
OFF = 1 / 4
"""of sqrt(n): by how much rounding Q may move its products"""
LARGEST = 1e10
"""that no entry of a factor of products of images has; in the finest steps, products of them stay below 10^38"""
EXACT = 1 << 24
"""below which whole numbers are exact in single precision"""


def step_of(logarithm: int) -> float:
    """The step that has this logarithm in quarters of an octave."""
    return float(2.0 ** (logarithm / PER_OCTAVE))


def logarithm_of(step: float) -> int:
    """Of the step nearest to this one that there is."""
    return min(max(round(PER_OCTAVE * math.log2(step)), STEPS[0]), STEPS[-1])


@dataclass(frozen=True)
class Rows:
    """Q, and w."""

    whole: Tensor
    """`(r, D)` float32"""
    logarithm: int
    """of w"""

    @cached_property
    def code(self) -> Tensor:
        """the words of Q"""
        return encode_rows(list(self.whole)) if len(self.whole) else torch.zeros(0, dtype=torch.int64)

    @property
    def width(self) -> float:
        """w"""
        return step_of(self.logarithm)

    def words(self, rest: int = NO_REST) -> Tensor:
        """Header and rows; rest: the logarithm of u, if P follows"""
        return torch.cat([torch.tensor([rest, self.logarithm, len(self.whole), len(self.code)]), self.code])

    def left_of(self, products: Tensor) -> Tensor:
        """products - w^2 Q^T Q `(D, D)`: about what is coded, before a step is chosen"""
        return products - self.width**2 * self.products(self.width**2)

    def products(self, step: float) -> Tensor:
        """[w^2/u Q^T Q] `(D, D)`"""
        largest = float(self.whole.abs().max()) if len(self.whole) else 0.0
        exact = self.whole if len(self.whole) * largest**2 < EXACT else self.whole.double()
        return (exact.T @ exact).mul_(self.width**2 / step).round_()


def rows_apart(products: Tensor, chance: float) -> Rows:
    """Of products `(D, D)` float32, which are both triangles.

    chance: sqrt(n). The products of rows that are rounded to w are off by about w sqrt(s/6), s the mean of the squares
    that a feature has in them.
    """
    rows = leading(products, len(products) // SHARE)
    size = float(rows.square().sum(0).mean()) if len(rows) else 0.0
    logarithm = logarithm_of(OFF * chance * math.sqrt(6 / max(size, 1e-12)))
    return Rows((rows / step_of(logarithm)).round_(), logarithm)


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


def with_rest(rows: Rows, products: Tensor, logarithm: int) -> Tensor:
    """All words of products `(D, D)`; logarithm: of u"""
    step = step_of(logarithm)
    left = (products / step).round_().sub_(rows.products(step))
    return torch.cat([rows.words(logarithm), encode_triangle(left)])


@dataclass(frozen=True)
class Parsed:
    """What words of products of D features say, before P is read."""

    rows: Rows
    step: float | None
    """u, None where there is no P"""
    rest: Tensor
    """the words of P"""

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
        rows = Rows(_whole(code, number, dim), width)
        if number and not float(rows.whole.abs().max()) * rows.width < LARGEST:
            raise ValueError("a factor has numbers that no images give")
        return cls(rows, None if step == NO_REST else step_of(step), rest)

    @property
    def factor(self) -> Tensor:
        """w Q `(r, D)`"""
        return self.rows.whole * self.rows.width

    def products_into(self, products: Tensor) -> Tensor:
        """The products, in memory `(D, D)` that is overwritten."""
        if self.step is None:
            wide = self.factor.to(products.dtype)
            return torch.mm(wide.T, wide, out=products)
        decode_into(products, self.rest)
        return mirrored_(products).add_(self.rows.products(self.step)).mul_(self.step)


def _whole(code: Tensor, number: int, dim: int) -> Tensor:
    if number == 0:
        if len(code):
            raise ValueError("the stream goes on behind its last row")
        return torch.zeros(0, dim)
    return torch.stack([torch.from_numpy(row).float() for row in decode_rows(code, [dim] * number)])
