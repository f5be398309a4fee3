"""The versions of a federation's model, `models/versions.json`: what each was made of, what changed, how good it is.

The list is never shortened. A version whose files were deleted, because somebody who is in it was removed, stays in the
list and says so: its digests and names, without any figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oneflare.core.files import write_json
from oneflare.core.records import read_record, record_to_dict
from oneflare.errors import RunError
from oneflare.federation.result import Change, FederationResult
from oneflare.metrics.intervals import Measured

FILE = "versions.json"
REMEDY = "restore it from a copy"


@dataclass(frozen=True)
class VersionScores:
    """What members' tests say of a version."""

    images: int
    accuracy: Measured
    balanced_accuracy: Measured | None
    tests: dict[str, str]
    """member -> digest of its test images; two versions are compared fairly where these are equal"""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of the model."""

    number: int
    fused: str
    """when"""
    fusion: str
    terms: str
    """fingerprint of the terms"""
    model: str
    """SHA-256 of the model's file"""
    before: str | None
    """SHA-256 of the model of the version before; None for the first"""
    members: dict[str, str]
    """member -> digest of its upload"""
    change: Change | None
    """who came, left and sent anew since the version before; None for the first"""
    scores: VersionScores | None = None
    """None while no member has sent scores"""
    deleted: str | None = None
    """why the files of this version are no longer there"""

    @property
    def folder(self) -> str:
        """Its folder's name in `models/`."""
        return f"{self.number:03d}"


@dataclass(frozen=True)
class History:
    """All versions, and which of them is in use."""

    current: int | None = None
    versions: tuple[Version, ...] = ()

    @classmethod
    def read(cls, models: Path) -> History:
        """models: the folder `models` of a federation; empty where nothing was fused yet"""
        path = models / FILE
        return read_record(cls, path, REMEDY) if path.exists() else cls()

    def write(self, models: Path) -> None:
        write_json(models / FILE, record_to_dict(self))

    def to_dict(self) -> dict[str, Any]:
        return record_to_dict(self)

    def find(self, number: int) -> Version:
        for version in self.versions:
            if version.number == number:
                return version
        known = ", ".join(str(version.number) for version in self.versions) or "none"
        raise RunError(f"there is no version {number}; versions: {known}")

    def before(self) -> Version:
        """The last version before the one in use whose files are there."""
        earlier = [one for one in self.versions if self.current and one.number < self.current and one.deleted is None]
        if not earlier:
            raise RunError("there is no earlier version that is still there; `oneflare server versions` lists all")
        return earlier[-1]

    def next_number(self) -> int:
        return max((version.number for version in self.versions), default=0) + 1

    def with_version(self, version: Version) -> History:
        """The list with a version added, or written anew, which is now in use."""
        others = [one for one in self.versions if one.number != version.number]
        return History(version.number, tuple(sorted([*others, version], key=lambda one: one.number)))

    def without_files(self, number: int, reason: str) -> History:
        """The list after the files of a version were deleted."""
        changed = (replace(one, deleted=reason, scores=None) if one.number == number else one for one in self.versions)
        return replace(self, versions=tuple(changed))


def version_of(number: int, content: FederationResult) -> Version:
    """A version as its result describes it."""
    scores = content.pooled
    return Version(
        number=number,
        fused=content.fused,
        fusion=content.headline,
        terms=content.federation.fingerprint,
        model=content.own.sha256,
        before=content.before,
        members={member.name: member.digest for member in content.members},
        change=content.change,
        scores=None
        if scores is None
        else VersionScores(
            scores.together.images,
            scores.together.accuracy,
            scores.together.balanced_accuracy,
            {str(one.member): one.test for one in scores.members},
        ),
    )
