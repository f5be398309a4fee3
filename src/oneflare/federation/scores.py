"""What a member tells of a test: how good the federation's model is on its images, and how good its own model alone.

A file of scores is one JSON object with figures only: counts, rates and intervals, without those of small groups
(`metrics.withholding`), and with the member's signature. It names the model by the SHA-256 of its file, so that figures
of one version are never taken for another's. `pooled` makes one picture of what several members tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from oneflare.core.files import digest_of, read_regular, write_json
from oneflare.core.records import parse_record, record_to_dict
from oneflare.core.strict import strict_json
from oneflare.errors import RunError
from oneflare.metrics.figures import AgainstAlone, ModelFigures
from oneflare.metrics.pooling import pool, pool_comparisons, untold
from oneflare.upload.signing import SigningKey

MESSAGE = b"oneflare scores "
SIZE_LIMIT = 1 << 24
SMALLEST_GROUP = 5
"""where the terms say nothing"""
AGAIN = "ask the member for the file again"


@dataclass(frozen=True, kw_only=True)
class MemberScores:
    """The figures of one test at one member, as its `scores.json` says them."""

    kind: Literal["scores"] = "scores"
    oneflare: str
    """version of the package"""
    federation: str | None
    """fingerprint of the terms; None where the model was measured outside a federation"""
    member: str | None
    created: str
    """when, UTC"""
    model: str
    """SHA-256 of the model's file"""
    test: str
    """digest of the test images and their labels: equal for two files if they are about the same test"""
    smallest_group: int
    """figures of fewer images (patients, where they are known) are withheld"""
    together: ModelFigures
    """the federation's model"""
    alone: ModelFigures | None
    """the member's own model on the same images; None where it was not measured"""
    own: str | None
    """SHA-256 of the file of the member's own model"""
    comparison: AgainstAlone | None
    """together against alone, image by image"""
    key: str | None = None
    """the member's public key"""
    signature: str | None = None

    def __post_init__(self) -> None:
        if self.smallest_group < 1:
            raise ValueError("smallest_group is at least 1")
        if (self.alone is None) != (self.own is None) or (self.alone is None) != (self.comparison is None):
            raise ValueError("figures of the member's own model, its digest and the comparison belong together")
        if (self.key is None) != (self.signature is None) and self.signature is not None:
            raise ValueError("a signature belongs to a key")
        alone = self.alone
        if not all(figures.complete for figures in (self.together, alone) if figures is not None):
            raise ValueError("the figures of the classes do not add up to the images of the test")
        if alone is not None and (alone.images, alone.names) != (self.together.images, self.together.names):
            raise ValueError("the two models were measured on different images")
        by_rule = self.together.by_rule
        if by_rule is not None and by_rule.images != self.together.images:
            raise ValueError("the decision rule was measured on different images")

    @property
    def classes(self) -> tuple[str, ...]:
        return self.together.names

    @property
    def digest(self) -> str:
        """Of all but the signature: what is signed."""
        return digest_of({name: value for name, value in self.to_dict().items() if name != "signature"})

    def to_dict(self) -> dict[str, Any]:
        return record_to_dict(self)

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())

    def signed(self, key: SigningKey) -> MemberScores:
        named = replace(self, key=key.public, signature=None)
        return replace(named, signature=key.sign(named.digest, MESSAGE))


def read_scores(path: Path) -> MemberScores:
    """A file of scores from a member; one line says what is wrong with it, if anything is."""
    try:
        content = strict_json(read_regular(path, SIZE_LIMIT))
    except ValueError:
        raise RunError(f"{path}: is damaged or cut off (no valid JSON); {AGAIN}") from None
    if not isinstance(content, dict) or content.get("kind") != "scores":
        raise RunError(f"{path}: is no file of scores; `oneflare evaluate MODEL --data FOLDER --out FILE` writes one")
    return parse_record(MemberScores, content, str(path), AGAIN)


@dataclass(frozen=True)
class PooledScores:
    """What several members tell of one model."""

    members: tuple[MemberScores, ...]
    """in order of name"""
    together: ModelFigures
    """the federation's model on all test images of all members"""
    alone: ModelFigures | None
    """every member's own model on its own test images, over the members that measured it"""
    comparison: AgainstAlone | None
    """together against alone, over the same members"""
    untold: tuple[tuple[int, ...], ...] | None
    """how many members withhold a cell of the confusion matrix"""

    @property
    def worst(self) -> MemberScores:
        """The member at which the federation's model is least accurate."""
        return min(self.members, key=lambda one: one.together.accuracy.value)


def pooled(scores: Sequence[MemberScores]) -> PooledScores:
    """One picture of the scores of several members, which are about the same model and classes."""
    members = tuple(sorted(scores, key=lambda one: one.member or ""))
    if len({(one.model, one.classes) for one in members}) != 1:
        raise RunError("scores of different models or classes cannot be pooled")
    compared = [(one.comparison, one.together) for one in members if one.comparison is not None]
    alone = [one.alone for one in members if one.alone is not None]
    return PooledScores(
        members,
        pool([one.together for one in members]),
        pool(alone) if alone else None,
        pool_comparisons(compared) if compared else None,
        untold([one.together for one in members]),
    )
