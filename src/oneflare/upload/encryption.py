"""Uploads that only the coordinator can read: encrypted to its X25519 key, piece by piece.

The file begins with a fixed line and a public key made for this file alone. Its shared secret with the coordinator's
key goes through HKDF-SHA256, whose salt is both public keys, and gives the key of ChaCha20-Poly1305. The content is
in pieces of 64 KiB, each with its own tag; the nonce is the piece's number and whether it is the last one. Whoever
changes, drops, repeats, reorders or appends pieces, or cuts the file short, therefore makes a piece that does not
decrypt (the construction STREAM of Hoang, Reyhanitabar, Rogaway and Vizard 2015). Every primitive is the package
`cryptography`'s. Encryption says nothing about who made an upload: the signature inside does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from oneflare.core.files import open_regular, writing
from oneflare.errors import ConfigError, UploadError
from oneflare.upload.signing import create_private, curve, key_bytes, key_text, read_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

PREFIX = "x25519:"
SUFFIX = ".encrypted"
MAGIC = b"OneFlare encrypted upload 1\n"
INFO = b"oneflare upload encryption 1"
PIECE, TAG, KEY_BYTES = 1 << 16, 16, 32


def _x25519() -> Any:
    return curve("x25519", "encryption needs")


def check_box_key(public: str) -> str:
    """Refuse what is no public key for encryption."""
    _public_bytes(public)
    return public


def _public_bytes(public: str) -> bytes:
    return key_bytes(public, PREFIX, "`oneflare server init --encrypt` makes it")


class BoxKey:
    """The coordinator's private key, with which uploads are decrypted."""

    def __init__(self, key: X25519PrivateKey) -> None:
        self._key = key

    @property
    def public(self) -> str:
        """`x25519:` and 44 letters, as federation.yaml has it."""
        return key_text(self._key, PREFIX)

    def shared(self, theirs: bytes) -> bytes:
        return self._key.exchange(_x25519().X25519PublicKey.from_public_bytes(theirs))


def generate_box(private: Path) -> BoxKey:
    """Make a private key for decryption, in a file that only its owner may read."""
    raw = _x25519().X25519PrivateKey.generate()
    create_private(private, raw)
    return BoxKey(raw)


def read_box(path: Path) -> BoxKey:
    key = read_private(path, "`oneflare server init --encrypt` makes one")
    if not isinstance(key, _x25519().X25519PrivateKey):
        raise ConfigError(f"{path} is not a key for encryption; `oneflare server init --encrypt` makes one")
    return BoxKey(key)


def _cipher(secret: bytes, ephemeral: bytes, recipient: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return ChaCha20Poly1305(HKDF(SHA256(), 32, salt=ephemeral + recipient, info=INFO).derive(secret))


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _pieces(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """Number, content and whether it is the last one; an empty file is one empty piece."""
    piece, number = file.read(size), 0
    while True:
        following = file.read(size)
        yield number, piece, not following
        if not following:
            return
        piece, number = following, number + 1


def encrypt(source: Path, target: Path, recipient: str) -> None:
    """Write `source` so that only the owner of the public key `recipient` can read it; the file appears whole."""
    theirs = _public_bytes(recipient)
    own = _x25519().X25519PrivateKey.generate()
    ephemeral = own.public_key().public_bytes_raw()
    try:
        secret = own.exchange(_x25519().X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise ConfigError(f"'{recipient:.80}' is no key that can be encrypted to; ask for the charter again") from None
    cipher = _cipher(secret, ephemeral, theirs)
    with source.open("rb") as file, writing(target) as out:
        out.write(MAGIC + ephemeral)
        for number, piece, last in _pieces(file, PIECE):
            out.write(cipher.encrypt(_nonce(number, last), piece, MAGIC))


def is_encrypted(path: Path) -> bool:
    """Whether a file begins like an encrypted upload; what cannot be read is none."""
    try:
        with open_regular(path, UploadError) as (file, _):
            return file.read(len(MAGIC)) == MAGIC
    except UploadError:
        return False


def decrypt(source: Path, target: Path, key: BoxKey, size_limit: int) -> None:
    """Write what was encrypted; a file that is not whole and unchanged is refused, and nothing is written."""
    from cryptography.exceptions import InvalidTag

    with open_regular(source, UploadError, "uploads must be regular files") as (file, size):
        if size > size_limit + size_limit // PIECE * TAG + 1024:
            raise UploadError(f"{source}: has {size:,} bytes, more than an upload of this federation can have")
        if file.read(len(MAGIC)) != MAGIC:
            raise UploadError(f"{source}: is not an encrypted upload of OneFlare; send it again")
        ephemeral = file.read(KEY_BYTES)
        if len(ephemeral) < KEY_BYTES:
            raise UploadError(f"{source}: is cut short; send it again")
        try:
            cipher = _cipher(key.shared(ephemeral), ephemeral, _public_bytes(key.public))
        except ValueError:
            raise UploadError(f"{source}: was not encrypted to any key; send it again") from None
        with writing(target) as out:
            for number, piece, last in _pieces(file, PIECE + TAG):
                try:
                    out.write(cipher.decrypt(_nonce(number, last), piece, MAGIC))
                except InvalidTag:
                    raise UploadError(f"{source}: {_why(number)}; send it again") from None


def _why(number: int) -> str:
    if number == 0:
        return "was encrypted to another key than this federation's, or was changed or cut short on its way"
    return f"was changed, cut short or put together in another order (piece {number + 1})"
