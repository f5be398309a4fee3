"""Shares of a secret: any t of them give it back, and t - 1 say nothing about it (Shamir 1979).

The secret s is the value at 0 of a random polynomial of degree t - 1 over the whole numbers modulo a prime P, and the
share of holder x is the value at x:

    share_x = s + a_1 x + ... + a_(t-1) x^(t-1),    s = sum_x share_x prod over z != x of z / (z - x)    (mod P).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**256 + 297
"""the smallest prime above 2^256"""
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """The shares of holders 1, 2, ... `holders`."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= holders:
        raise ValueError("a secret of 32 bytes is shared among at least as many holders as are needed to open it")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, holders + 1)]


def _value(coefficients: list[int], x: int) -> int:
    result = 0
    for coefficient in reversed(coefficients):
        result = (result * x + coefficient) % PRIME
    return result


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret from the shares of some holders; shares that do not belong together give another number.

    Where that number is no secret at all, a ValueError is raised.
    """
    total = 0
    for x, share in shares.items():
        above, below = 1, 1
        for z in shares:
            if z != x:
                above, below = above * z % PRIME, below * (z - x) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    secret = total % PRIME
    if secret >= 1 << (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong together")
    return secret.to_bytes(SECRET_BYTES, "big")
