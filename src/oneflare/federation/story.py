"""What the page of a federation tells, as plain data: from its result, members' scores, its log and its versions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneflare.core.plain import plain
from oneflare.core.records import read_record
from oneflare.errors import OneFlareError
from oneflare.federation.charter import Charter
from oneflare.federation.history import History
from oneflare.federation.log import SHOWN, LogEntry, Verified
from oneflare.federation.result import FederationResult, MemberResult
from oneflare.federation.scores import MemberScores, PooledScores
from oneflare.federation.verdict import Verdict, judge, listed, never_trained, quoted
from oneflare.federation.versions import FederationFiles
from oneflare.metrics.figures import ClassFigures, RuleFigures, RuleRates
from oneflare.metrics.intervals import Measured
from oneflare.models.decisions import REMEDY, Decision, decision_path
from oneflare.report.forest import Mark, forest
from oneflare.report.story import Test
from oneflare.upload.disclosure import disclose

FEW = 20
"""a class with fewer training images than this, over all members, is named on the first screen"""
LINES = 200
"""of the log, the last ones"""


@dataclass(frozen=True)
class MemberRow:
    """One member that is in the model or has measured it."""

    name: str
    upload: MemberResult | None
    """None where it only measured the model"""
    scores: MemberScores | None
    mark: Mark | None
    """of its gain; None where it did not compare"""

    @property
    def gain(self) -> Measured | None:
        return None if self.scores is None or self.scores.comparison is None else self.scores.comparison.gain

    @property
    def weakest(self) -> ClassFigures | None:
        return None if self.scores is None else self.scores.together.weakest


@dataclass(frozen=True)
class ClassRow:
    """One class: what it was trained on, and what members' tests say of it."""

    name: str
    images: int | None
    """training images over all members; None where counts are withheld"""
    owners: tuple[str, ...] | None
    """members that have images of it; None where that is not known"""
    figures: ClassFigures | None
    threshold: float | None
    decided: RuleRates | None
    """as the model decides by its thresholds; None where nobody has measured that"""


@dataclass(frozen=True)
class Absent:
    """Somebody whose upload is not in the model, or is in it and suspect."""

    who: str
    status: str
    why: str
    file: str


@dataclass(frozen=True)
class Step:
    """A line of the log for people."""

    number: int
    at: str
    event: str
    text: str


@dataclass(frozen=True)
class Disclosed:
    """What one kind of field in the uploads reveals."""

    name: str
    holds: str
    reveals: str
    size_bytes: int
    """the largest over members"""


@dataclass(frozen=True)
class FederationStory:
    charter: Charter
    content: FederationResult
    verdict: Verdict
    pooled: PooledScores | None
    members: tuple[MemberRow, ...]
    classes: tuple[ClassRow, ...]
    never: tuple[str, ...]
    """what the model has never seen, in sentences"""
    limits: tuple[str, ...]
    absent: tuple[Absent, ...]
    steps: tuple[Step, ...]
    log: Verified
    first: tuple[str, ...]
    """what an upload means for the member who sends it"""
    disclosed: tuple[Disclosed, ...]
    history: History
    decision: Decision | None

    @property
    def by_rule(self) -> RuleFigures | None:
        return _by_rule(self.content, self.decision)

    @property
    def better(self) -> tuple[int, int]:
        """At how many members the model is more accurate than the member's own, and how many compared."""
        gains = [row.gain for row in self.members if row.gain is not None]
        return sum(gain.value > 0 for gain in gains), len(gains)

    def to_dict(self) -> dict[str, Any]:
        """What the figures are drawn from."""
        content, pooled = self.content, self.pooled
        table = content.table
        owners = list(content.names)
        if content.masked is not None:
            table, owners = (content.masked.counts,), ["all members together"]
        figures = None if pooled is None else pooled.together
        return {
            "classes": list(content.classes),
            "members": owners,
            "table": table,
            "confusion": None if figures is None else figures.confusion,
            "untold": None if pooled is None else pooled.untold,
            "reliability": None if figures is None else [asdict(one) for one in figures.reliability],
            "rates": None if figures is None else [_rates(one) for one in figures.classes],
        }


def _rates(one: ClassFigures) -> dict[str, Any]:
    measured = {"sensitivity": one.sensitivity, "specificity": one.specificity}
    return {"support": one.support} | {name: None if rate is None else asdict(rate) for name, rate in measured.items()}


