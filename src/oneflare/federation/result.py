"""The result of a fusion of real members, `result.json`: typed, with one writer and one reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare.core.files import read_json, write_json
from oneflare.core.records import parse_record, record_to_dict
from oneflare.federation.admission import AdmissionResult
from oneflare.federation.intake import Examination
from oneflare.federation.log import Position
from oneflare.federation.scores import MemberScores, PooledScores, pooled
from oneflare.metrics.classification import Scores

REMEDY = "restore it from a copy, or remove it and fuse again"


@dataclass(frozen=True)
class FederationIdentity:
    """Which federation, and under which terms."""

    name: str
    id: str
    fingerprint: str


@dataclass(frozen=True)
class FusedModel:
    """One fusion of a federation, and the file with its model."""

    model: str
    """path of the file, relative to the federation's folder"""
    sha256: str
    parameters: int
    forward_passes: int
    """per image"""
    scores: Scores | None
    """None where the coordinator gave no test images"""


@dataclass(frozen=True)
class MemberResult:
    """A member that is in the fusion, and its upload."""

    name: str
    samples: int
    counts: tuple[int, ...] | None
    """images of each class; None where counts are withheld"""
    created: str
    signed: bool
    upload_bytes: int
    digest: str
    file: str


@dataclass(frozen=True)
class MaskedTotal:
    """What is known of the members' sums where they are masked."""

    roster: int
    """its number"""
    roster_digest: str
    threshold: int
    """members that a total needs"""
    counts: tuple[int, ...]
    """images of each class over all members in the total"""
    closed: str
    """when the round was closed"""


@dataclass(frozen=True)
class Change:
    """How a fusion differs from the one before it."""

    since: str
    """when the fusion before was made"""
    came: tuple[str, ...]
    gone: tuple[str, ...]
    renewed: tuple[str, ...]
    """members that sent another upload"""
    lost_classes: tuple[str, ...]
    """classes of which nobody has images any more"""


@dataclass(frozen=True, kw_only=True)
class FederationResult:
    """What one fusion of a federation gave, as its `result.json` says it."""

    oneflare: str
    """version of the package"""
    federation: FederationIdentity
    fused: str
    """when"""
    method: str
    encoder: dict[str, Any]
    """name and options"""
    classes: tuple[str, ...]
    counts_mode: str
    headline: str
    """the federation's own fusion"""
    fusions: dict[str, FusedModel]
    test_images: int | None
    members: tuple[MemberResult, ...]
    missing: tuple[str, ...]
    """admitted members without a usable upload"""
    removed: dict[str, str]
    """member -> when it was removed"""
    verdicts: tuple[Examination, ...]
    notes: tuple[str, ...]
    suspects: dict[str, str]
    """member -> why its upload does not fit the others'"""
    admission: AdmissionResult | None
    change: Change | None
    """None for the first fusion"""
    log: Position | None = None
    """where the log was before this fusion was written down; None where an earlier version fused"""
    masked: MaskedTotal | None = None
    """None where sums are not masked"""
    scores: tuple[MemberScores, ...] | None = None
    """what members measured of the federation's own model, in order of name; None while nobody has sent any"""
    version: int | None = None
    """number of this version; None where an earlier version of the package fused"""
    before: str | None = None
    """SHA-256 of the model of the version before; None for the first"""

    @classmethod
    def read(cls, path: Path) -> FederationResult:
        """path: a `result.json`; what earlier versions did not write yet is empty"""
        content = read_json(path, REMEDY)
        if isinstance(content, Mapping):
            content = {"notes": [], "suspects": {}, "admission": None, "change": None, "log": None, **content}
        return parse_record(cls, content, str(path), REMEDY)

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())

    @property
    def own(self) -> FusedModel:
        """The model of the federation's own fusion."""
        return self.fusions[self.headline]

    @property
    def names(self) -> tuple[str, ...]:
        """The members that are in the fusion."""
        return tuple(member.name for member in self.members)

    @property
    def table(self) -> tuple[tuple[int, ...], ...] | None:
        """`(members, classes)` images; None where a member withholds its counts."""
        rows = tuple(member.counts for member in self.members if member.counts is not None)
        return rows if len(rows) == len(self.members) else None

    @property
    def pooled(self) -> PooledScores | None:
        """What members measured of the federation's own model, together."""
        return pooled(self.scores) if self.scores else None

    def to_dict(self) -> dict[str, Any]:
        return record_to_dict(self)


def change_since(last: FederationResult | None, new: FederationResult) -> Change | None:
    """How a fusion differs from the one before: who came, who is gone, who sent anew, which classes nobody has now."""
    if last is None:
        return None
    before, after = ({member.name: member.digest for member in result.members} for result in (last, new))
    return Change(
        since=last.fused,
        came=tuple(name for name in after if name not in before),
        gone=tuple(name for name in before if name not in after),
        renewed=tuple(name for name in after if name in before and before[name] != after[name]),
        lost_classes=tuple(
            name for label, name in enumerate(new.classes) if _images(last, label) > 0 and _images(new, label) == 0
        ),
    )


def _images(result: FederationResult, label: int) -> int:
    """Images of a class over all members; where counts are withheld, one that nobody knows of is assumed."""
    if result.masked is not None:
        return result.masked.counts[label]
    return 1 if result.table is None else sum(row[label] for row in result.table)
