"""Whole numbers in few bits: the Rice code of each row of a triangle of sums, or of other rows, without loss.

A row of numbers v is sent with a width k of its own. Each v becomes the natural number u = 2v or -2v - 1, its k low
bits are sent as they are, and u >> k in unary: so many zeros and a one (Rice and Plaunt 1971). The code is within a
tenth of a bit of the best for numbers that are spread like a Laplace or normal distribution around zero.

In the stream stand, for all rows, k (one byte) and the bytes of the unary part (four), then row after row the unary
part and the low bits, each filled up to whole bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

WIDEST = 48
"""largest k: beyond that no sum of whole numbers is exact in double precision anyway"""
ROW_HEADER = np.dtype([("width", "u1"), ("unary", "<u4")])
WORD = 8
"""bytes of the words in which a stream is kept"""

Numbers = np.ndarray[Any, Any]


def encode_triangle(matrix: Tensor) -> Tensor:
    """The upper triangle of whole numbers `(D, D)` as int64 words `(W,)`."""
    return encode_rows([matrix[row, row:] for row in range(len(matrix))])


def decode_triangle(words: Tensor, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The numbers of `encode_triangle` in the upper triangle of `(D, D)`; a ValueError where none fit."""
    upper = torch.zeros(dim, dim, dtype=dtype)
    for row, numbers in enumerate(decode_rows(words, range(dim, 0, -1))):
        upper[row, row:] = torch.from_numpy(numbers)
    return upper


def encode_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows of whole numbers as int64 words `(W,)`."""
    headers, body = np.zeros(len(rows), ROW_HEADER), []
    for place, row in enumerate(rows):
        natural = _natural(row)
        width = best_width(natural)
        unary = _unary(natural >> width)
        headers[place] = width, len(unary)
        body += [unary.tobytes(), _low_bits(natural, width).tobytes()]
    stream = headers.tobytes() + b"".join(body)
    return torch.from_numpy(np.frombuffer(stream + bytes(-len(stream) % WORD), "<i8").copy())


def decode_rows(words: Tensor, counts: Sequence[int]) -> Iterator[Numbers]:
    """Row after row of `encode_rows`, with so many numbers each; a ValueError where none fit."""
    stream = np.frombuffer(words.numpy().tobytes(), np.uint8)
    at = len(counts) * ROW_HEADER.itemsize
    if len(stream) < at:
        raise ValueError("the stream is shorter than its rows' headers")
    headers = np.frombuffer(stream[:at].tobytes(), ROW_HEADER)
    for row, count in enumerate(counts):
        width, unary = int(headers["width"][row]), int(headers["unary"][row])
        low = -(-count * width // 8)
        if width > WIDEST or at + unary + low > len(stream):
            raise ValueError(f"row {row} does not fit into the stream")
        quotients = _from_unary(stream[at : at + unary], count, row)
        natural = quotients << width | _from_low_bits(stream[at + unary : at + unary + low], count, width)
        yield np.where(natural & 1, -(natural + 1 >> 1), natural >> 1)
        at += unary + low
    if len(stream) - at >= WORD or stream[at:].any():
        raise ValueError("the stream goes on behind its last row")


def row_bits(values: Tensor) -> int:
    """Bits of a row of whole numbers in code, beside its header."""
    natural = _natural(values)
    width = best_width(natural)
    return int((natural >> width).sum()) + len(natural) * (1 + width)


def _natural(values: Tensor) -> Numbers:
    whole = values.to(torch.int64).numpy()
    return np.where(whole >= 0, 2 * whole, -2 * whole - 1)


def best_width(natural: Numbers) -> int:
    """The k with the fewest bits, sum (u >> k) + 1 + k, near the logarithm of the mean."""
    guess = int(np.log2(max(float(natural.mean()), 1.0)))
    around = range(max(0, guess - 1), min(WIDEST, guess + 1) + 1)
    return min(around, key=lambda width: int((natural >> width).sum()) + len(natural) * width)


def _unary(quotients: Numbers) -> Numbers:
    ends = np.cumsum(quotients + 1)
    bits = np.zeros(int(ends[-1]), np.uint8)
    bits[ends - 1] = 1
    return np.packbits(bits)


def _from_unary(stream: Numbers, count: int, row: int) -> Numbers:
    ends = np.flatnonzero(np.unpackbits(stream))
    if len(ends) != count or (len(stream) and len(stream) != int(ends[-1]) // 8 + 1):
        raise ValueError(f"row {row} holds {len(ends)} numbers instead of {count}")
    return np.diff(ends, prepend=-1) - 1


def _low_bits(natural: Numbers, width: int) -> Numbers:
    places = np.arange(width - 1, -1, -1)
    return np.packbits((natural[:, None] >> places & 1).astype(np.uint8))


def _from_low_bits(stream: Numbers, count: int, width: int) -> Numbers:
    if width == 0:
        return np.zeros(count, np.int64)
    bits = np.unpackbits(stream, count=count * width).reshape(count, width)
    low: Numbers = bits @ (1 << np.arange(width - 1, -1, -1))
    return low
