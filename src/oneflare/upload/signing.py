"""Names and Ed25519 keys of members and coordinators.

A private key stays in a file only its owner may read; a public one is a line.

What is signed is the upload's digest, which covers everything else in the upload, behind a fixed prefix, so that a
signature made here means nothing elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneflare.core.files import read_regular
from oneflare.errors import ConfigError, RunError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

PREFIX = "ed25519:"
MESSAGE = b"oneflare upload "
KEY_BYTES = 32
KEY_FILE_LIMIT = 10_000
"""bytes of a file with a public key"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} cannot be a name; use up to 64 letters, digits, '.', '_' and '-'")
    return name


def curve(name: str, purpose: str) -> Any:
    """The part of the package cryptography for ed25519 or x25519; purpose: what is said to need it."""
    try:
        return importlib.import_module(f"cryptography.hazmat.primitives.asymmetric.{name}")
    except ImportError:
        raise ConfigError(f"{purpose} the package cryptography; pip install 'oneflare[sign]'") from None


def _ed25519() -> Any:
    return curve("ed25519", "signatures need")


def can_sign() -> bool:
    """Whether the package for signatures is installed."""
    try:
        _ed25519()
    except ConfigError:
        return False
    return True


def key_text(key: Ed25519PrivateKey | X25519PrivateKey, prefix: str) -> str:
    """The public half of a key as one word; `key_bytes` reads it."""
    return prefix + base64.b64encode(key.public_key().public_bytes_raw()).decode()


class SigningKey:
    """The private key of a member or a coordinator."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public(self) -> str:
        """`ed25519:` and 44 letters, as federation.yaml has it."""
        return key_text(self._key, PREFIX)

    def sign(self, digest: str, message: bytes = MESSAGE) -> str:
        """message: what kind of thing the digest is of; a signature for one kind does not hold for another"""
        return base64.b64encode(self._key.sign(message + digest.encode())).decode()


def verify(public: str, signature: str, digest: str, message: bytes = MESSAGE) -> bool:
    """Whether the owner of `public` signed this digest as that kind of thing."""
    key = _ed25519().Ed25519PublicKey.from_public_bytes(_key_bytes(public))
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(signature, validate=True), message + digest.encode())
    except (InvalidSignature, binascii.Error, ValueError):
        return False
    return True


def key_bytes(public: str, prefix: str, made: str, kind: str = "public key") -> bytes:
    """The 32 bytes of a public key that is written as `prefix` and base64. made: which command prints such keys"""
    try:
        content = base64.b64decode(public.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError):
        content = b""
    if not public.startswith(prefix) or len(content) != KEY_BYTES:
        raise ConfigError(f"'{public:.80}' is not a {kind}; it starts with {prefix} and {made}")
    return content


def _key_bytes(public: str) -> bytes:
    return key_bytes(public, PREFIX, "`client keygen` prints it")


def check_public_key(public: str) -> str:
    _key_bytes(public)
    return public


def public_key_of(text: str) -> str:
    """A public key given as itself or as the file that `client keygen` wrote."""
    if text.startswith(PREFIX):
        return check_public_key(text)
    try:
        words = read_regular(Path(text), KEY_FILE_LIMIT).decode().split()
    except (RunError, UnicodeDecodeError):
        raise ConfigError(f"'{text}' is neither a public key ({PREFIX}...) nor a file with one") from None
    if "PRIVATE" in words:
        raise ConfigError(f"{text} is a private key; it stays with its member, who sends the file that ends in .pub")
    return check_public_key(words[0] if words else "")


def generate(private: Path, public: Path) -> SigningKey:
    """Make a key pair and write both files; existing ones are never overwritten."""
    for path in (private, public):
        if path.exists():
            raise ConfigError(f"{path} exists and is not overwritten; choose another name or folder")
    raw = _ed25519().Ed25519PrivateKey.generate()
    key = SigningKey(raw)
    create_private(private, raw)
    create_file(public, f"{key.public}\n".encode(), 0o644)
    return key


def create_private(path: Path, key: Any) -> None:
    """A new file with a private key of the package cryptography, which only its owner may read."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    create_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)


def create_file(path: Path, content: bytes, mode: int) -> None:
    """A new file, whole or not at all, that is never readable by others in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, it fails where the name is taken
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another name or folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def read_key(path: Path) -> SigningKey:
    """A private key that nobody but its owner may read."""
    key = read_private(path, "`client keygen` makes one")
    if not isinstance(key, _ed25519().Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key; make one with `client keygen`")
    return SigningKey(key)


def read_private(path: Path, made: str) -> Any:
    """A private key of any kind that nobody but its owner may read. made: which command makes such keys"""
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}; {made}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path} can be read by others, so its signature proves nothing; chmod 600 {path}")
    _ed25519()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} is not a private key; {made}") from None
