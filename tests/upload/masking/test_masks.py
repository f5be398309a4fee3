"""Masks against the published ciphers, and that only the two of a pair know theirs."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest

from oneflare.errors import ConfigError
from oneflare.upload.masking.keys import MaskKey, check_mask_key, read_mask_key
from oneflare.upload.masking.masks import BLOCK, add_stream, open_share, pair_seed, seal_share

ROSTER, OTHER = "ab" * 32, "cd" * 32


def test_the_stream_is_the_published_one():
    """RFC 8439, A.1, first vector: the key stream of a key and a nonce of zeros."""
    vector = np.zeros(8, dtype=np.uint64)
    add_stream(vector, bytes(32))
    stated = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert vector.astype("<u8").tobytes().hex() == stated


def test_what_is_added_is_taken_off_over_many_blocks():
    start = np.random.default_rng(0).integers(0, 2**64, 3 * BLOCK + 17, dtype=np.uint64)
    vector, zeros = start.copy(), np.zeros_like(start)
    add_stream(vector, b"k" * 32)
    add_stream(zeros, b"k" * 32)
    assert np.array_equal(vector, start + zeros)
    assert len(np.unique(zeros)) == len(zeros)
    add_stream(vector, b"k" * 32, -1)
    assert np.array_equal(vector, start)


def test_a_seed_is_the_same_for_both_and_another_for_everything_else():
    a, b, c = (MaskKey.generate() for _ in range(3))
    seed = pair_seed(a, b.public, ROSTER, ("a", "b"))
    assert seed == pair_seed(b, a.public, ROSTER, ("b", "a"))
    others = [
        pair_seed(a, c.public, ROSTER, ("a", "b")),
        pair_seed(a, b.public, OTHER, ("a", "b")),
        pair_seed(a, b.public, ROSTER, ("a", "c")),
    ]
    assert len({seed, *others}) == 4
    key = hmac.new(bytes.fromhex(ROSTER), a.shared(b.public), hashlib.sha256).digest()  # RFC 5869
    assert seed == hmac.new(key, b"oneflare masks\0pair\0a\0b\1", hashlib.sha256).digest()


def test_a_share_opens_for_its_holder_alone():
    a, b, c = (MaskKey.generate() for _ in range(3))
    salt, share = b"s" * 32, b"x" * 33
    sealed = seal_share(a, b.public, ROSTER, salt, ("a", "b"), share)
    assert open_share(b, a.public, ROSTER, salt, ("a", "b"), sealed) == share
    wrong = [
        (c, a.public, ROSTER, salt, ("a", "b"), sealed),
        (b, c.public, ROSTER, salt, ("a", "b"), sealed),
        (b, a.public, OTHER, salt, ("a", "b"), sealed),
        (b, a.public, ROSTER, b"t" * 32, ("a", "b"), sealed),
        (b, a.public, ROSTER, salt, ("b", "a"), sealed),
        (b, a.public, ROSTER, salt, ("a", "b"), sealed[:-1] + bytes([sealed[-1] ^ 1])),
    ]
    for words in wrong:
        with pytest.raises(ValueError, match="another key"):
            open_share(*words)


@pytest.mark.parametrize("key", ["x25519:" + "A" * 43 + "=", "x25519:AQ==", "ed25519:abc", "x25519:" + "é" * 44])
def test_keys_that_share_the_same_secret_with_everybody_are_refused(key):
    with pytest.raises(ConfigError, match="mask key"):
        check_mask_key(key)


def test_key_files_are_private_and_may_be_locked(tmp_path):
    key = MaskKey.generate()
    plain, locked = tmp_path / "plain.key", tmp_path / "locked.key"
    key.write(plain)
    key.write(locked, "open sesame")
    assert plain.stat().st_mode & 0o777 == 0o600
    assert read_mask_key(plain).public == read_mask_key(locked, "open sesame").public == key.public
    with pytest.raises(ConfigError, match="not overwritten"):
        key.write(plain)
    with pytest.raises(ConfigError, match="locked with a pass phrase"):
        read_mask_key(locked)
    with pytest.raises(ConfigError, match="pass phrase is wrong"):
        read_mask_key(locked, "wrong")
    plain.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_mask_key(plain)
    locked.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a private key"):
        read_mask_key(locked, "open sesame")
