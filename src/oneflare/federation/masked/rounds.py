"""The coordinator's side of a round: closes it with one request, which fixes whose sums are added up.

The round's files lie in the folder `masked` of the federation: the uploads that are in the total, the request, and the
releases that have arrived. The request is written last; where it exists, the round is closed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from oneflare.core.config import Section
from oneflare.core.files import digest_of, exclusive, remove_partial, write_bytes
from oneflare.errors import RunError, UploadError
from oneflare.federation.charter import Charter, read_charter
from oneflare.federation.identity import now
from oneflare.federation.intake import Intake, UploadHistory, take_in
from oneflare.federation.masked.enrolment import checked_roster
from oneflare.federation.masked.files import read_message, write_message
from oneflare.federation.model_signing import PRIVATE, coordinator_key
from oneflare.federation.opening import decrypted
from oneflare.federation.recording import closed_event, write_down
from oneflare.federation.versions import UPLOADS, FederationFiles, upload_files
from oneflare.upload import Upload
from oneflare.upload.masking.message import MaskedNote
from oneflare.upload.masking.roster import Roster
from oneflare.upload.signing import SigningKey, verify

REQUEST = "request"
MESSAGE = b"oneflare request "


class Uploaded(Section):
    """One upload that is in the total."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    salt: str = Field(pattern=r"^[0-9a-f]{64}$")
    sealed: dict[str, str] = Field(description="holder -> its share of the personal mask, which it alone can open")


class Request(Section):
    """What the coordinator asks of every member: whose sums are in the total, and who is missing."""

    federation: str
    roster: str
    created: str = Field(max_length=40)
    uploaded: dict[str, Uploaded]
    signature: str = Field("", max_length=200)

    @cached_property
    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json", exclude={"signature"}))

    def signed(self, key: SigningKey) -> Request:
        return self.model_copy(update={"signature": key.sign(self.digest, MESSAGE)})

    def is_signed_by(self, public: str) -> bool:
        return verify(public, self.signature, self.digest, MESSAGE)

    def missing(self, roster: Roster) -> list[str]:
        return [name for name in roster.names if name not in self.uploaded]


class RoundFiles:
    """Where the files of the current round are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "masked"
        self.uploads = self.folder / "uploads"
        self.releases = self.folder / "releases"
        self.request = self.folder / "request.json"

    def kept(self) -> list[Path]:
        """The uploads of the closed round."""
        return sorted(self.uploads.glob(UPLOADS))

    def read(self, roster: Roster) -> Request | None:
        """The request of the round under this roster; None while it is open."""
        if not self.request.exists():
            return None
        request = read_message(self.request, REQUEST, Request)
        return request if request.roster == roster.digest else None

    def clear(self) -> None:
        """Forget the round: its masks belong to an earlier roster."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Closed:
    """A round that was closed."""

    request: Request
    path: Path
    missing: list[str]
    threshold: int
    before: bool
    """whether it was closed earlier"""


def close_round(folder: Path, uploads: Path, *, early: bool = False, late: bool = False, least: int = 0) -> Closed:
    """Fix whose sums are added up, and write the request for the members. What is fixed is never changed.

    early: also before the deadline, while members are missing. late: uploads made after the deadline count. least: with
    fewer members nothing is closed; the roster's threshold holds in any case.
    """
    with exclusive(folder):
        charter = read_charter(folder)
        roster, files = checked_roster(charter), RoundFiles(folder)
        remove_partial(folder)
        request = files.read(roster)
        if request is not None:
            _refuse_late(charter, folder, uploads, request)
            return Closed(request, files.request, request.missing(roster), roster.threshold, before=True)
        key = coordinator_key(charter, folder)
        if key is None:
            raise RunError(f"{folder / PRIVATE} is missing, so members would not believe the request; put it there")
        known = UploadHistory(_removed(folder, roster))
        with decrypted(charter, folder) as opened:
            intake = take_in(charter, upload_files(uploads), known=known, late=late, opened=opened)
            _check_enough(charter, roster, intake, early, least)
            request = _closed_with(charter, roster, intake, files, key)
        digests = {name: row.digest for name, row in request.uploaded.items()}
        write_down(charter, folder, [closed_event(roster, digests, request.missing(roster))])
    return Closed(request, files.request, request.missing(roster), roster.threshold, before=False)


