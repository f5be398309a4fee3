"""Shares of a secret: any t give it back, t - 1 fit every secret."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneflare.upload.masking.shamir import PRIME, SHARE_BYTES, join, split


@given(
    st.binary(min_size=32, max_size=32),
    st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.randoms())),
)
def test_any_t_shares_give_the_secret_back(secret, shape):
    holders, threshold, random = shape
    shares = split(secret, threshold, holders)
    chosen = random.sample(range(1, holders + 1), random.randint(threshold, holders))
    assert all(len(share) == SHARE_BYTES for share in shares)
    assert join({x: shares[x - 1] for x in chosen}) == secret


@given(st.integers(0, 2**256 - 1), st.integers(2, 12))
def test_fewer_shares_fit_every_secret(other, threshold):
    """With t - 1 shares of one secret there is, for every other secret, exactly one last share that leads to it."""
    shares = split(bytes(32), threshold, threshold)
    known = {x: shares[x - 1] for x in range(1, threshold)}
    last = threshold
    weight = 1
    for z in known:
        weight = weight * z * pow(z - last, -1, PRIME) % PRIME
    rest = int.from_bytes(join(known | {last: shares[-1]}), "big") - int.from_bytes(shares[-1], "big") * weight
    forged = (other - rest) * pow(weight, -1, PRIME) % PRIME
    assert join(known | {last: forged.to_bytes(SHARE_BYTES, "big")}) == other.to_bytes(32, "big")


def test_the_modulus_is_prime():
    """Miller and Rabin with forty bases: a composite number passes with a chance below 2^-80."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(secrets.randbelow(PRIME - 3) + 2, odd, PRIME)
        squares = [x := x if power == 0 else x * x % PRIME for power in range(twos)]
        assert squares[0] == 1 or PRIME - 1 in squares


def test_shares_that_are_no_secret_together_are_refused():
    with pytest.raises(ValueError, match="belong together"):
        join({1: (PRIME - 1).to_bytes(SHARE_BYTES, "big")})
    with pytest.raises(ValueError, match="32 bytes"):
        split(bytes(31), 2, 3)