def federation_story(
    charter: Charter, files: FederationFiles, content: FederationResult, limits: Sequence[str], log: Verified
) -> FederationStory:
    """limits: what a user of the model must know, in sentences; log: as it was found"""
    first, disclosed = _disclosures(files)
    decision, places = decision_of(files, content), _Places.of(files.folder, content, log.entries)
    return FederationStory(
        charter=charter,
        content=content,
        verdict=judge(content, log.problems),
        pooled=content.pooled,
        members=_members(content),
        classes=_classes(content, decision),
        never=tuple(_never(content, decision)),
        limits=tuple(limits),
        absent=tuple(_absent(content, log.entries, places)),
        steps=tuple(_step(entry, places) for entry in log.entries[-LINES:]),
        log=log,
        first=first,
        disclosed=disclosed,
        history=History.read(files.models),
        decision=decision,
    )


def _members(content: FederationResult) -> tuple[MemberRow, ...]:
    """Everybody who is in the model or measured it, by name; the marks of all gains share one scale."""
    uploads = {member.name: member for member in content.members}
    scores = {str(one.member): one for one in content.scores or ()}
    compared = {name: one.comparison.gain for name, one in scores.items() if one.comparison is not None}
    tests = [
        Test(name, "", 100 * gain.value, 100 * gain.low, 100 * gain.high, [], None, "above", 0.0, "points", "undecided")
        for name, gain in compared.items()
    ]
    marks = dict(zip(compared, forest([tests])[0], strict=True)) if tests else {}
    names = sorted({*uploads, *scores})
    return tuple(MemberRow(name, uploads.get(name), scores.get(name), marks.get(name)) for name in names)


def _classes(content: FederationResult, decision: Decision | None) -> tuple[ClassRow, ...]:
    pooled, table = content.pooled, content.table
    by_rule = _by_rule(content, decision)
    rows = []
    for label, name in enumerate(content.classes):
        images: int | None = None
        owners: tuple[str, ...] | None = None
        if content.masked is not None:
            images = content.masked.counts[label]
        elif table is not None:
            images = sum(row[label] for row in table)
            owners = tuple(member for member, row in zip(content.names, table, strict=True) if row[label] > 0)
        figures = None if pooled is None else pooled.together.classes[label]
        threshold = None if decision is None else decision.thresholds[label]
        decided = None if by_rule is None else by_rule.classes[label]
        rows.append(ClassRow(name, images, owners, figures, threshold, decided))
    return tuple(rows)


def _by_rule(content: FederationResult, decision: Decision | None) -> RuleFigures | None:
    """What members measured under these thresholds; None where they measured none, or earlier ones."""
    told = None if content.pooled is None else content.pooled.together.by_rule
    return told if told is not None and decision is not None and told.rule == decision.rule else None


def _never(content: FederationResult, decision: Decision | None) -> list[str]:
    """What the model has never seen, or hardly."""
    rows = _classes(content, None)
    lines = []
    unseen = never_trained(content)
    if unseen:
        lines.append(f"No member has images of {quoted(unseen)}.")
    few = [f"'{row.name}' ({row.images})" for row in rows if row.images is not None and 0 < row.images < FEW]
    if few:
        lines.append(f"Hardly any training images of {listed(few)}.")
    lonely = [f"'{row.name}' ({row.owners[0]})" for row in rows if row.owners is not None and len(row.owners) == 1]
    if lonely and len(content.members) > 1:
        lines.append(f"Trained at one member only: {listed(lonely)}.")
    if content.table is None and content.masked is None:
        lines.append("Which classes are rare is not known, because counts are withheld.")
    if decision is not None and decision.floor is not None and decision.keeps is not None:
        lines.append(
            "Images of anything else; they can get the answer 'none of the known classes', which "
            f"{1 - decision.keeps:.0%} of known images get too."
        )
    else:
        lines.append(f"Images of anything else than these {len(rows)} classes; they get one of them all the same.")
    return lines


