"""Examines every upload that a federation receives: one of each member counts, and each gets a verdict in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from oneflare.core.plain import plain
from oneflare.errors import UploadError
from oneflare.federation.charter import Charter
from oneflare.federation.identity import Sender, identify
from oneflare.fusion import offered_fields
from oneflare.upload import Upload, read_manifest, read_upload
from oneflare.upload.masking.message import MaskedNote
from oneflare.upload.statistics import FIELDS as STATISTICS_FIELDS


@dataclass(frozen=True)
class Examination:
    """What became of one file."""

    file: str
    status: str
    """in | refused | superseded | late | removed"""
    member: str | None = None
    """who the upload is from; None where that could not be established"""
    claims: str | None = None
    """the member's name that the file carries, whoever wrote it there"""
    reason: str = ""
    created: str | None = None
    signed: bool = False
    digest: str | None = None

    @property
    def who(self) -> str:
        """Whom the verdict is about: the member, or what the file claims where nobody knows who sent it."""
        return self.member or (f"unknown, claims to be {self.claims}" if self.claims else "unknown")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Intake:
    """The verified uploads by member, ordered by name, and the verdict on every file."""

    uploads: dict[str, Upload]
    verdicts: tuple[Examination, ...]
    notes: tuple[str, ...] = ()
    """what the coordinator must hear: who sent more than one upload, and which was taken"""

    def reasons(self, expected: Iterable[str]) -> list[str]:
        """Why uploads are not in, in words; expected: members who should have sent one."""
        reasons = [
            f"{verdict.who} ({verdict.file}) is {verdict.status}: {verdict.reason}"
            for verdict in self.verdicts
            if verdict.status not in ("in", "superseded")
        ]
        heard = {verdict.member for verdict in self.verdicts}
        silent = [name for name in expected if name not in heard]
        return [*reasons, f"{', '.join(silent)} sent nothing"] if silent else reasons


@dataclass(frozen=True)
class UploadHistory:
    """What a federation remembers about its members' uploads.

    removed: member -> when it was removed. newest: member -> the date of the newest upload of it that was fused.
    """

    removed: Mapping[str, str] = field(default_factory=dict)
    newest: Mapping[str, str] = field(default_factory=dict)
    closed: Mapping[str, str] | None = None
    """where sums are masked and the round is closed: member -> digest of its upload in the total"""
    closed_at: str = ""


@dataclass(frozen=True)
class _Candidate:
    upload: Upload
    sender: Sender
    explicit: bool

    @property
    def rank(self) -> tuple[bool, bool, datetime, str]:
        """Signed before unsigned, then what the coordinator named, then the newest; equal moments are decided by
        digest, so that order never counts."""
        return self.sender.key is not None, self.explicit, self.sender.created, self.upload.digest


