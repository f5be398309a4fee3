"""Signs a model, its card, its thresholds and the result with the coordinator's key, and checks such signatures.

`model.safetensors.sig` is one JSON object: what kind of file was signed, for which federation, when, its SHA-256, the
public key, where the federation's log ended then, and an Ed25519 signature over the digest of all of these.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneflare.core.files import digest_of, read_regular, write_json
from oneflare.core.plain import plain
from oneflare.core.strict import strict_json
from oneflare.errors import RunError
from oneflare.upload.signing import SigningKey, verify

SUFFIX = ".sig"
MODELS = "models"
MESSAGE = b"oneflare file "
SIZE_LIMIT = 10_000
WITHOUT = "none"
"""in the place of a digest: the coordinator chose no thresholds for this model"""
LATER = ("log", "thresholds")
"""fields that signatures of earlier versions do not have"""
KINDS = ("model", "card", "result", "thresholds")


@dataclass(frozen=True)
class Seal:
    """Who vouches for a file, and as what."""

    kind: str
    file: str
    """its place in the federation's folder"""
    federation: str
    """fingerprint of the terms"""
    signed: str
    """when, UTC"""
    sha256: str
    key: str
    log: str = ""
    """where the federation's log ended then, so that whoever keeps this signature notices if lines go missing"""
    thresholds: str = ""
    """of a model: SHA-256 of the thresholds that belong to it, or `WITHOUT`"""

    @property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def content(self) -> dict[str, str]:
        """Without what is not known, as in signatures of earlier versions."""
        return {name: value for name, value in asdict(self).items() if value or name not in LATER}


def seal_path(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def seal(path: Path, key: SigningKey, *, kind: str, federation: str, signed: str, **more: str) -> Path:
    """Sign a file as it is now; the signature is written beside it. more: `log` and `thresholds` of `Seal`"""
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    made = Seal(kind, _place(path), federation, signed, sha256, key.public, **more)
    write_json(seal_path(path), made.content | {"signature": key.sign(made.digest, MESSAGE)})
    return seal_path(path)


def stated_thresholds(path: Path) -> str:
    """Which thresholds belong to a model by its signature, which is not checked here; empty where it does not say."""
    return _read(seal_path(path))[0].thresholds if seal_path(path).exists() else ""


def check_seal(path: Path, content: bytes, public: str, kind: str, federation: str | None = None) -> Seal:
    """Refuse bytes that the owner of `public` has not signed as this kind of file of this federation.

    path: where the bytes come from; the signature is the file beside it. With a federation, the path is taken to be in
    its folder, where the file must also have the place that it was signed for.
    """
    place = seal_path(path)
    if not place.exists():
        raise RunError(f"{path}: is not signed, although the coordinator's key is known; ask for it with {place.name}")
    made, signature = _read(place)
    if made.key != public or not verify(public, signature, made.digest, MESSAGE):
        raise RunError(f"{path}: is not signed by the coordinator's key {public}; ask the coordinator for it again")
    if made.sha256 != hashlib.sha256(content).hexdigest():
        raise RunError(f"{path}: was changed after the coordinator signed it; ask the coordinator for the file again")
    if made.kind != kind or federation not in (None, made.federation):
        what = f"a {made.kind}" if made.kind != kind else "a model of another federation"
        raise RunError(f"{path}: the coordinator signed it as {what}; ask the coordinator for the right file")
    if federation is not None and made.file != _place(path):
        raise RunError(
            f"{path}: the coordinator signed it as {plain(made.file, 80)}, not as {_place(path)}; fuse again"
        )
    return made


def _place(path: Path) -> str:
    """A federation's models lie in its folder, or in the folder `models` there."""
    return f"{MODELS}/{path.name}" if path.parent.name == MODELS else path.name


def log_position(place: Path, public: str) -> str:
    """Where the log ended when the owner of `public` made the signature in this file; empty where it does not say."""
    made, signature = _read(place)
    if made.key != public or not verify(public, signature, made.digest, MESSAGE):
        raise RunError(f"{place}: is not signed by the coordinator's key {public}; give the file that you received")
    return made.log


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _read(place: Path) -> tuple[Seal, str]:
    damaged = RunError(f"{place}: is not a signature of a OneFlare coordinator; ask for the file again")
    try:
        content: Any = strict_json(read_regular(place, SIZE_LIMIT))
    except ValueError:
        raise damaged from None
    fields = {*Seal.__dataclass_fields__, "signature"}
    if not isinstance(content, dict) or {*content, *LATER} != fields or not all(map(_text, content.values())):
        raise damaged
    signature = content.pop("signature")
    return Seal(**content), signature
