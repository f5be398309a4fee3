"""The coordinator's key: signs what a fusion gives, and checks a model against the charter or the key.

The private key lies in the federation's folder and stays there; the public one is in the charter, whose fingerprint
covers it, so members who compared the fingerprint know the key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from oneflare.errors import ConfigError
from oneflare.federation.charter import FILE, Charter, read_charter
from oneflare.federation.log import end_of
from oneflare.federation.result import FederationResult
from oneflare.models.decisions import KIND as THRESHOLDS
from oneflare.models.decisions import decision_path
from oneflare.models.sealing import MODELS, SUFFIX, WITHOUT, seal
from oneflare.upload.signing import SigningKey, can_sign, generate, public_key_of, read_key

PRIVATE, PUBLIC = "coordinator.key", "coordinator.pub"


@dataclass(frozen=True)
class TrustedKey:
    """A public key against which models are checked, and where it is known from."""

    key: str
    source: str
    federation: str | None = None
    """fingerprint that a signature must be for; None: any"""


def make_key(folder: Path) -> str | None:
    """A key pair for a new federation, or the one that is there; None where signatures are not installed."""
    if not can_sign():
        return None
    private = folder / PRIVATE
    return (read_key(private) if private.exists() else generate(private, folder / PUBLIC)).public


def coordinator_key(charter: Charter, folder: Path) -> SigningKey | None:
    """The private key that belongs to the charter; None if the charter names none, or if it is not here."""
    private = folder / PRIVATE
    if charter.coordinator is None or not private.exists():
        return None
    key, wanted = read_key(private), charter.signing_key
    if key.public != wanted:
        raise ConfigError(
            f"{private} is not the key of {wanted} in {FILE}; put the right one there, or finish what "
            f"`oneflare server rotate {folder}` began by giving that command again"
        )
    return key


def sign_fusion(charter: Charter, folder: Path, content: FederationResult) -> str | None:
    """Sign every model and the result of a fusion; a line for the coordinator says why, where that cannot be done."""
    for old in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"{MODELS}/*{SUFFIX}")):
        old.unlink()
    key = coordinator_key(charter, folder)
    if key is None and charter.coordinator is None:
        return f"note: the model is not signed, because {FILE} names no key of the coordinator"
    if key is None:
        return (
            f"warning: the model is not signed, because {folder / PRIVATE} is missing; members who have {FILE} will "
            "refuse it. Put the key there and fuse again"
        )
    words = {"federation": charter.fingerprint, "signed": content.fused, "log": end_of(folder)}
    for made in content.fusions.values():
        seal(folder / made.model, key, kind="model", **words)
    seal(folder / "result.json", key, kind="result", **words)
    sign_thresholds(charter, folder, content)
    return None


def sign_thresholds(charter: Charter, folder: Path, content: FederationResult) -> None:
    """Sign the thresholds beside the model in use, and in the model's signature that they, or none, belong to it."""
    model, key = folder / content.own.model, coordinator_key(charter, folder)
    if key is None:
        return
    path, stated = decision_path(model), WITHOUT
    words = {"federation": charter.fingerprint, "signed": content.fused}
    if path.exists():
        seal(path, key, kind=THRESHOLDS, **words)
        stated = hashlib.sha256(path.read_bytes()).hexdigest()
    seal(model, key, kind="model", **words, log=end_of(folder), thresholds=stated)


def sign_card(charter: Charter, card: Path, content: FederationResult) -> None:
    key = coordinator_key(charter, card.parent)
    if key is not None:
        seal(card, key, kind="card", federation=charter.fingerprint, signed=content.fused)


def known_key(file: Path, given: str | None) -> TrustedKey | None:
    """The key to check a file with: the given one (itself or its file), else that of the charter beside the file."""
    if given is not None:
        return TrustedKey(public_key_of(given), "--key")
    folder = federation_of(file)
    if not (folder / FILE).is_file():
        return None
    charter = read_charter(folder)
    key = charter.signing_key
    if key is None:
        return None
    return TrustedKey(key, str(folder / FILE), charter.fingerprint)


def federation_of(file: Path) -> Path:
    """The folder in which a federation's charter lies, if the file is one of its models or belongs to a version."""
    folder = file.parent.parent if file.parent.name == MODELS else file.parent
    version = folder.parent.name == MODELS and folder.name.isdecimal()
    return folder.parent.parent if version else folder