@dataclass
class _Desk:
    charter: Charter
    known: UploadHistory
    late: bool
    opened: Callable[[Path], Path]
    sources: dict[Path, Path] = field(default_factory=dict)
    """a file that was opened -> the file as it was sent"""
    verdicts: list[Examination] = field(default_factory=list)
    candidates: dict[str, list[_Candidate]] = field(default_factory=lambda: defaultdict(list))

    def examine(self, path: Path, explicit: bool) -> None:
        """explicit: the coordinator named this very file, so neither deadline, date nor a removal keeps it out"""
        manifest: dict[str, Any] = {}
        sender: Sender | None = None
        try:
            path = self._opened(path)
            manifest = read_manifest(path)
            sender = identify(path, manifest, self.charter)
            kept_out = self._after_closing(sender, manifest)
            if kept_out is None and not explicit:
                kept_out = self._kept_out(self.sources[path], sender)
            if kept_out is not None:
                self._verdict(path, manifest, *kept_out, sender)
                return
            upload = verified(path, self.charter)
            if upload.digest != manifest["digest"]:
                raise UploadError(f"{path}: changed while it was read; fuse again")
            self.candidates[sender.member].append(_Candidate(upload, sender, explicit))
        except UploadError as error:
            self._verdict(path, manifest, "refused", str(error).removeprefix(f"{path}: "), sender)

    def _after_closing(self, sender: Sender, manifest: Mapping[str, Any]) -> tuple[str, str] | None:
        """Status and reason of an upload that is not in the closed round of masked sums."""
        closed, member = self.known.closed, sender.member
        if closed is None or closed.get(member) == manifest["digest"]:
            return None
        when = _minute(datetime.fromisoformat(self.known.closed_at))
        if member in closed:
            return "superseded", f"the round was closed {when} with another upload of {member}, which is taken"
        return "late", f"the round was closed {when} without {member}; only a new roster starts a new one"

    def _opened(self, path: Path) -> Path:
        opened = self.opened(path)
        self.sources[opened] = path
        return opened

    def _kept_out(self, path: Path, sender: Sender) -> tuple[str, str] | None:
        """Status and reason of an upload that is genuine but not wanted."""
        member, created, deadline = sender.member, sender.created, self.charter.deadline
        if member in self.known.removed:
            day = self.known.removed[member][:10]
            return "removed", f"was removed on {day}; --add {path} takes it back"
        if deadline is not None and created > deadline and not self.late:
            return "late", f"made {_span(created - deadline)} after the deadline; --late or --add {path} takes it"
        newest = self.known.newest.get(member)
        if newest is not None and created < datetime.fromisoformat(newest):
            return "refused", (
                f"was made {_minute(created)}, before the upload of {member} that was fused already (made "
                f"{_minute(datetime.fromisoformat(newest))}); send that one again, or --add {path} takes the older one"
            )
        return None

    def _verdict(
        self, path: Path, manifest: Mapping[str, Any], status: str, reason: str, sender: Sender | None
    ) -> None:
        claims, created = manifest.get("member"), manifest.get("created")
        self.verdicts.append(
            Examination(
                plain(self.sources.get(path, path)),
                status,
                None if sender is None else sender.member,
                plain(claims, 64) if isinstance(claims, str) else None,
                plain(reason),
                plain(created, 40) if isinstance(created, str) else None,
                bool(manifest.get("signature")),
                manifest.get("digest"),
            )
        )

    def settle(self) -> Intake:
        """One upload per member: the newest signed one."""
        chosen: dict[str, Upload] = {}
        notes: list[str] = []
        shared = self._shared_keys()
        for member in sorted(self.candidates):
            distinct = {(found.upload.digest, found.sender.key): found for found in self.candidates[member]}
            for found in self.candidates[member]:  # of two copies, the one that the coordinator named
                if found.explicit:
                    distinct[found.upload.digest, found.sender.key] = found
            keys = {found.sender.key for found in distinct.values() if found.sender.key is not None}
            reason = None
            if len(keys) > 1 and self.charter.members.get(member) is None:  # else each is admitted, or was before
                reason = f"{len(keys)} keys sign for {member}; admit the right one: `oneflare server admit`"
            for key in sorted(keys & set(shared)):
                reason = f"one key signs for {' and '.join(shared[key])}; each member needs its own"
            if reason is not None:
                for found in distinct.values():
                    self._settled(found, "refused", reason)
                continue
            ranked = sorted(distinct.values(), key=lambda found: found.rank, reverse=True)
            chosen[member] = ranked[0].upload
            notes += self._rank(member, ranked)
        return Intake(chosen, tuple(self.verdicts), tuple(notes))

    def _shared_keys(self) -> dict[str, list[str]]:
        """Keys that sign for more than one member; only a federation without admitted keys can see any."""
        users: dict[str, list[str]] = defaultdict(list)
        for member in sorted(self.candidates):
            for key in {found.sender.key for found in self.candidates[member]}:
                if key is not None:
                    users[key].append(member)
        return {key: members for key, members in users.items() if len(members) > 1}

    def _rank(self, member: str, ranked: Sequence[_Candidate]) -> Iterator[str]:
        """Verdicts on all uploads of a member, the best first, and what the coordinator must hear about it."""
        first = ranked[0]
        self._settled(first, "in", "")
        yield from (f"{member} says: {text}" for text in first.upload.notes)
        for other in ranked[1:]:
            kind = "unsigned" if first.sender.key is not None and other.sender.key is None else "older"
            if other.sender.created > first.sender.created and kind == "older":
                kind = "not the one that --add names"
            self._settled(other, "superseded", f"{kind}; {self.sources[first.upload.path]} is taken instead")
        if len(ranked) > 1:
            signed = "signed " if first.sender.key is not None else ""
            which = "one that --add names" if first.explicit else f"newest {signed}one"
            yield plain(
                f"{member} sent {len(ranked)} uploads; the {which} is taken: "
                f"{self.sources[first.upload.path]}, made {first.sender.created.isoformat(timespec='seconds')}"
            )

    def _settled(self, found: _Candidate, status: str, reason: str) -> None:
        self._verdict(found.upload.path, found.upload.manifest, status, reason, found.sender)