def _absent(content: FederationResult, entries: Sequence[LogEntry], places: _Places) -> list[Absent]:
    """Who is not in the model and why, and whose upload is suspect. entries: of the log, which knows older reasons"""
    rows = [
        Absent(verdict.who, verdict.status, places.relative(verdict.reason), Path(verdict.file).name)
        for verdict in content.verdicts
        if verdict.status != "in"
    ]
    named = {row.who for row in rows}
    rows += [
        Absent(name, "removed", f"left on {when[:10]}", "")
        for name, when in content.removed.items()
        if name not in named
    ]
    named |= set(content.removed)
    rows += [_missing(name, entries, places) for name in content.missing if name not in named]
    rows += [Absent(name, "suspect", why, "") for name, why in content.suspects.items()]
    order = ("suspect", "refused", "late", "removed", "missing", "superseded")
    return sorted(rows, key=lambda row: (order.index(row.status) if row.status in order else len(order), row.who))


def _missing(name: str, entries: Sequence[LogEntry], places: _Places) -> Absent:
    """A member without a usable upload: what the log says of the last one that it sent, if it sent any."""
    told = [entry.details for entry in entries if entry.event == "refused" and entry.details.get("who") == name]
    if not told:
        return Absent(name, "missing", "sent no upload", "")
    status, _, why = str(told[-1].get("reason")).partition(": ")
    if not why:
        status, why = "refused", status
    return Absent(name, status, plain(places.relative(why), 400), Path(str(told[-1].get("file", ""))).name)


@dataclass(frozen=True)
class _Places:
    """Absolute paths of files that were sent, and the same as seen from the federation's folder, the longest first.

    A page travels; where the coordinator keeps its folders is nobody else's business.
    """

    known: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, folder: Path, content: FederationResult, entries: Sequence[LogEntry]) -> _Places:
        files = {verdict.file for verdict in content.verdicts}
        files |= {str(entry.details["file"]) for entry in entries if "file" in entry.details}
        home = folder.resolve()
        absolute = sorted((file for file in files if Path(file).is_absolute()), key=len, reverse=True)
        inside = [(f"{place}{os.sep}", "") for place in (home, folder.absolute())]
        return cls((*((file, os.path.relpath(Path(file).resolve(), home)) for file in absolute), *inside))

    def relative(self, text: str) -> str:
        for absolute, seen in self.known:
            text = text.replace(absolute, seen)
        return text


def _step(entry: LogEntry, places: _Places) -> Step:
    told = plain(places.relative(_told(entry)), 400)
    return Step(entry.number, entry.at[:19].replace("T", " "), entry.event, told)


def _told(entry: LogEntry) -> str:
    """What happened, for people who do not read digests."""
    facts, who = entry.details, str(entry.details.get("who", ""))
    if entry.event == "terms":
        return (
            f"terms with the fingerprint {str(facts.get('fingerprint'))[:SHOWN]} for {listed(facts.get('members', []))}"
        )
    if entry.event == "received":
        return f"{who}: upload received{', signed' if facts.get('signed') else ', not signed'}"
    if entry.event == "refused":
        return f"{who}: {facts.get('reason')}"
    if entry.event == "removed":
        return f"{who} was removed"
    if entry.event == "scored":
        return f"{who}: measured the model on {facts.get('images')} images, accuracy {facts.get('accuracy')}"
    if entry.event == "fused":
        names = [str(member).partition(":")[0] for member in facts.get("members", [])]
        return f"model {str(facts.get('model'))[:SHOWN]} made of the uploads of {listed(names, 20)}"
    if entry.event == "released":
        return f"model {str(facts.get('model'))[:SHOWN]} and its result signed"
    return entry.text.removeprefix(f"{entry.event}: ")


def _disclosures(files: FederationFiles) -> tuple[tuple[str, ...], tuple[Disclosed, ...]]:
    """What the uploads in the model say and reveal, once for all members, as `oneflare upload show` describes each."""
    first: dict[str, None] = {}
    fields: dict[str, Disclosed] = {}
    for path in files.kept():
        try:
            found = disclose(path)
        except OneFlareError:
            continue  # the fusion has checked it; what cannot be described now is not in this table
        first |= dict.fromkeys(found.first)
        for field in found.fields:
            known = fields.get(field.name)
            size = max(field.size_bytes, 0 if known is None else known.size_bytes)
            fields[field.name] = Disclosed(field.name, field.holds, field.reveals, size)
    return tuple(first), tuple(fields.values())


def decision_of(files: FederationFiles, content: FederationResult) -> Decision | None:
    """The thresholds beside the model, if they are for this one."""
    path = decision_path(files.folder / content.own.model)
    if not path.exists():
        return None
    decision = read_record(Decision, path, REMEDY)
    return decision if decision.model == content.own.sha256 else None
