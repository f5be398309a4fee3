"""Whole numbers of sums of products in few bits: of each number is sent by how much it misses what others foretell.

G `(D, D)` holds the products of n images, summed over images, and the sums b_c of each class are known. Rows of G are
sent from the first to the last. Once the rows of some features are known, the regression of all features on these
foretells the next rows:

    F = R^T R,    R = the classes' b_c / sqrt(n_c), and below them the rows of the Cholesky factor of G + ridge so far

What G misses F by is the Schur complement, the sum of products of what is left of two features when the known ones are
taken off. It is smaller than G the more is known, and nearly 0 as soon as there are as many features as images. The
reader knows the same rows and adds F again. By the chain rule for entropies no code of such sums, drawn at random, can
be much shorter (Bartlett 1933 for their decomposition).

F is rounded to whole numbers, and processors differ in the last digits of F. Where F lies so near the middle between
two whole numbers that another processor might round it to the other, the place is sent, and there F is rounded down.
A checksum of G tells a reader whether it has found the numbers that were sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from oneflare.upload.rice import decode_rows, encode_rows, encode_triangle
from oneflare.upload.symmetric import STRIP, mirrored_

ROWS = 64
"""of G that are foretold together, from those before them"""
FIRST_ROWS = 8
"""the first of them, from which little is known; then as many as there are before them, up to ROWS"""
RIDGE = 1.0
"""added to the diagonal, so that sums of fewer images than features have a factor"""
DOUBT = 2.0**-11
"""how near the middle between two whole numbers F may come before the place is sent"""
HEADER = 3
"""words: a checksum of G, how many places are doubtful, and the number of words in which they are"""
MOST_DOUBTFUL, MOST_DOUBT = 64, 1 / 64
"""places, and the part of all places, that may be doubtful; twice DOUBT of them are, and each takes less than a word.
All of the first rows may be, too: two images of a class foretell halves of whole numbers."""
EXACT = 2.0**52
"""below which sums and differences of whole numbers are exact in double precision"""
NO_IMAGES = "no images have these sums of products"


class Foretold:
    """F, from what is known so far."""

    def __init__(self, known: Tensor, dim: int) -> None:
        """known: `(c, D)` float64, rows of R to begin with"""
        self.rows = torch.empty(len(known) + dim, dim, dtype=torch.float64)
        self.rows[: len(known)] = known
        self.number = len(known)

    def of(self, first: int, last: int) -> Tensor:
        """F of these rows, from the first's own column on, `(last - first, D - first)`"""
        known = self.rows[: self.number]
        return known[:, first:last].T @ known[:, first:]

    def learn(self, first: int, missed: Tensor) -> None:
        """missed: G - F of the rows from `first` on, from their own column on, which is overwritten

        A ValueError where no images have such products.
        """
        missed.diagonal().add_(RIDGE)
        factor, failed = torch.linalg.cholesky_ex(missed[:, : len(missed)])
        if int(failed):
            raise ValueError(NO_IMAGES)
        end = self.number + len(missed)
        self.rows[self.number : end, first:] = torch.linalg.solve_triangular(factor, missed, upper=False)
        self.number = end


def parts(dim: int) -> Iterator[tuple[int, int]]:
    """First and last row, that one exclusive, of those that are foretold together."""
    first = 0
    while first < dim:
        last = min(first + min(max(first, FIRST_ROWS), ROWS), dim)
        yield first, last
        first = last


def encode_foretold(products: Tensor, known: Tensor) -> Tensor:
    """The words of whole numbers G `(D, D)` float64, of which both triangles are given; known: as in `Foretold`."""
    if not float(products.abs().max()) < EXACT:
        raise ValueError("the sums are too large for whole numbers")
    dim = len(products)
    foretold, places = Foretold(known, dim), []
    left = torch.zeros(dim, dim, dtype=torch.float64)
    for first, last in parts(dim):
        own, found = products[first:last, first:], foretold.of(first, last)
        doubtful = ((found - found.floor() - 0.5).abs() < DOUBT).triu()
        left[first:last, first:] = own - torch.where(doubtful, _down(found), found.round())
        row, column = doubtful.nonzero(as_tuple=True)
        places.append((row + first) * dim + column + first)
        foretold.learn(first, own - found)
    where = torch.cat(places)
    code = encode_rows([where.diff(prepend=where[:1] * 0)]) if len(where) else where
    return torch.cat([torch.tensor([_checksum(products), len(where), len(code)]), code, encode_triangle(left)])


def decode_foretold(words: Tensor, known: Tensor, into: Tensor) -> Tensor:
    """G, both triangles, in memory `(D, D)` float64 that is overwritten; a ValueError where the words are no code."""
    dim = len(into)
    checksum, places, stream = _parsed(words, dim)
    missed, foretold = decode_rows(stream, range(dim, 0, -1)), Foretold(known, dim)
    for first, last in parts(dim):
        own, found = into[first:last, first:], foretold.of(first, last)
        whole = found.round()
        begin, end = torch.searchsorted(places, torch.tensor([first * dim, last * dim])).tolist()
        row, column = places[begin:end] // dim - first, places[begin:end] % dim - first
        if bool((column < row).any()):
            raise ValueError("a doubtful place lies below the diagonal")
        whole[row, column] = _down(found[row, column])
        for place in range(last - first):
            own[place, place:] = torch.from_numpy(next(missed).astype("f8"))
        own.add_(whole)
        mirrored_(own[:, : last - first])
        if not float(own.abs().max()) < EXACT:
            raise ValueError(NO_IMAGES)
        foretold.learn(first, own - found)
    for _ in missed:  # it is at its end, or says what is wrong with the stream
        raise ValueError("the stream has too many rows")
    mirrored_(into)
    if _checksum(into) != checksum:
        raise ValueError("its checksum is not that of its numbers, which another processor may have foretold otherwise")
    return into


def _down(found: Tensor) -> Tensor:
    """Of numbers near the middle between two whole ones, the lower: nothing near them is rounded to another."""
    return (found - 0.5).round()


def _parsed(words: Tensor, dim: int) -> tuple[int, Tensor, Tensor]:
    """The checksum, the doubtful places in order, and the words of what F misses."""
    if len(words) < HEADER:
        raise ValueError("it is shorter than its header")
    checksum, number, length = words[:HEADER].tolist()
    fits = 0 <= length <= len(words) - HEADER and (length > 0) == (number > 0)
    most = MOST_DOUBTFUL + dim * FIRST_ROWS + dim * dim * MOST_DOUBT
    if not fits or not 0 <= number <= most or length > number + MOST_DOUBTFUL:
        raise ValueError("its doubtful places do not fit into it")
    code, stream = words[HEADER : HEADER + length], words[HEADER + length :]
    if number == 0:
        return checksum, torch.zeros(0, dtype=torch.int64), stream
    (gaps,) = decode_rows(code, [number])
    if gaps.min() < 0 or gaps.max() >= dim * dim or gaps.sum() >= dim * dim:
        raise ValueError("its doubtful places are not in order")
    return checksum, torch.from_numpy(gaps.cumsum()), stream


def _checksum(products: Tensor) -> int:
    """Of whole numbers, both triangles"""
    found = 0
    for strip in products.split(STRIP):
        found = zlib.crc32(strip.to(torch.int64).numpy().tobytes(), found)
    return found