def as_it_is(path: Path) -> Path:
    """A file that nobody encrypted."""
    return path


def take_in(
    charter: Charter,
    files: Iterable[Path],
    explicit: Sequence[Path] = (),
    *,
    known: UploadHistory | None = None,
    late: bool = False,
    opened: Callable[[Path], Path] = as_it_is,
    fallback: Sequence[Path] = (),
) -> Intake:
    """Examine files; `explicit` ones were named by the coordinator.

    late: uploads made after the deadline count. opened: a file -> the same one decrypted, where it is encrypted.
    fallback: MEMBER.safetensors, examined for members that sent nothing usable.
    """
    desk = _Desk(charter, known or UploadHistory(), late, opened)
    for path in explicit:
        desk.examine(path, explicit=True)
    for path in files:
        desk.examine(path, explicit=False)
    for path in fallback:
        if path.stem not in desk.candidates:
            desk.examine(path, explicit=True)
    return desk.settle()


def verified(path: Path, charter: Charter) -> Upload:
    """Every check on an upload's content, including that it holds what the charter asks for."""
    upload = read_upload(path, charter.masked_contract)
    terms = charter.terms
    hidden = frozenset() if terms.upload.masked is None else STATISTICS_FIELDS
    if hidden:
        _check_masks(path, upload, charter)
    required = offered_fields(
        terms.upload, deep=terms.trains, statistics=terms.analytic["name"] != "none", holdout=terms.train.holdout
    )
    missing = sorted(required - upload.fields - hidden)
    if missing:
        raise UploadError(f"{path}: withholds {' and '.join(missing)}, which this federation asks for")
    if upload.manifest.get("counts") != terms.upload.counts:
        raise UploadError(f"{path}: class counts are {upload.manifest.get('counts')!r:.20}, not {terms.upload.counts}")
    if upload.counts is not None and upload.samples != max(1, round(float(upload.counts.sum()))):
        raise UploadError(f"{path}: samples ({upload.samples}) is not the sum of the class counts; train again")
    return upload


def _check_masks(path: Path, upload: Upload, charter: Charter) -> None:
    """Masks for the roster of the charter, by the member that the upload names; number of images as it enrolled."""
    roster, member = charter.roster, upload.member
    if roster is None or member is None or member not in roster.names:
        number = "" if roster is None else f" {roster.number}"
        raise UploadError(f"{path}: {member} is not in the roster{number} of this federation; it must join first")
    MaskedNote.read(path, upload.manifest["masked"], roster, member)
    if upload.samples > roster.entry(member).images:
        raise UploadError(
            f"{path}: is over {upload.samples} images, and {member} enrolled with at most {roster.entry(member).images}"
        )


def _span(span: timedelta) -> str:
    minutes = int(span.total_seconds() // 60)
    days, hours = minutes // 1440, minutes // 60
    return f"{days} days" if days > 1 else f"{hours} hours" if hours > 1 else f"{minutes} minutes"


def _minute(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
