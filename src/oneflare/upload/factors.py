"""Sums of products of few images as a factor: rows F with F^T F = S, which are fewer numbers than S has.

The scatter S of n images has rank n - 1 at most, so n - 1 rows of D numbers say what D (D + 1)/2 numbers say. F is
diag(sqrt(e)) V^T with the eigenvalues e and eigenvectors V of S, each with its largest entry positive: a function of S
alone. A file with F therefore reveals what a file with S reveals; in particular no row of it is an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oneflare.upload.symmetric import triangle_size, unpack_symmetric

SCATTER, SUMS, COUNTS = "scatter", "sums", "counts"
VANISHING = 1e-12
"""a feature whose variance is below this part of its square is constant"""


def pays(images: int, sizes: Sequence[int]) -> bool:
    """Whether a factor is at most as long as the products, in blocks of features of these sizes."""
    return 2 * images <= min(sizes)


def factor(phi: Tensor) -> Tensor:
    """F `(max(n - 1, 1), D)` float64 of features `(n, D)`, the largest eigenvalue first.

    With X the features without their mean and X X^T = U diag(e) U^T, the rows are U^T X.
    """
    wide = phi.double()
    centred = wide - wide.mean(0)
    centred[:, centred.square().sum(0) <= VANISHING * wide.square().sum(0)] = 0
    _, vectors = torch.linalg.eigh(centred @ centred.T)
    rows = (vectors.T @ centred).flip(0)[: max(len(phi) - 1, 1)]
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    signed: Tensor = rows * torch.where(largest < 0, -1.0, 1.0)
    return signed


def pack_factor(phi: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """The tensors of an upload, of features `(n, D)`: F in place of the products, class sums, counts."""
    sums = torch.zeros(classes, phi.shape[1], dtype=torch.float64).index_add_(0, labels, phi.double())
    counts = torch.bincount(labels, minlength=classes)
    return {SUMS: sums.float(), COUNTS: counts, SCATTER: factor(phi).float().flatten()}


def factor_of(packed: Mapping[str, Tensor]) -> Tensor | None:
    """F `(r, D)` in packed statistics of float32; None where they hold the products themselves."""
    values, dim = packed[SCATTER], packed[SUMS].shape[1]
    if len(values) == triangle_size(dim):
        return None
    return values.view(-1, dim)


def scatter_of(packed: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    """S `(D, D)` of packed statistics of float32, whichever of the two they hold."""
    rows = factor_of(packed)
    return unpack_symmetric(packed[SCATTER], dtype) if rows is None else rows.to(dtype).T @ rows.to(dtype)


def factor_complaint(packed: Mapping[str, Tensor]) -> str | None:
    """What no factor could be, in packed statistics of float32; None if nothing is."""
    values, dim, images = packed[SCATTER], packed[SUMS].shape[1], int(packed[COUNTS].sum())
    if len(values) == triangle_size(dim):
        return None
    if len(values) % dim or not 1 <= len(values) // dim <= max(images - 1, 1):
        return f"scatter has {len(values)} numbers, which are neither products nor a factor of {images} images"
    return None


def equivalent_step(rows: Tensor, step: float) -> float:
    """u for which products that are rounded to u are as uncertain as those of F rounded to w, `rows` `(r, D)`.

    E = F^T d + d^T F + d^T d with errors d of variance w^2/12 has entries of variance (S_ii + S_jj) w^2/12 + r w^4/144.
    """
    size = float(rows.square().sum(0).mean())
    return math.sqrt(2 * size * step**2 + len(rows) * step**4 / 12)


def factor_slack(rows: int, products: Tensor, step: float) -> float:
    """About the largest eigenvalue of that E, with a half to spare: 2 |F| |d| + |d|^2 in the spectral norm.

    |d| is about w (sqrt(r) + sqrt(D))/sqrt(12), and |F|^2 at most the Frobenius norm of S, `products` `(D, D)`.
    """
    moved = 1.5 * step * (math.sqrt(rows) + math.sqrt(len(products))) / math.sqrt(12)
    return 2 * math.sqrt(float(products.norm())) * moved + moved**2
