"""Symmetric matrices of summed products: how they travel as upper triangles, and what none of them can contain."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 2.0**-23
"""relative, of what is sent as float32, with a factor of two to spare"""
STRIP = 512
"""rows of a matrix that are copied at a time"""
SLACK = 1e-3
"""of what rounding, and summation in another order, may break"""


def triangle_size(dim: int) -> int:
    return dim * (dim + 1) // 2


def triangle(dim: int) -> Tensor:
    return torch.ones(dim, dim, dtype=torch.bool).triu()


def upper_values(matrix: Tensor) -> Tensor:
    """The upper triangle of `(D, D)` as one row of numbers, row after row."""
    rows = [matrix[row, row:] for row in range(len(matrix))]
    return torch.cat(rows) if rows else matrix.flatten()


def symmetric(upper: Tensor) -> Tensor:
    """The symmetric matrix whose upper triangle is given; what lies below it does not count."""
    return mirrored_(upper.clone())


def mirrored_(upper: Tensor) -> Tensor:
    """The same in place: strip by strip, because large matrices are slow to copy."""
    for start in range(0, len(upper), STRIP):
        end = start + STRIP
        block = upper[start:end, start:end]
        block.copy_(torch.triu(block) + torch.triu(block, 1).T)
        upper[end:, start:end] = upper[start:end, end:].T
    return upper


def unpack_symmetric(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The matrix whose upper triangle is given as one row of numbers."""
    dim = round(((8 * len(values) + 1) ** 0.5 - 1) / 2)
    upper = torch.empty(dim, dim, dtype=dtype)
    for row, part in enumerate(values.split([dim - row for row in range(dim)])):
        upper[row, row:] = part
    return mirrored_(upper)


def around_mean(products: Tensor, total: Tensor, number: float, vanishing: float, dtype: torch.dtype) -> Tensor:
    """Sums of products `(D, D)` of so many rows that add up to `total`, less what their mean gives: G - n m m^T.

    The difference is taken in float64, strip by strip, whatever the type of G and of what is returned. Of G the upper
    triangle may be given alone; that of the difference is then meant. Where a difference on the diagonal is below
    `vanishing` of its G, its row and column are 0.
    """
    mean, size = total / number, products.diagonal().double()
    found = torch.empty(products.shape, dtype=dtype)
    for start in range(0, len(found), STRIP):
        rows = slice(start, start + STRIP)
        found[rows] = products[rows].double() - torch.outer(total[rows], mean)
    constant = (size - total * mean).abs() <= vanishing * size.abs()
    if bool(constant.any()):
        found[constant] = 0
        found[:, constant] = 0
    return found


def packed_diagonal(values: Tensor) -> Tensor:
    """The diagonal `(dim,)` of the matrix whose upper triangle is given as one row of numbers."""
    dim = round(((8 * len(values) + 1) ** 0.5 - 1) / 2)
    lengths = torch.arange(dim, 0, -1)
    return values[lengths.cumsum(0) - lengths]


def products_complaint(products: Tensor, square: str = "variance", product: str = "covariance") -> str | None:
    """What sums of products cannot have: M_ii < 0, or M_ij^2 > M_ii M_jj (Cauchy and Schwarz); None if nothing.

    square, product: what numbers on the diagonal and beside it are called
    """
    diagonal = products.diagonal()
    if bool((diagonal < 0).any()):
        return f"a negative {square} on its diagonal"
    root = diagonal.sqrt()
    if bool((products.abs() > (1 + SLACK) * root[:, None] * root + 1e-30).any()):
        return f"a {product} larger than its {square}s allow"
    return None


def correlations(products: Tensor) -> Tensor:
    """M_ij / sqrt(M_ii M_jj) of the rows and columns whose M_ii is not 0."""
    alive = products.diagonal() > 0
    scale = 1 / products.diagonal()[alive].sqrt()
    return products[alive][:, alive] * scale[:, None] * scale


def positive(matrix: Tensor, slack: float) -> bool:
    """Whether a symmetric matrix has no eigenvalue below -slack, by a Cholesky factorisation.

    Its own rounding moves an entry by at most (D + 1) e times the largest one on the diagonal (Demmel 1989), with
    e = 2^-24 in single precision. Where the slack is four times that, single precision is taken: half the time.
    """
    if not len(matrix):
        return True
    rounding = (len(matrix) + 1) * 2.0**-24 * float(matrix.diagonal().abs().max())
    shifted = matrix.to(torch.float32 if slack >= 4 * rounding else matrix.dtype, copy=True)
    shifted.diagonal().add_(slack)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0
