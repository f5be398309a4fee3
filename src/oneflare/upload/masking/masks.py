"""Seeds that two members share, streams of masks from them, and shares that one member alone can open.

    s_ij = HKDF-SHA256(X25519(i, j), salt = roster, info = both names),    PRG(s) = ChaCha20(s), read as 64-bit words.

The roster's digest covers the federation's terms and all keys, so the masks of two rosters have nothing in common. The
key that seals a share for its holder comes from the same secret with other words and the upload's own salt: a seed that
is released opens no share.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from oneflare.upload.masking.keys import MaskKey

BLOCK = 1 << 16
"""numbers whose masks are in memory at a time"""
SEED_BYTES = 32
SALT_BYTES = 32
TAG_BYTES = 16
Words = np.ndarray[Any, np.dtype[np.uint64]]


def _derived(secret: bytes, salt: bytes, *words: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"oneflare masks\0" + "\0".join(words).encode()
    return HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=salt, info=info).derive(secret)


def pair_seed(own: MaskKey, other: str, roster: str, names: tuple[str, str]) -> bytes:
    """s_ij, the same for both of the pair; other: the public key of the other one."""
    return _derived(own.shared(other), bytes.fromhex(roster), "pair", *sorted(names))


def add_stream(vector: Words, seed: bytes, sign: int = 1) -> None:
    """Add PRG(seed) to the vector in place, or take it off where sign is -1, modulo 2^64."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    cipher = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()  # every seed is used for one stream
    zeros = memoryview(bytes(8 * min(BLOCK, len(vector))))
    for start in range(0, len(vector), BLOCK):
        part = vector[start : start + BLOCK]
        stream = np.frombuffer(cipher.update(zeros[: 8 * len(part)]), dtype="<u8")
        (np.add if sign > 0 else np.subtract)(part, stream, out=part)


def commitment(kind: str, content: bytes) -> str:
    """A digest by which a secret is recognised later; 32 random bytes cannot be guessed from it."""
    return hashlib.sha256(f"oneflare {kind}\0".encode() + content).hexdigest()


def seal_share(own: MaskKey, other: str, roster: str, salt: bytes, names: tuple[str, str], share: bytes) -> bytes:
    """A share that only its holder can open; names: from whom, for whom. The holder knows that `own` sealed it."""
    key, words = _share_key(own, other, roster, salt, names)
    return bytes(_aead(key).encrypt(bytes(12), share, words))  # a key is used once: the salt is the upload's own


def open_share(own: MaskKey, other: str, roster: str, salt: bytes, names: tuple[str, str], sealed: bytes) -> bytes:
    """The share that `other` sealed for the owner of `own`; a ValueError where it was sealed otherwise."""
    from cryptography.exceptions import InvalidTag

    key, words = _share_key(own, other, roster, salt, names)
    try:
        return bytes(_aead(key).decrypt(bytes(12), sealed, words))
    except InvalidTag:
        raise ValueError("the share was sealed with another key, for another roster, or was altered") from None


def _share_key(own: MaskKey, other: str, roster: str, salt: bytes, names: tuple[str, str]) -> tuple[bytes, bytes]:
    words = ("share", *names)
    return _derived(own.shared(other), bytes.fromhex(roster) + salt, *words), "\0".join(words).encode()


def _aead(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key)
