"""Whole numbers in few bits: the Rice code of each row of a triangle of sums, or of other rows, without loss.

A row of numbers v is sent with a width k of its own. Each v becomes the natural number u = 2v or -2v - 1, its k low
bits are sent as they are, and u >> k in unary: so many zeros and a one (Rice and Plaunt 1971). The code is within a
tenth of a bit of the best for numbers that are spread like a Laplace or normal distribution around zero.

In the stream stand, for all rows, k (one byte) and the bytes of the unary part (four), then row after row the unary
part and the low bits, each filled up to whole bytes.

Several rows are worked on at a time, so that arrays are long enough to be fast and short enough for the cache.
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
AT_A_TIME = 1 << 15
"""numbers of the rows that are worked on together, if they are more than one row"""
MOST_BITS = 1 << 24
"""of an array of single bits, so that rows of few very large numbers do not fill the memory"""

Numbers = np.ndarray[Any, Any]


def encode_triangle(matrix: Tensor) -> Tensor:
    """The upper triangle of whole numbers `(D, D)` as int64 words `(W,)`."""
    return encode_rows([matrix[row, row:] for row in range(len(matrix))])


def decode_triangle(words: Tensor, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The numbers of `encode_triangle` in the upper triangle of `(D, D)`; a ValueError where none fit."""
    upper = torch.zeros(dim, dim, dtype=dtype)
    decode_into(upper, words)
    return upper


def decode_into(upper: Tensor, words: Tensor) -> None:
    """Overwrites the upper triangle of `(D, D)` floats by the numbers of `encode_triangle`, and nothing below it.

    A ValueError where none fit.
    """
    target, dim, row = upper.numpy(), len(upper), 0
    for numbers in decode_together(words, range(dim, 0, -1)):
        floats, start = numbers.astype(target.dtype), 0
        while start < len(floats):
            target[row, row:] = floats[start : start + dim - row]
            start += dim - row
            row += 1