def _closed_with(charter: Charter, roster: Roster, intake: Intake, files: RoundFiles, key: SigningKey) -> Request:
    """Write the uploads of the round, and then the request."""
    notes = _notes(roster, intake.uploads)
    request = Request(
        federation=charter.fingerprint,
        roster=roster.digest,
        created=now(),
        uploaded={
            name: Uploaded(digest=intake.uploads[name].digest, salt=note.salt, sealed=note.sealed)
            for name, note in notes.items()
        },
    ).signed(key)
    files.clear()
    for name, upload in intake.uploads.items():
        write_bytes(files.uploads / f"{name}.safetensors", upload.content())
    write_message(files.request, REQUEST, request)
    return request


def closed_history(charter: Charter, folder: Path) -> UploadHistory:
    """What intake must know where sums are masked: which uploads are in the closed round."""
    roster, request = checked_roster(charter), open_request(charter, folder)
    digests = {name: row.digest for name, row in request.uploaded.items()}
    return UploadHistory(_removed(folder, roster), closed=digests, closed_at=request.created)


def _removed(folder: Path, roster: Roster) -> dict[str, str]:
    """Who was removed; a roster that names a member takes it back."""
    return {name: when for name, when in FederationFiles(folder).removed().items() if name not in roster.names}


def open_request(charter: Charter, folder: Path) -> Request:
    """The request of the round, which must have been written."""
    request = RoundFiles(folder).read(checked_roster(charter))
    if request is None:
        raise RunError(
            f"the sums are masked and the round is not closed; `oneflare server missing {folder} --uploads FOLDER` "
            "closes it and writes the request for the members"
        )
    return request


def _refuse_late(charter: Charter, folder: Path, uploads: Path, request: Request) -> None:
    """Name the members whose uploads came after the round was closed."""
    with decrypted(charter, folder) as opened:
        known = closed_history(charter, folder)
        intake = take_in(charter, upload_files(uploads), known=known, late=True, opened=opened)
    late = sorted({v.member for v in intake.verdicts if v.status == "late" and v.member} - set(request.uploaded))
    if late:
        raise RunError(
            f"the round was closed on {request.created[:16].replace('T', ' ')} UTC without {' and '.join(late)}, and "
            "members may have answered; their late uploads are refused. A new roster starts a new round: "
            f"`oneflare server roster {folder}`"
        )


def _check_enough(charter: Charter, roster: Roster, intake: Intake, early: bool, least: int) -> None:
    present = intake.uploads
    missing = [name for name in roster.names if name not in present]
    reasons = intake.reasons(missing)
    if len(present) < roster.threshold:
        raise RunError(
            f"{len(present)} of {len(roster.names)} members have sent a usable upload, and a total needs at least "
            f"{roster.threshold}; ask {', '.join(missing)}. {'; '.join(reasons)}"
        )
    if len(present) < least:
        raise RunError(
            f"{len(present)} of {len(roster.names)} members have sent a usable upload, but min-members is {least}; the "
            f"round stays open, because closing it cannot be undone. {'; '.join(reasons)}"
        )
    if missing and charter.deadline is not None and datetime.now(UTC) < charter.deadline and not early:
        raise RunError(
            f"the deadline {charter.deadline:%Y-%m-%d %H:%M %Z} has not passed, and {', '.join(missing)} could still "
            f"send; closing the round cannot be undone. --now closes it now. {'; '.join(reasons)}"
        )


def _notes(roster: Roster, uploads: Mapping[str, Upload]) -> dict[str, MaskedNote]:
    """What the uploads say of their masks; two members that disagree on their common seed are named."""
    notes = {name: note_of(upload, roster) for name, upload in uploads.items()}
    for name, note in notes.items():
        for other in notes:
            if name < other and note.pairs[other] != notes[other].pairs[name]:
                raise RunError(
                    f"{name} and {other} do not have the same mask in common, so one of them used another key; both "
                    "must run `oneflare client train` again with the charter that has this roster"
                )
    return notes


def note_of(upload: Upload, roster: Roster) -> MaskedNote:
    """What a verified upload says of its masks."""
    member = upload.member
    if member is None:
        raise UploadError(f"{upload.path}: carries no member's name; make it with `oneflare client train`")
    content: Any = upload.manifest.get("masked")
    return MaskedNote.read(upload.path, content, roster, member)
