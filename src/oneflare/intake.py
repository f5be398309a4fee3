"""Which uploads a federation takes: every file is examined, none is trusted, and each gets a verdict in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from oneflare.charter import Charter, short
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion import offered_fields
from oneflare.signing import check_name, verify
from oneflare.upload import Upload, read_manifest, read_upload

CLOCK_TOLERANCE = timedelta(days=1)


@dataclass(frozen=True)
class Verdict:
    """What became of one file."""

    file: str
    status: str
    """in | refused | superseded | late | removed"""
    member: str | None = None
    reason: str = ""
    created: str | None = None
    signed: bool = False
    digest: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Intake:
    """The verified uploads by member, ordered by name, and the verdict on every file."""

    uploads: dict[str, Upload]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    """what the coordinator must hear: who sent more than one upload, and which was taken"""


@dataclass(frozen=True)
class _Candidate:
    upload: Upload
    created: datetime
    key: str | None
    """that signed it"""

    @property
    def rank(self) -> tuple[bool, datetime, str]:
        """Signed before unsigned, then the newest; equal moments are decided by digest, so that order never counts."""
        return self.key is not None, self.created, self.upload.digest


@dataclass
class _Desk:
    charter: Charter
    removed: Mapping[str, str]
    late: bool
    verdicts: list[Verdict] = field(default_factory=list)
    candidates: dict[str, list[_Candidate]] = field(default_factory=lambda: defaultdict(list))

    def examine(self, path: Path, explicit: bool) -> None:
        """explicit: the coordinator named this very file, so neither deadline nor an earlier removal keeps it out"""
        manifest: dict[str, Any] = {}
        try:
            manifest = read_manifest(path)
            member, created, key = identify(path, manifest, self.charter)
            if member in self.removed and not explicit:
                day = self.removed[member][:10]
                self._verdict(path, manifest, "removed", f"was removed on {day}; --add {path} takes it back")
                return
            deadline = self.charter.deadline
            if deadline is not None and created > deadline and not (explicit or self.late):
                reason = f"made {_span(created - deadline)} after the deadline; --late or --add {path} takes it"
                self._verdict(path, manifest, "late", reason)
                return
            upload = verified(path, self.charter)
            if upload.digest != manifest["digest"]:
                raise UploadError(f"{path}: changed while it was read; fuse again")
            self.candidates[member].append(_Candidate(upload, created, key))
        except UploadError as error:
            self._verdict(path, manifest, "refused", str(error).removeprefix(f"{path}: "))

    def _verdict(self, path: Path, manifest: Mapping[str, Any], status: str, reason: str) -> None:
        member, created = manifest.get("member"), manifest.get("created")
        self.verdicts.append(
            Verdict(
                str(path),
                status,
                member if isinstance(member, str) and len(member) <= 64 and member.isprintable() else None,
                reason,
                created if isinstance(created, str) and len(created) <= 40 and created.isprintable() else None,
                bool(manifest.get("signature")),
                manifest.get("digest"),
            )
        )

    def settle(self) -> Intake:
        """One upload per member: the newest signed one."""
        chosen: dict[str, Upload] = {}
        notes: list[str] = []
        for member in sorted(self.candidates):
            distinct = {(candidate.upload.digest, candidate.key): candidate for candidate in self.candidates[member]}
            keys = {candidate.key for candidate in distinct.values() if candidate.key is not None}
            if len(keys) > 1:
                for candidate in distinct.values():
                    self._settled(
                        candidate,
                        "refused",
                        f"{len(keys)} keys sign for {member}; admit the right one: `oneflare server admit`",
                    )
                continue
            ranked = sorted(distinct.values(), key=lambda candidate: candidate.rank, reverse=True)
            first = ranked[0]
            chosen[member] = first.upload
            self._settled(first, "in", "")
            notes += [f"{member} says: {text}" for text in first.upload.notes]
            for other in ranked[1:]:
                kind = "unsigned" if first.key is not None and other.key is None else "older"
                self._settled(other, "superseded", f"{kind}; {first.upload.path} is taken instead")
            if len(ranked) > 1:
                signed = "signed " if first.key is not None else ""
                notes.append(
                    f"{member} sent {len(ranked)} uploads; the newest {signed}one is taken: "
                    f"{first.upload.path}, made {first.created.isoformat(timespec='seconds')}"
                )
        return Intake(chosen, tuple(self.verdicts), tuple(notes))

    def _settled(self, candidate: _Candidate, status: str, reason: str) -> None:
        self._verdict(candidate.upload.path, candidate.upload.manifest, status, reason)


def take_in(
    charter: Charter,
    files: Iterable[Path],
    explicit: Sequence[Path] = (),
    *,
    removed: Mapping[str, str] | None = None,
    late: bool = False,
) -> Intake:
    """Examine files; `explicit` ones were named by the coordinator.

    removed: member -> when it was removed; late: uploads made after the deadline count.
    """
    desk = _Desk(charter, removed or {}, late)
    for path in explicit:
        desk.examine(path, explicit=True)
    for path in files:
        desk.examine(path, explicit=False)
    return desk.settle()


def identify(path: Path, manifest: Mapping[str, Any], charter: Charter) -> tuple[str, datetime, str | None]:
    """Who made an upload, when, and with which key it is signed; refuses strangers and bad signatures."""
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
    return member, _moment(path, manifest.get("created")), _signed_by(path, manifest, charter, member)


def _moment(path: Path, created: Any) -> datetime:
    try:
        moment = datetime.fromisoformat(created)
    except (TypeError, ValueError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise UploadError(f"{path}: does not say when it was made; train again")
    if moment > datetime.now(UTC) + CLOCK_TOLERANCE:
        raise UploadError(f"{path}: is dated {moment:%Y-%m-%d}, in the future; the member must set its clock")
    return moment


def _signed_by(path: Path, manifest: Mapping[str, Any], charter: Charter, member: str) -> str | None:
    wanted, signature = charter.members.get(member), manifest.get("signature")
    if signature is None:
        if wanted is not None:
            raise UploadError(f"{path}: is not signed, but {member} has a key; train with --key")
        return None
    key = signature.get("key") if isinstance(signature, dict) else None
    value = signature.get("value") if isinstance(signature, dict) else None
    if not isinstance(key, str) or not isinstance(value, str):
        raise UploadError(f"{path}: the signature is damaged; send it again")
    if wanted is not None and key != wanted:
        raise UploadError(f"{path}: is signed with another key than the one admitted for {member}")
    try:
        genuine = verify(key, value, str(manifest["digest"]))
    except ConfigError:
        genuine = False
    if not genuine:
        raise UploadError(f"{path}: the signature is not {member}'s; it was forged or the upload altered")
    return key


def verified(path: Path, charter: Charter) -> Upload:
    """Every check on an upload's content, including that it holds what the charter asks for."""
    upload = read_upload(path, charter.contract)
    terms = charter.terms
    required = offered_fields(
        terms.upload, deep=terms.trains, statistics=terms.analytic["name"] != "none", holdout=terms.train.holdout
    )
    missing = sorted(required - upload.fields)
    if missing:
        raise UploadError(f"{path}: withholds {' and '.join(missing)}, which this federation asks for")
    if upload.manifest.get("counts") != terms.upload.counts:
        raise UploadError(f"{path}: class counts are {upload.manifest.get('counts')!r:.20}, not {terms.upload.counts}")
    if upload.counts is not None and upload.samples != max(1, round(float(upload.counts.sum()))):
        raise UploadError(f"{path}: samples ({upload.samples}) is not the sum of the class counts; train again")
    return upload


def _span(span: timedelta) -> str:
    minutes = int(span.total_seconds() // 60)
    days, hours = minutes // 1440, minutes // 60
    return f"{days} days" if days > 1 else f"{hours} hours" if hours > 1 else f"{minutes} minutes"
