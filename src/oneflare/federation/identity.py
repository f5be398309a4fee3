"""Establishes who an upload is from: it ties each name to a client number, a key and a Flower node.

Every way by which uploads come in (files in a folder, replies of Flower's nodes) asks `identify`. Whoever is later
suspected, removed or missed is named by what it answers, never by what a file says about itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from oneflare.core.plain import plain
from oneflare.errors import ConfigError, UploadError
from oneflare.federation.charter import Charter, short
from oneflare.upload.signing import MESSAGE, check_name, verify

CLOCK_TOLERANCE = timedelta(minutes=10)
"""how far a member's clock may be ahead of the coordinator's"""


@dataclass(frozen=True)
class Sender:
    """The member that an upload is from, as far as the federation can tell."""

    member: str
    client: int
    """the member's number in this federation: the upload's own number is the same, or it is refused"""
    created: datetime
    key: str | None
    """that signed the upload; None: it is not signed, and the charter asks for no key of this member"""


def identify(path: Path, manifest: Mapping[str, Any], charter: Charter, carrier: str | None = None) -> Sender:
    """Who made an upload, and when; an upload whose name, number, key and carrier do not agree is refused.

    manifest: of the upload, known to match its digest. carrier: the member whose connection delivered the upload,
    where the connection itself proves that (a Flower node whose key the charter knows); None for files.
    """
    federation = manifest.get("federation")
    if federation != charter.fingerprint:
        made_for = short(federation) if isinstance(federation, str) and federation.isalnum() else "unknown"
        raise UploadError(
            f"{path}: was made for another federation or other terms ({made_for}, not {short(charter.fingerprint)})"
        )
    member = manifest.get("member")
    if member is None:
        raise UploadError(f"{path}: carries no member's name; make it with `oneflare client train`")
    try:
        charter.check_member(check_name(member))
    except ConfigError as error:
        raise UploadError(f"{path}: {error}") from None
    if carrier is not None and carrier != member:
        raise UploadError(f"{path}: came from {carrier}'s node, but says that it is from {member}; each sends its own")
    key = _signed_by(path, manifest, charter, member)
    client = charter.client(member)
    if manifest.get("client") != client or isinstance(manifest.get("client"), bool):
        raise UploadError(
            f"{path}: has client number {plain(manifest.get('client'), 40)}, but {member}'s is {client}; "
            f"somebody altered it, or it was trained under another name: {member} must train again"
        )
    return Sender(member, client, dated(path, manifest.get("created"), TRAIN_AGAIN), key)


def now() -> str:
    """This moment, as uploads and results are dated."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def in_future(moment: datetime) -> bool:
    """Whether no clock that is nearly right can have shown this moment yet."""
    return moment > datetime.now(UTC) + CLOCK_TOLERANCE


def moment_of(created: Any) -> datetime | None:
    """A date that somebody else wrote, in UTC; None where it is no moment, or one that UTC's calendar does not have."""
    try:
        moment = datetime.fromisoformat(created)
        return None if moment.tzinfo is None else moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def dated(path: Path, created: Any, again: str) -> datetime:
    """When somebody else's file was made; refuses one without a date, or dated ahead. again: what puts it right"""
    moment = moment_of(created)
    if moment is None:
        raise UploadError(f"{path}: does not say when it was made; the member must {again}")
    if in_future(moment):
        raise UploadError(
            f"{path}: is dated {moment:%Y-%m-%d %H:%M} UTC, in the future; the member must set its clock and {again}"
        )
    return moment


def _signed_by(path: Path, manifest: Mapping[str, Any], charter: Charter, member: str) -> str | None:
    signature = manifest.get("signature")
    if signature is None:
        return check_signature(path, None, charter, member)
    key = signature.get("key") if isinstance(signature, dict) else None
    value = signature.get("value") if isinstance(signature, dict) else None
    if not isinstance(key, str) or not isinstance(value, str):
        raise UploadError(f"{path}: the signature is damaged; send it again")
    return check_signature(path, Signature(key, value, str(manifest["digest"])), charter, member)


@dataclass(frozen=True)
class Signature:
    """What a file from a member says of who signed it."""

    key: str
    value: str
    digest: str
    """of all else in the file: what is signed"""
    message: bytes = MESSAGE
    """what kind of thing the digest is of"""


TRAIN_AGAIN = "run `oneflare client train` again, which dates the upload anew without training"
UPLOADED = ("train with --key", "`oneflare client train` with the new key signs it again, without training")


def check_signature(
    path: Path, signature: Signature | None, charter: Charter, member: str, remedies: tuple[str, str] = UPLOADED
) -> str | None:
    """The key that signed a member's file; refuses what the member did not sign, or did not sign as it is.

    None where it is not signed and the charter asks for no key of this member. remedies: for a file that is not signed,
    and for one under a revoked key.
    """
    wanted = charter.members.get(member)
    if signature is None:
        if wanted is not None:
            raise UploadError(f"{path}: is not signed, but {member} has a key; {remedies[0]}")
        return None
    key = signature.key
    revoked = (charter.revoked or {}).get(key)
    if revoked is not None and signature.digest not in revoked.keep:
        raise UploadError(
            f"{path}: is signed with a key of {revoked.member} that was revoked on {revoked.since[:10]}; {remedies[1]}"
        )
    if revoked is None and wanted is not None and key != wanted:
        raise UploadError(f"{path}: is signed with another key than the one admitted for {member}")
    owner = charter.member_of(key) if revoked is None else revoked.member
    if owner is not None and owner != member:
        raise UploadError(f"{path}: is signed with {owner}'s key, but says it is from {member}; each sends its own")
    try:
        genuine = verify(key, signature.value, signature.digest, signature.message)
    except ConfigError:
        genuine = False
    if not genuine:
        raise UploadError(f"{path}: the signature is not {member}'s; it was forged or the file altered")
    return key
