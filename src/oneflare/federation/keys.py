"""Replaces and revokes keys of a federation: its members' and its coordinator's."""

from __future__ import annotations

from pathlib import Path

from oneflare.core.files import exclusive, write_bytes
from oneflare.errors import ConfigError, did_you_mean
from oneflare.federation.charter import FILE, Charter, KeyChange, Revocation, read_charter, revised
from oneflare.federation.coordinator import read_fused
from oneflare.federation.log import Event
from oneflare.federation.member import now
from oneflare.federation.model_signing import PRIVATE, PUBLIC, coordinator_key, sign_card, sign_fusion
from oneflare.federation.recording import seen_path, write_down
from oneflare.federation.versions import FederationFiles
from oneflare.upload import read_manifest
from oneflare.upload.signing import SigningKey, generate, read_key
from oneflare.upload.succession import Succession, succeed

WAIT_SECONDS = 60.0
"""for another command that changes the same federation"""
COORDINATOR = "coordinator"
NEXT = "next-coordinator"


def admit_member(folder: Path, name: str, public: str | None) -> tuple[Charter, Charter]:
    """The charter before and after a member was admitted or got another key, which the coordinator vouches for."""
    read_charter(folder)  # refuses a folder that is no federation's before anything is written there
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter = read_charter(folder)
        revoked = (charter.revoked or {}).get(public or "")
        if revoked is not None:
            raise ConfigError(
                f"{public} was revoked on {revoked.since[:10]} and does not come back; {name} makes a new pair with "
                "`oneflare client keygen`"
            )
        changed = revised(charter, members=dict(charter.members) | {name: public})
        changed.write(folder / FILE)
        event = Event("admitted", {"who": name, "key": public, "instead_of": charter.members.get(name)})
        write_down(changed, folder, [event])
    return charter, changed


def rotate_member(folder: Path, statement: Succession, *, keep: bool) -> Charter:
    """A member's new key counts from now on, because its old one says so. keep: its upload in the last fusion stays."""
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter = read_charter(folder)
        name = charter.check_member(statement.who)
        if statement.old in (charter.revoked or {}):
            raise ConfigError(
                f"{name}'s key {statement.old} was revoked, so its word does not count; `oneflare server admit` takes "
                "a new key that you confirmed by telephone or in person"
            )
        if charter.members.get(name) != statement.old:
            raise ConfigError(
                f"the replacement is not for {name}'s key {charter.members.get(name)}; ask {name} for a new one"
            )
        changed = revised(
            charter,
            members=dict(charter.members) | {name: statement.new},
            revoked=_revoked(charter, folder, name, statement.old, keep),
        )
        changed.write(folder / FILE)
        event = Event("rotated", {"who": name, "key": statement.new, "instead_of": statement.old, "kept": keep})
        write_down(changed, folder, [event])
    return changed


def revoke_member(folder: Path, name: str, *, keep: bool) -> Charter:
    """A member's key does not count any more, and nobody can send under its name until it has a new one."""
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter = read_charter(folder)
        if name not in charter.members:
            raise ConfigError(f"'{name}' is not a member of {charter.name}{did_you_mean(name, charter.members)}")
        key = charter.members[name]
        if key is None:
            raise ConfigError(f"{name} has no key that could be revoked; `oneflare server admit` gives it one")
        if key in (charter.revoked or {}):
            raise ConfigError(f"{name}'s key {key} is revoked already; `oneflare server admit` takes a new one")
        changed = revised(charter, revoked=_revoked(charter, folder, name, key, keep))
        changed.write(folder / FILE)
        write_down(changed, folder, [Event("revoked", {"who": name, "key": key, "kept": keep})])
    return changed


def _revoked(charter: Charter, folder: Path, name: str, key: str, keep: bool) -> dict[str, Revocation]:
    """All revocations with this one. What stays valid is known by its digest: a thief of the key can write any date."""
    upload = FederationFiles(folder).member(name)
    digests = (str(read_manifest(upload)["digest"]),) if keep and upload.exists() else ()
    earlier = {
        old: one.model_copy(update={"keep": digests}) if one.member == name else one
        for old, one in (charter.revoked or {}).items()
    }
    return earlier | {key: Revocation(member=name, since=now(), keep=digests)}


def rotate_coordinator(folder: Path) -> Charter:
    """A new key for the coordinator, signed by the old one; what the last fusion wrote is signed again with it.

    If it is interrupted, the same command finishes it. The old private key stays in a file of its own until it is
    deleted; nothing needs it.
    """
    private, public = folder / PRIVATE, folder / PUBLIC
    coming, coming_public = folder / f"{NEXT}.key", folder / f"{NEXT}.pub"
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter = read_charter(folder)
        if charter.coordinator is None:
            raise ConfigError(f"{folder / FILE} names no key of the coordinator, so there is none to replace")
        new = read_key(coming) if coming.exists() else generate(coming, coming_public)
        if charter.signing_key != new.public:
            old = coordinator_key(charter, folder)
            if old is None:
                raise ConfigError(f"{private} is missing, and only the old key can name its successor")
            charter = _succeeded(charter, folder, old, new)
        number = len(charter.succession or ())
        before = seen_path(folder, charter)
        if private.exists() and read_key(private).public != new.public:
            private.replace(folder / f"old-{COORDINATOR}-{number}.key")
        coming.replace(private)
        if coming_public.exists():
            coming_public.replace(public)
        after = seen_path(folder, charter)
        if before is not None and after is not None and before != after and before.exists():
            write_bytes(after, before.read_bytes())  # the old key was a link to another place
        files = FederationFiles(folder)
        if files.result.exists():
            content = read_fused(folder)
            sign_fusion(charter, folder, content)
            if files.card.exists():
                sign_card(charter, files.card, content)
    return charter


def _succeeded(charter: Charter, folder: Path, old: SigningKey, new: SigningKey) -> Charter:
    """The charter with the new key, after the old one has written into the log that it is replaced."""
    statement = succeed(COORDINATOR, old, new, now())
    event = Event("rotated", {"who": COORDINATOR, "key": new.public, "instead_of": old.public})
    write_down(charter, folder, [event])
    changed = revised(charter, succession=(*(charter.succession or ()), KeyChange.model_validate(statement.to_dict())))
    changed.write(folder / FILE)
    return changed