def encode_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows of whole numbers as int64 words `(W,)`; none may be empty."""
    headers, body = np.zeros(len(rows), ROW_HEADER), []
    for first, last in _together([len(row) for row in rows]):
        natural, starts = _natural(torch.cat(list(rows[first:last]))), _starts(rows[first:last])
        widths = best_widths(natural, starts)
        unary = _unary(natural, starts, widths)
        for place, (width, own, stop) in enumerate(zip(widths, unary, [*starts[1:], len(natural)], strict=True)):
            headers[first + place] = width, len(own)
            body += [own.tobytes(), _low_bits(natural[starts[place] : stop], width)]
    stream = headers.tobytes() + b"".join(body)
    return torch.from_numpy(np.frombuffer(stream + bytes(-len(stream) % WORD), "<i8").copy())


def decode_rows(words: Tensor, counts: Sequence[int]) -> Iterator[Numbers]:
    """Row after row of `encode_rows`, with so many numbers each; a ValueError where none fit."""
    sizes = iter(counts)
    for numbers in decode_together(words, counts):
        start = 0
        while start < len(numbers):
            size = next(sizes)
            yield numbers[start : start + size]
            start += size


def decode_together(words: Tensor, counts: Sequence[int]) -> Iterator[Numbers]:
    """The same, several whole rows at a time in one array."""
    stream = np.frombuffer(words.numpy().tobytes(), np.uint8)
    at = len(counts) * ROW_HEADER.itemsize
    if len(stream) < at:
        raise ValueError("the stream is shorter than its rows' headers")
    headers = np.frombuffer(stream[:at].tobytes(), ROW_HEADER)
    widths, unaries = headers["width"].tolist(), headers["unary"].tolist()
    for first, last in _together(counts, [8 * unary for unary in unaries]):
        places = []
        for row in range(first, last):
            low = at + unaries[row]
            end = low + -(-counts[row] * widths[row] // 8)
            if widths[row] > WIDEST or end > len(stream):
                raise ValueError(f"row {row} does not fit into the stream")
            places.append((at, low, end))
            at = end
        own = list(counts[first:last])
        natural = _from_unary([stream[start:low] for start, low, _ in places], own, first)
        start = 0
        for width, count, (_, low, end) in zip(widths[first:last], own, places, strict=True):
            if width:
                part = natural[start : start + count]
                part <<= width
                part |= _from_low_bits(stream[low:end], count, width)
            start += count
        sign = natural & 1
        natural >>= 1
        natural ^= np.negative(sign, out=sign)
        yield natural
    if len(stream) - at >= WORD or stream[at:].any():
        raise ValueError("the stream goes on behind its last row")


def rows_bits(rows: Sequence[Tensor]) -> int:
    """Bits of rows of whole numbers in code, beside their headers."""
    bits = 0
    for first, last in _together([len(row) for row in rows]):
        natural, starts = _natural(torch.cat(list(rows[first:last]))), _starts(rows[first:last])
        lengths = np.diff(starts, append=len(natural))
        found = _sizes(natural, starts, lengths)
        bits += int(found.min(0).sum() + lengths.sum())
    return bits


def _together(counts: Sequence[int], bits: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
    """First and last row, that one exclusive, of those that are worked on at a time; bits: of their unary parts"""
    first, numbers, size = 0, 0, 0
    for row, count in enumerate(counts):
        own = 0 if bits is None else bits[row]
        if row > first and (numbers + count > AT_A_TIME or size + own > MOST_BITS):
            yield first, row
            first, numbers, size = row, 0, 0
        numbers, size = numbers + count, size + own
    if len(counts):
        yield first, len(counts)


def _starts(rows: Sequence[Tensor]) -> Numbers:
    """Where each row begins in one array of all."""
    ends = np.cumsum([len(row) for row in rows])
    return np.concatenate([[0], ends[:-1]])


def _natural(values: Tensor) -> Numbers:
    whole = values.to(torch.int64).numpy()
    return (whole << 1) ^ (whole >> 63)


def _sizes(natural: Numbers, starts: Numbers, lengths: Numbers) -> Numbers:
    """Bits of each row with each width, `(WIDEST + 1, rows)`, without its ones; only near the best, else very many."""
    guess = np.log2(np.maximum(np.add.reduceat(natural, starts) / lengths, 1.0)).astype(np.int64)
    sizes = np.full((WIDEST + 1, len(starts)), np.iinfo(np.int64).max)
    for width in range(max(0, int(guess.min()) - 1), min(WIDEST, int(guess.max()) + 1) + 1):
        near = np.abs(guess - width) <= 1
        sizes[width, near] = (np.add.reduceat(natural >> width, starts) + lengths * width)[near]
    return sizes


def best_widths(natural: Numbers, starts: Numbers) -> list[int]:
    """Of each row the k with the fewest bits, sum (u >> k) + 1 + k, near the logarithm of the mean."""
    found: list[int] = _sizes(natural, starts, np.diff(starts, append=len(natural))).argmin(0).tolist()
    return found


def _unary(natural: Numbers, starts: Numbers, widths: Sequence[int]) -> list[Numbers]:
    """The unary part of each row, filled up to whole bytes."""
    found = []
    for start, stop, width in zip(starts, [*starts[1:], len(natural)], widths, strict=True):
        ends = np.cumsum((natural[start:stop] >> width) + 1)
        bits = np.zeros(int(ends[-1]), np.uint8)
        bits[ends - 1] = 1
        found.append(np.packbits(bits))
    return found


def _from_unary(parts: Sequence[Numbers], counts: Sequence[int], first: int) -> Numbers:
    """u >> k of all numbers of some rows; parts: the unary part of each, first: the number of the first row"""
    ends = np.flatnonzero(np.unpackbits(np.concatenate(parts)).view(bool))
    after = np.cumsum([0, *(8 * len(part) for part in parts)])
    places = np.cumsum([0, *counts])
    found = np.searchsorted(ends, after)
    if not np.array_equal(found, places):
        row = int(np.flatnonzero(found != places)[0]) - 1
        held = int(found[row + 1] - found[row])
        raise ValueError(f"row {first + row} holds {held} numbers instead of {counts[row]}")
    last = ends[places[1:] - 1]
    if bool((last < after[1:] - 8).any()):
        raise ValueError(f"row {first + int((last < after[1:] - 8).argmax())} holds bytes behind its last number")
    quotients = np.empty_like(ends)
    np.subtract(ends[1:], ends[:-1], out=quotients[1:])
    quotients -= 1
    quotients[places[:-1]] = ends[places[:-1]] - after[:-1]
    return quotients


def _low_bits(natural: Numbers, width: int) -> bytes:
    if width <= 8:
        bits = np.unpackbits((natural & ((1 << width) - 1)).astype(np.uint8)).reshape(-1, 8)
        return np.packbits(bits[:, 8 - width :]).tobytes()
    places = np.arange(width - 1, -1, -1)
    return np.packbits((natural[:, None] >> places & 1).astype(np.uint8)).tobytes()


def _from_low_bits(stream: Numbers, count: int, width: int) -> Numbers:
    """The `width` low bits of each number. Eight numbers fill `width` bytes, which are one word where they are few."""
    if width > WORD:
        bits = np.unpackbits(stream, count=count * width).reshape(count, width)
        low: Numbers = bits @ (1 << np.arange(width - 1, -1, -1))
        return low
    groups = -(-count // 8)
    filled = np.zeros((groups, WORD), np.uint8)
    whole = len(stream) // width
    filled[:whole, WORD - width :] = stream[: whole * width].reshape(whole, width)
    rest = stream[whole * width :]
    filled[whole:, WORD - width : WORD - width + len(rest)] = rest
    words = filled.view(">i8").astype(np.int64) >> np.arange(7, -1, -1) * width
    words &= (1 << width) - 1
    return words.reshape(-1)[:count]
