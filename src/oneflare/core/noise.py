"""Exact discrete noise for differential privacy, drawn from the operating system's randomness.

Only a simulation that sets a seed draws from that seed (`SeededWords`); such noise hides nothing.

The samplers are Algorithms 1 to 3 of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy"
(NeurIPS 2020, arXiv:2004.00010), over whole arrays. Its Section 5 proves that the output has exactly the stated law,
given fair bits and coins of probability exp(-g); `discrete_gaussian` says where ours differs.

Such a coin asks whether a uniform real U is below exp(-g). The first 64 bits of U and a double-precision exp(-g)
answer that wherever the two are further apart than `TOLERANCE`, which is thousands of times more than both can be
wrong (g is a quotient of integers, computed to a relative 2^-50; numpy's exp errs by a few units in the last place).
Otherwise, about once in 10^11 coins, U is continued bit by bit against bounds of exp(-g) in exact arithmetic until the
answer is certain. No result is ever rounded, so floating-point leaks nothing (Mironov, CCS 2012). How long a draw
takes is not hidden.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np

Words = Callable[[int], "np.ndarray[Any, np.dtype[np.uint64]]"]
"""a number -> as many uniform 64-bit words"""
Integers = np.ndarray[Any, np.dtype[np.int64]]

TOLERANCE = 2.0**-40
AT_ONCE = 1 << 20
"""samples that are drawn at a time"""
LARGEST = 1 << 52
"""largest scale: samples stay far below 2^63"""


def system_words(number: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Uniform words from the operating system, which nobody can draw again."""
    return np.frombuffer(os.urandom(8 * number), dtype=np.uint64)


class SeededWords:
    """Words that follow from a seed (SHAKE-256 of it and a counter), for simulations: noise from here hides nothing."""

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self.name = "/".join(["oneflare noise", str(seed), *map(str, purpose)])
        self.calls = 0

    def __call__(self, number: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        self.calls += 1
        stream = hashlib.shake_256(f"{self.name}/{self.calls}".encode())
        return np.frombuffer(stream.digest(8 * number), dtype=np.uint64)


def noise_words(seed: int | None, *purpose: str | int) -> Words:
    """The operating system's words, or those of a simulation that set a seed."""
    return system_words if seed is None else SeededWords(seed, *purpose)


def discrete_gaussian(number: int, sigma: int, words: Words) -> Integers:
    """`(number,)` independent integers x with probability proportional to exp(-x^2 / (2 sigma^2)).

    Algorithm 3 draws y from the discrete Laplace of a scale t and keeps it with probability
    exp(-(|y| - sigma^2/t)^2 / (2 sigma^2)), where the paper has t = floor(sigma) + 1. Here t = sigma, an integer: the
    product exp(-|y|/t) exp(-(|y| - sigma^2/t)^2 / (2 sigma^2)) is proportional to exp(-y^2 / (2 sigma^2)) for any t.
    """

    def propose(some: int) -> Integers:
        drawn = discrete_laplace(some, sigma, 1, words)
        away = np.abs(drawn) - sigma

        def exact(index: int) -> Fraction:
            return Fraction(int(away[index]) ** 2, 2 * sigma**2)

        kept: Integers = drawn[_coins((away / sigma) ** 2 / 2, exact, words)]
        return kept

    return _filled(number, propose)


def discrete_laplace(number: int, scale: int, step: int, words: Words) -> Integers:
    """`(number,)` independent integers x with probability proportional to exp(-|x| step / scale).

    Algorithm 2: u uniform below `scale`, kept with probability exp(-u/scale); v geometric, P(v) ~ exp(-v); then
    |x| = floor((u + scale v) / step) with a fair sign, where -0 is drawn again.
    """
    if not 1 <= scale <= LARGEST:
        raise ValueError(f"a scale of {scale} is not between 1 and 2^52")

    def offsets(some: int) -> Integers:
        drawn = _filled(some, lambda missing: _below(scale, missing, words))
        kept: Integers = drawn[_coins(drawn / scale, lambda index: Fraction(int(drawn[index]), scale), words)]
        return kept

    def propose(some: int) -> Integers:
        size = (_filled(some, offsets) + scale * _geometric(some, words)) // step
        negative = (words(some) & np.uint64(1)).astype(bool)
        kept: Integers = np.where(negative, -size, size)[~(negative & (size == 0))]
        return kept

    return _filled(number, propose)


def _filled(number: int, propose: Callable[[int], Integers]) -> Integers:
    """Proposals until there are enough; each proposal returns the independent samples that it kept."""
    parts, missing = [np.empty(0, dtype=np.int64)], number
    while missing > 0:
        parts.append(propose(min(missing, AT_ONCE)))
        missing -= len(parts[-1])
    return np.concatenate(parts)


def _below(limit: int, number: int, words: Words) -> Integers:
    """Uniform integers from 0 to limit - 1, at most `number`: what is drawn beyond the limit is dropped."""
    bits = (limit - 1).bit_length()
    if bits == 0:
        return np.zeros(number, dtype=np.int64)
    drawn = (words(number) >> np.uint64(64 - bits)).astype(np.int64)
    return drawn[drawn < limit]


def _geometric(number: int, words: Words) -> Integers:
    """How often a coin of probability 1/e shows heads before its first tails."""
    heads = np.zeros(number, dtype=np.int64)
    going = np.arange(number)
    while len(going):
        going = going[_coins(np.ones(len(going)), lambda _: Fraction(1), words)]
        heads[going] += 1
    if number and int(heads.max()) > 1000:
        raise ArithmeticError("1000 heads in a row; the source of randomness is broken")
    return heads


def _coins(
    exponents: np.ndarray[Any, np.dtype[np.float64]], exact: Callable[[int], Fraction], words: Words
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Independent coins that show heads with probability exp(-g).

    exponents: g to a relative 2^-50. exact: the index of a coin -> its g.
    """
    drawn = words(len(exponents))
    uniform = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
    chance = np.exp(-exponents)
    heads: np.ndarray[Any, np.dtype[np.bool_]] = uniform < chance
    for index in np.flatnonzero(np.abs(uniform - chance) <= TOLERANCE).tolist():
        heads[index] = _certain_coin(int(drawn[index]), exact(index), words)
    return heads


def _certain_coin(word: int, exponent: Fraction, words: Words) -> bool:
    """Whether the uniform real that begins with these 64 bits is below exp(-exponent); more bits as they are needed."""
    value, bits = word, 64
    while True:
        low, high = _exp_bounds(exponent, bits)
        if Fraction(value + 1, 1 << bits) <= low:
            return True
        if Fraction(value, 1 << bits) >= high:
            return False
        value, bits = value << 64 | int(words(1)[0]), bits + 64


def _exp_bounds(exponent: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """low <= exp(-exponent) <= high, closer than 2^-bits; the decimal module rounds quotient and exp correctly."""
    if exponent == 0:
        return Fraction(1), Fraction(1)
    with localcontext() as context:
        context.prec = math.ceil(0.302 * bits) + len(str(math.ceil(exponent))) + 5
        value = Fraction((-(Decimal(exponent.numerator) / Decimal(exponent.denominator))).exp())
        slack = (exponent + 2) / 10 ** (context.prec - 1)
    return value - slack, value + slack
