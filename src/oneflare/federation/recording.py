"""What of a federation's work goes into its log, and in which words."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from oneflare.errors import ConfigError, MemberFault, RunError
from oneflare.federation.admission import AdmissionResult
from oneflare.federation.charter import Charter
from oneflare.federation.intake import Intake
from oneflare.federation.log import Event, FederationLog, Position, Verified
from oneflare.federation.model_signing import PRIVATE, coordinator_key
from oneflare.federation.result import FederationResult
from oneflare.federation.scores import MemberScores
from oneflare.federation.versions import FederationFiles
from oneflare.models.sealing import SUFFIX, log_position
from oneflare.upload.masking.roster import Roster


def write_down(charter: Charter, folder: Path, events: Sequence[Event]) -> Position:
    """Append events to the log, signed with the coordinator's key where it is here; new terms are noted first."""
    log = FederationLog(folder, charter.id, seen_path(folder, charter))
    terms = {
        "fingerprint": charter.fingerprint,
        "charter": hashlib.sha256(charter.to_yaml().encode()).hexdigest(),
        "members": list(charter.members),
    }
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    return log.append(events, moment, coordinator_key(charter, folder), Event("terms", terms), _ends(folder))


def seen_path(folder: Path, charter: Charter) -> Path | None:
    """The file beside the coordinator's private key that knows where the log ends; None where the key is not here.

    The key may be a link to another disk: then so is this file, and whoever changes the federation's folder does not
    change it.
    """
    private = folder / PRIVATE
    if charter.coordinator is None or not private.exists():
        return None
    return private.resolve().with_name(f"coordinator-{charter.id[:16]}.seen")


def _ends(folder: Path) -> list[tuple[str, Position]]:
    """Where the log ended when the last result was made, if there is one that can be read."""
    files = FederationFiles(folder)
    with contextlib.suppress(RunError):
        last = files.last()
        return [] if last is None or last.log is None else [(files.result.name, last.log)]
    return []


def intake_events(intake: Intake, remove: Sequence[str]) -> list[Event]:
    """What was examined, and who leaves now."""
    events = [
        Event(
            "received" if verdict.status == "in" else "refused",
            {
                "who": verdict.who,
                "file": verdict.file,
                "digest": verdict.digest,
                "signed": verdict.signed,
                "reason": f"{verdict.status}: {verdict.reason}" if verdict.status != "in" else None,
            },
        )
        for verdict in intake.verdicts
    ]
    return events + [Event("removed", {"who": name}) for name in remove]


def decision_events(
    checked: AdmissionResult | None, faults: Sequence[MemberFault], names: Mapping[int, str]
) -> list[Event]:
    """Members whose effect on the coordinator's images was accepted, and members that turned out to be of no use."""
    approved: Sequence[str] = () if checked is None else checked.approved
    events = [Event("refused", {"who": names[fault.client], "reason": str(fault)}) for fault in faults]
    return events + [Event("approved", {"who": name}) for name in approved]


def fusion_event(files: FederationFiles, content: FederationResult) -> Event:
    """A model was made, of whom, and what it is."""
    return Event(
        "fused",
        {
            "members": [f"{member.name}:{member.digest[:16]}" for member in content.members],
            "fusion": content.headline,
            "suspects": list(content.suspects),
            "version": content.version,
            "model": content.own.sha256,
            "result": _digest(files),
        },
    )


def score_events(files: FederationFiles, accepted: Sequence[tuple[str, MemberScores]]) -> list[Event]:
    """Scores that are part of the result now. accepted: files and what is in them"""
    return [
        Event(
            "scored",
            {
                "who": scores.member,
                "file": file,
                "digest": scores.digest,
                "signed": scores.signature is not None,
                "accuracy": round(scores.together.accuracy.value, 4),
                "images": scores.together.images,
                "model": scores.model,
                "result": _digest(files),
            },
        )
        for file, scores in accepted
    ]


def rollback_event(files: FederationFiles, content: FederationResult, instead_of: int | None) -> Event:
    """An earlier version is in use again."""
    facts = {"version": content.version, "instead_of": instead_of, "model": content.own.sha256}
    return Event("rolled_back", facts | {"result": _digest(files)})


def roster_event(roster: Roster, without: Sequence[str]) -> Event:
    """The coordinator signed a roster."""
    facts = {"number": roster.number, "members": list(roster.names), "without": list(without)}
    return Event("roster", facts | {"threshold": roster.threshold, "digest": roster.digest})


def closed_event(roster: Roster, uploaded: Mapping[str, str], missing: Sequence[str]) -> Event:
    """A round of masked sums was closed. uploaded: member -> digest of its upload"""
    members = [f"{name}:{digest[:16]}" for name, digest in uploaded.items()]
    return Event("closed", {"roster": roster.number, "members": members, "missing": list(missing)})


def _digest(files: FederationFiles) -> str:
    return hashlib.sha256(files.result.read_bytes()).hexdigest()


def release_event(charter: Charter, content: FederationResult) -> Event:
    """Model and result were signed, with which key."""
    return Event("released", {"model": content.own.sha256, "key": charter.signing_key})


def expected_end(text: str, keys: Sequence[str]) -> tuple[str, Position]:
    """An end of the log that somebody remembers: NUMBER:DIGEST, or a signature by one of the coordinator's keys."""
    place = Path(text)
    if place.suffix != SUFFIX:
        return "--expect", Position.parse(text)
    for key in keys[:-1]:
        with contextlib.suppress(RunError):
            return place.name, Position.parse(log_position(place, key))
    if not keys:
        raise ConfigError(f"--expect {text}: the charter names no key of the coordinator, so nobody signed this file")
    return place.name, Position.parse(log_position(place, keys[-1]))


def check_log(folder: Path, charter: Charter, expected: Sequence[tuple[str, Position]] = ()) -> Verified:
    """The federation's log, compared with the charter's keys, with the last result, and with what others remember."""
    files, log = FederationFiles(folder), FederationLog(folder, charter.id, seen_path(folder, charter))
    last = files.last()
    found = log.verify(charter.signing_keys, *expected, *_ends(folder))
    if last is None:
        return found
    written = [entry for entry in found.entries if entry.event in ("fused", "scored", "rolled_back")]
    if not written or written[-1].details.get("result") != _digest(files):
        problem = f"{files.result.name} is not the one that the log's last fusion, scores or rollback wrote"
        return Verified(found.entries, (*found.problems, problem), found.position)
    return found
