"""X25519 keys, from which two members compute the masks that they share.

A key is made with the operating system's randomness. Its file belongs to the member alone, and may be locked with a
pass phrase.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneflare.errors import ConfigError
from oneflare.upload.signing import create_file, curve, key_bytes, key_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

PREFIX = "x25519:"


def _x25519() -> Any:
    return curve("x25519", "masked sums need")


class MaskKey:
    """A member's private key."""

    def __init__(self, key: X25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> MaskKey:
        return cls(_x25519().X25519PrivateKey.generate())

    @property
    def public(self) -> str:
        """`x25519:` and 44 letters, as the roster has it."""
        return key_text(self._key, PREFIX)

    def shared(self, public: str) -> bytes:
        """The 32 bytes that only the owners of both keys can compute."""
        return self._key.exchange(_public_key(public))

    def write(self, path: Path, pass_phrase: str | None = None) -> None:
        """Write the key to a new file that only its owner can read; an existing file is never overwritten."""
        from cryptography.hazmat.primitives.serialization import (
            BestAvailableEncryption,
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        lock = NoEncryption() if pass_phrase is None else BestAvailableEncryption(pass_phrase.encode())
        create_file(path, self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock), 0o600)


def check_mask_key(public: str) -> str:
    """Refuse what is no X25519 key, or one of the few with which every shared secret is the same."""
    try:
        MaskKey.generate().shared(public)
    except ValueError:
        raise ConfigError(f"'{public:.80}' is not a usable mask key; `oneflare client join` makes one") from None
    return public


def _public_key(public: str) -> X25519PublicKey:
    content = key_bytes(public, PREFIX, "`client join` makes one", "mask key")
    key: X25519PublicKey = _x25519().X25519PublicKey.from_public_bytes(content)
    return key


def key_problem(path: Path) -> str | None:
    """What is wrong with the file of a private key, as far as can be seen without its pass phrase; None: nothing."""
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}); restore it, or join again with another --mask folder"
    if stat.S_IMODE(mode) & 0o077:
        return f"{path} can be read by others, so its masks hide nothing; chmod 600 {path}, and better join again"
    return None if b"PRIVATE KEY-----" in content else f"{path} is not a private key; restore it, or join again"


def is_locked(path: Path) -> bool:
    """Whether a private key's file needs a pass phrase."""
    try:
        return b"ENCRYPTED" in path.read_bytes()
    except OSError:
        return False


def read_mask_key(path: Path, pass_phrase: str | None = None) -> MaskKey:
    """A private key that nobody but its owner may read."""
    problem = key_problem(path)
    if problem is not None:
        raise ConfigError(problem)
    x25519 = _x25519()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    phrase = pass_phrase.encode() if pass_phrase is not None and is_locked(path) else None
    try:
        key = load_pem_private_key(path.read_bytes(), password=phrase)
    except TypeError:
        raise ConfigError(f"{path} is locked with a pass phrase; set ONEFLARE_PASS_PHRASE or type it") from None
    except (ValueError, UnsupportedAlgorithm):
        what = "the pass phrase is wrong, or the file is damaged" if is_locked(path) else "the file is damaged"
        raise ConfigError(f"{path} cannot be opened: {what}") from None
    if not isinstance(key, x25519.X25519PrivateKey):
        raise ConfigError(f"{path} is not an X25519 key; `oneflare client join` makes one")
    return MaskKey(key)
