"""Enrolments become the roster: members join, the coordinator signs who is in, everybody checks it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from oneflare.errors import ConfigError, RunError, UploadError
from oneflare.federation.charter import Charter, revised, short
from oneflare.federation.identity import dated, now
from oneflare.federation.masked.files import kind_of, read_message
from oneflare.upload.masking.keys import MaskKey
from oneflare.upload.masking.roster import Enrolment, Roster
from oneflare.upload.signing import SigningKey

ENROLMENT = "enrolment"
SUFFIX = ".join.json"


def enrol(charter: Charter, member: str, images: int, mask: MaskKey, key: SigningKey | None) -> Enrolment:
    """A member's part of the roster, signed where the member has a key."""
    check_masked(charter)
    if not 1 <= images <= 10**9:
        raise ConfigError(
            f"--images {images}: must lie between 1 and 10^9; it is the most images you will ever send of"
        )
    made = Enrolment(
        federation=charter.fingerprint, member=member, mask=mask.public, images=images, created=now(), key=None
    )
    return made if key is None else made.signed(key)


def check_masked(charter: Charter) -> None:
    """Refuse a federation whose sums are not masked."""
    if charter.terms.upload.masked is None:
        raise ConfigError(f"the sums of {charter.name} are not masked; terms with upload.masked=true mask them")
    if charter.coordinator is None:
        raise ConfigError(f"{charter.name} has no coordinator's key to sign its roster; pip install 'oneflare[sign]'")


def read_enrolment(path: Path, charter: Charter) -> Enrolment:
    """An enrolment for this federation, by the member whose name it carries."""
    made = read_message(path, ENROLMENT, Enrolment)
    if made.federation != charter.fingerprint:
        raise UploadError(
            f"{path}: is an enrolment for another federation or other terms ({short(made.federation)}, not "
            f"{short(charter.fingerprint)}); {made.member} must join with this charter"
        )
    try:
        charter.check_member(made.member)
        made.check_signature(charter.members.get(made.member))
    except (ConfigError, UploadError) as error:
        raise UploadError(f"{path}: {error}") from None
    dated(path, made.created, "join again")
    return made


def collect(charter: Charter, folder: Path) -> list[Enrolment]:
    """All enrolments in a folder; one that cannot be taken is an error, so that nobody is left out by accident."""
    if not folder.is_dir():
        raise RunError(f"no folder at {folder}; give the one in which the enrolments were collected")
    paths = sorted(path for path in folder.rglob("*.json") if kind_of(path) == ENROLMENT or path.name.endswith(SUFFIX))
    return [read_enrolment(path, charter) for path in paths]


def next_roster(charter: Charter, joined: Iterable[Enrolment], without: Sequence[str], key: SigningKey) -> Charter:
    """The charter with a new roster: the members of the last one, those who joined (again) since, without some.

    Of several enrolments of one member the newest counts.
    """
    check_masked(charter)
    last = charter.roster
    rows = {row.member: row for row in (() if last is None else last.members) if row.member in _admitted(charter)}
    for row in joined:
        before = rows.get(row.member)
        if before is None or datetime.fromisoformat(row.created) >= datetime.fromisoformat(before.created):
            rows[row.member] = row
    for name in without:
        if rows.pop(name, None) is None:
            raise RunError(f"cannot leave out '{name}': nobody of this name has joined")
    if len(rows) < 2:
        raise RunError(f"{len(rows)} members have joined ({', '.join(rows) or 'nobody'}); a total needs at least two")
    masked = charter.terms.upload.masked
    assert masked is not None
    threshold = masked.threshold or len(rows) // 2 + 1
    if threshold > len(rows):
        raise RunError(
            f"{len(rows)} members have joined, but upload.masked.threshold needs {threshold} to open a total"
        )
    roster = Roster(
        federation=charter.fingerprint,
        number=1 if last is None else last.number + 1,
        threshold=threshold,
        members=tuple(rows[name] for name in sorted(rows)),
    )
    check_room(charter, roster)
    return revised(charter, roster=roster.signed(key).model_dump(mode="json", exclude_none=True))


def _admitted(charter: Charter) -> set[str]:
    """Members that the charter admits; without any, everybody who has joined."""
    joined = () if charter.roster is None else charter.roster.names
    return set(charter.members or joined)


def check_room(charter: Charter, roster: Roster) -> None:
    """Refuse a roster under which a total could overflow."""
    contract = charter.contract
    assert contract.fixed is not None
    contract.fixed.check_room(roster.images, 0 if contract.statistics is None else contract.statistics.dim)


def checked_roster(charter: Charter) -> Roster:
    """The roster of a charter, as members and the coordinator may rely on it."""
    check_masked(charter)
    roster = charter.roster
    if roster is None:
        raise ConfigError(
            f"the charter of {charter.name} has no roster yet; the coordinator signs it with `oneflare server roster` "
            "when all have joined"
        )
    assert charter.coordinator is not None
    if not any(roster.is_signed_by(key) for key in charter.signing_keys):
        raise ConfigError(f"the roster of {charter.name} is not signed by its coordinator; ask for the charter again")
    if roster.federation != charter.fingerprint:
        raise ConfigError(f"the roster of {charter.name} is for other terms; ask the coordinator for the charter again")
    for row in roster.members:
        try:
            row.check_signature(charter.members.get(row.member))
        except UploadError as error:
            raise ConfigError(
                f"the roster's entry of {row.member}: {error}; {row.member} must join again for a new roster"
            ) from None
    check_room(charter, roster)
    return roster


def check_own(roster: Roster, member: str, mask: MaskKey) -> None:
    """Refuse a roster in which this member is absent or has another key: its masks would not cancel."""
    if member not in roster.names:
        raise ConfigError(f"{member} is not in roster {roster.number} ({', '.join(roster.names)}); join first")
    if roster.entry(member).mask != mask.public:
        raise ConfigError(
            f"roster {roster.number} has another mask key for {member} than the one here; give the --mask folder with "
            "that key, or join again and ask for a new roster"
        )
