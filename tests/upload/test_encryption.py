"""Encrypted uploads: whole and unchanged, or refused in one line; only the right key reads them."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from hypothesis import given, settings
from hypothesis import strategies as st

from oneflare.errors import ConfigError, UploadError
from oneflare.upload.encryption import (
    MAGIC,
    PIECE,
    TAG,
    BoxKey,
    check_box_key,
    decrypt,
    encrypt,
    generate_box,
    is_encrypted,
    read_box,
)
from oneflare.upload.signing import generate, read_key

LIMIT = 1 << 24
HEAD = len(MAGIC) + 32


@pytest.fixture(scope="module")
def box(tmp_path_factory) -> BoxKey:
    return generate_box(tmp_path_factory.mktemp("box") / "coordinator.box")


def pieces(sealed: bytes) -> list[bytes]:
    body = sealed[HEAD:]
    return [body[start : start + PIECE + TAG] for start in range(0, len(body), PIECE + TAG)]


def refused(path, content: bytes, box: BoxKey) -> str:
    path.write_bytes(content)
    target = path.with_suffix(".plain")
    with pytest.raises(UploadError) as caught:
        decrypt(path, target, box, LIMIT)
    assert not target.exists()
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name]
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    return text


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_what_was_encrypted_is_decrypted_byte_for_byte(tmp_path, box, size):
    plain, sealed, opened = (tmp_path / name for name in ("plain", "sealed", "opened"))
    plain.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    encrypt(plain, sealed, box.public)
    assert is_encrypted(sealed)
    assert not is_encrypted(plain)
    decrypt(sealed, opened, box, LIMIT)
    assert opened.read_bytes() == plain.read_bytes()
    again = tmp_path / "again"
    encrypt(plain, again, box.public)
    assert again.read_bytes() != sealed.read_bytes()
    if size >= PIECE:
        assert plain.read_bytes()[:64] not in sealed.read_bytes()


def test_the_format_is_the_one_that_is_described(tmp_path):
    """Decrypted here with the primitives alone."""
    private = tmp_path / "box"
    box = generate_box(private)
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    plain.write_bytes(b"a" * PIECE + b"b" * 10)
    encrypt(plain, sealed, box.public)
    content, key = sealed.read_bytes(), load_pem_private_key(private.read_bytes(), None)
    ephemeral, own = content[len(MAGIC) : HEAD], key.public_key().public_bytes_raw()
    secret = key.exchange(X25519PublicKey.from_public_bytes(ephemeral))
    derived = HKDF(SHA256(), 32, salt=ephemeral + own, info=b"oneflare upload encryption 1").derive(secret)
    first, second = pieces(content)
    cipher = ChaCha20Poly1305(derived)
    assert cipher.decrypt(bytes(12), first, MAGIC) == b"a" * PIECE
    assert cipher.decrypt(bytes(10) + b"\x01\x01", second, MAGIC) == b"b" * 10


def test_every_change_is_refused(tmp_path, box):
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    plain.write_bytes(b"".join(bytes([number]) * PIECE for number in range(4)) + b"end")
    encrypt(plain, sealed, box.public)
    content = sealed.read_bytes()
    head, parts, place = content[:HEAD], pieces(content), tmp_path / "in" / "north.safetensors.encrypted"
    place.parent.mkdir()
    order = "put together in another order (piece 2)"
    assert order in refused(place, head + b"".join([parts[0], parts[2], parts[1], *parts[3:]]), box)
    assert order in refused(place, head + b"".join([parts[0], *parts[2:]]), box)
    assert "(piece 3)" in refused(place, head + b"".join([*parts[:2], parts[1], *parts[2:]]), box)
    for whole in range(1, 5):
        assert "cut short" in refused(place, head + b"".join(parts[:whole]), box)
    assert "cut short" in refused(place, content[:-1], box)
    assert "changed" in refused(place, content + b"x", box)
    assert "is cut short" in refused(place, content[: HEAD - 1], box)
    assert "is not an encrypted upload" in refused(place, b"x" + content, box)
    assert "was not encrypted to any key" in refused(place, MAGIC + bytes(32) + content[HEAD:], box)
    assert "to another key" in refused(place, content, generate_box(tmp_path / "other.box"))
    place.write_bytes(content)
    with pytest.raises(UploadError, match="more than an upload of this federation can have"):
        decrypt(place, tmp_path / "x", box, 1000)


@given(position=st.integers(0, 10**6), change=st.integers(1, 255))
@settings(max_examples=60)
def test_no_byte_can_be_changed(box, tmp_path_factory, position, change):
    folder = tmp_path_factory.mktemp("bytes")
    plain, sealed = folder / "plain", folder / "sealed"
    plain.write_bytes(b"statistics " * 300)
    encrypt(plain, sealed, box.public)
    content = bytearray(sealed.read_bytes())
    content[position % len(content)] ^= change
    sealed.write_bytes(bytes(content))
    with pytest.raises(UploadError):
        decrypt(sealed, folder / "opened", box, LIMIT)
    assert not (folder / "opened").exists()


def test_keys_for_signing_and_for_encryption_are_not_mixed_up(tmp_path, box):
    generate(tmp_path / "north.key", tmp_path / "north.pub")
    generate_box(tmp_path / "box")
    assert (tmp_path / "box").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="is not a key for encryption"):
        read_box(tmp_path / "north.key")
    with pytest.raises(ConfigError, match="is not an Ed25519 key"):
        read_key(tmp_path / "box")
    with pytest.raises(ConfigError, match="it starts with x25519:"):
        check_box_key((tmp_path / "north.pub").read_text().strip())
    assert check_box_key(box.public) == box.public
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        generate_box(tmp_path / "box")
    with pytest.raises(ConfigError, match="no key that can be encrypted to"):
        encrypt(tmp_path / "north.pub", tmp_path / "out", "x25519:" + "A" * 43 + "=")
