"""The member's answer to the request: shares of the personal masks in the total, seeds with those who are missing.

For every other member exactly one of the two is released, once and for all: a share of its personal mask if its upload
is in the total, the seed of the common mask if it is missing. Whoever had both could read that member's sums. Therefore
the record of what was released is on disk before the answer is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from oneflare.core.config import Section
from oneflare.errors import RunError, UploadError
from oneflare.federation.charter import Charter, short
from oneflare.federation.identity import now
from oneflare.federation.masked.enrolment import check_own, checked_roster
from oneflare.federation.masked.files import read_message, write_message
from oneflare.federation.masked.rounds import REQUEST, Request
from oneflare.federation.masked.secret import Record, Released
from oneflare.federation.masked.uploading import Masking
from oneflare.upload.masking.masks import TAG_BYTES, open_share, pair_seed
from oneflare.upload.masking.message import decoded, encoded
from oneflare.upload.masking.roster import Roster
from oneflare.upload.masking.shamir import SHARE_BYTES

RELEASE = "release"
SUFFIX = ".release.json"


class Release(Section):
    """A member's part in opening a total."""

    federation: str
    roster: str
    request: str = Field(description="digest of the request that is answered")
    member: str
    shares: dict[str, str] = Field(description="member in the total -> this member's share of its personal mask")
    pairs: dict[str, str] = Field(description="missing member -> seed of the mask in common with it")


@dataclass(frozen=True)
class ReleaseSummary:
    """What was released, for the member to read."""

    release: Release
    path: Path
    missing: list[str]
    included: bool
    """whether the member's own upload is in the total"""
    before: bool
    """whether the same request was answered earlier"""
    damaged: list[str]
    """members whose shares could not be opened"""


def read_request(path: Path, charter: Charter, roster: Roster) -> Request:
    """A request that the coordinator signed for this roster, and that asks for a total of enough members."""
    request = read_message(path, REQUEST, Request)
    if request.federation != charter.fingerprint:
        raise UploadError(
            f"{path}: is a request of another federation ({short(request.federation)}); give the right one"
        )
    if request.roster != roster.digest:
        raise UploadError(
            f"{path}: is for another roster than number {roster.number} of this charter; ask for the right one"
        )
    if not any(request.is_signed_by(key) for key in charter.signing_keys):
        raise UploadError(f"{path}: is not signed by the coordinator of {charter.name}; it was forged or altered")
    strangers = sorted(set(request.uploaded) - set(roster.names))
    if strangers or len(request.uploaded) < roster.threshold:
        raise UploadError(
            f"{path}: asks for a total of {len(request.uploaded)} members, of which {len(strangers)} are not in the "
            f"roster; at least {roster.threshold} of the roster are needed, and nothing is released"
        )
    return request


def release(
    charter: Charter, request_file: Path, out: Path, member: str, masking: Masking, reveal: str | None = None
) -> ReleaseSummary:
    """Answer a request; the same request gets the same answer, and one that contradicts an earlier answer gets none.

    reveal: a member whose sums the coordinator will be able to compute from two totals, which is refused otherwise.
    """
    roster = checked_roster(charter)
    check_own(roster, member, masking.key)
    request = read_request(request_file, charter, roster)
    with masking.secrets.held():
        record = masking.secrets.record()
        _check_own_upload(request_file, request, record, member)
        earlier = record.released.get(roster.digest)
        planned = Released(
            charter.fingerprint,
            {name: row.salt for name, row in sorted(request.uploaded.items())},
            tuple(request.missing(roster)),
            now(),
        )
        if earlier is not None:
            _check_same(request_file, earlier, planned)
        else:
            _check_difference(record, planned, reveal)
            masking.secrets.keep(replace(record, released=record.released | {roster.digest: planned}))
    shares, damaged = _shares(request, roster, member, masking)
    included = member in request.uploaded
    pairs = {name: encoded(_seed(roster, member, name, masking)) for name in planned.missing} if included else {}
    made = Release(
        federation=charter.fingerprint,
        roster=roster.digest,
        request=request.digest,
        member=member,
        shares=shares,
        pairs=pairs,
    )
    write_message(out, RELEASE, made)
    return ReleaseSummary(made, out, list(planned.missing), included, earlier is not None, damaged)


def _check_own_upload(path: Path, request: Request, record: Record, member: str) -> None:
    own = request.uploaded.get(member)
    if own is not None and own.salt not in record.made.get(request.roster, ()):
        raise RunError(
            f"{path}: lists an upload of {member} that was not made with this mask key; nothing is released. Ask the "
            "coordinator where it comes from"
        )


def _check_same(path: Path, earlier: Released, planned: Released) -> None:
    """Refuse to release the other secret of somebody, or a share of another upload."""
    day = earlier.when[:10]
    for name in sorted({*earlier.uploaded, *earlier.missing}):
        if name in earlier.uploaded and name in planned.missing:
            released, asked = "a share of its personal mask", "the seed in common with it"
        elif name in earlier.missing and name in planned.uploaded:
            released, asked = "the seed in common with it", "a share of its personal mask"
        elif earlier.uploaded.get(name) != planned.uploaded.get(name):
            released, asked = "a share for one of its uploads", "a share for another"
        else:
            continue
        raise RunError(
            f"{path}: for {name} you released {released} on {day}, and this request asks for {asked}; with both, the "
            f"sums of {name} alone could be read, so nothing is released. Only a new roster starts a new round"
        )


def _check_difference(record: Record, planned: Released, reveal: str | None) -> None:
    """Refuse a total that differs by one member from one that was opened before: the difference is that member."""
    for earlier in record.released.values():
        alone = set(earlier.uploaded) ^ set(planned.uploaded)
        if earlier.federation == planned.federation and len(alone) == 1 and alone != {reveal}:
            (name,) = alone
            raise RunError(
                f"this total differs from the one of {earlier.when[:10]} by {name} alone, so whoever has both can "
                f"compute the sums of {name} as far as the others' images are the same; --reveal {name} answers anyway"
            )


def _shares(request: Request, roster: Roster, member: str, masking: Masking) -> tuple[dict[str, str], list[str]]:
    """This member's share of each personal mask in the total, and the members whose share it could not open."""

    def opened() -> Iterator[tuple[str, bytes | None]]:
        for name, row in request.uploaded.items():
            sealed = decoded(row.sealed.get(member), SHARE_BYTES + TAG_BYTES)
            try:
                yield (
                    name,
                    None
                    if sealed is None
                    else open_share(
                        masking.key,
                        roster.entry(name).mask,
                        roster.digest,
                        bytes.fromhex(row.salt),
                        (name, member),
                        sealed,
                    ),
                )
            except ValueError:
                yield name, None

    found = dict(opened())
    shares = {name: encoded(share) for name, share in found.items() if share is not None}
    return shares, [name for name, share in found.items() if share is None]


def _seed(roster: Roster, member: str, other: str, masking: Masking) -> bytes:
    return pair_seed(masking.key, roster.entry(other).mask, roster.digest, (member, other))
