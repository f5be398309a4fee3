"""Scores at both ends: a member measures models on its own images, and the coordinator takes in what members tell."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from torch import Tensor

from oneflare._version import __version__
from oneflare.client.observer import Observer
from oneflare.core.files import digest_of, exclusive, tensor_digest
from oneflare.core.plain import plain
from oneflare.data import Split
from oneflare.errors import ConfigError, OneFlareError, RunError, UploadError
from oneflare.federation.charter import Charter, read_charter, short
from oneflare.federation.coordinator import FusedFederation, read_fused, release
from oneflare.federation.history import History
from oneflare.federation.identity import Signature, check_signature, dated, now
from oneflare.federation.log import Event
from oneflare.federation.model_signing import coordinator_key
from oneflare.federation.recording import score_events, write_down
from oneflare.federation.result import FederationResult
from oneflare.federation.scores import MESSAGE, SMALLEST_GROUP, MemberScores, read_scores
from oneflare.federation.versions import FederationFiles
from oneflare.metrics.deciding import with_rule
from oneflare.metrics.figures import AgainstAlone, ModelFigures, compared, figures_of
from oneflare.metrics.thresholds import kept_shares
from oneflare.models import GlobalModel
from oneflare.upload.signing import check_name

WAIT_SECONDS = 60.0
REMEDIES = ("`oneflare evaluate` with --sign signs it", "`oneflare evaluate` with the new key signs it again")


@dataclass(frozen=True)
class Subject:
    """A model that is tested, and the file that it comes from."""

    model: GlobalModel
    file: Path

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.file.read_bytes()).hexdigest()


class ModelTest:
    """A test of the federation's model, and of the member's own model on the same images; each is asked once."""

    def __init__(self, together: Subject, test: Split, own: Subject | None = None) -> None:
        self.together, self.own, self.test = together, own, test
        self.classes = together.model.task.classes
        if own is not None and own.model.task.classes != self.classes:
            raise ConfigError(
                f"--alone {own.file}: has other classes than {together.file}; give your own model of them"
            )
        self._answers = together.model.answers(test.images)
        self._together = self._answers.logits
        self._alone = None if own is None else own.model.logits(test.images)

    def figures(self, smallest_group: int = 1) -> ModelFigures:
        """The federation's model by its most likely class, and by its decision rule if it has one; of smaller groups
        nothing."""
        figures, model = self._figures(self._together, smallest_group), self.together.model
        bound, familiarity, decision = model.familiarity_bound, self._answers.familiarity, model.decision
        if familiarity is not None and bound is not None:
            figures = replace(figures, kept=kept_shares(familiarity, bound, smallest_group))
        if decision is None:
            return figures
        answered, test = decision.labels(self._answers), self.test
        return with_rule(
            figures, answered, test.labels, test.patients, rule=decision.rule, smallest_group=smallest_group
        )

    def alone(self, smallest_group: int = 1) -> ModelFigures | None:
        """The member's own model; of smaller groups nothing."""
        return None if self._alone is None else self._figures(self._alone, smallest_group)

    @property
    def comparison(self) -> AgainstAlone | None:
        if self._alone is None:
            return None
        return compared(self._together, self._alone, self.test.labels, self.test.patients)

    def scores(self, charter: Charter | None, member: str | None) -> MemberScores:
        """What the member may tell, unsigned. charter: None outside a federation"""
        if charter is not None and charter.classes != self.classes:
            raise ConfigError(f"{self.together.file}: has other classes than {charter.name}; give its own model")
        limit = SMALLEST_GROUP if charter is None else charter.smallest_group
        federation = None if charter is None else charter.fingerprint
        return MemberScores(
            oneflare=__version__,
            federation=federation,
            member=member,
            created=now(),
            model=self.together.sha256,
            test=digest_of([federation, tensor_digest(self.test.images), tensor_digest(self.test.labels)]),
            smallest_group=limit,
            together=self.figures(limit),
            alone=self.alone(limit),
            own=None if self.own is None else self.own.sha256,
            comparison=self.comparison,
        )

    def _figures(self, logits: Tensor, smallest_group: int) -> ModelFigures:
        return figures_of(logits, self.test.labels, self.classes, self.test.patients, smallest_group)


@dataclass(frozen=True)
class ScoreVerdict:
    """What became of one file of scores."""

    file: str
    member: str | None
    status: str
    """in | known | refused"""
    reason: str = ""


@dataclass(frozen=True)
class Collected:
    """The federation with the scores that it now has, and the verdict on every file."""

    fused: FusedFederation
    verdicts: tuple[ScoreVerdict, ...]


def collect_scores(folder: Path, files: Sequence[Path], observer: Observer | None = None) -> Collected:
    """Take in members' scores of the model in use; what is refused changes nothing else. Everything is written down."""
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter, place = read_charter(folder), FederationFiles(folder)
        coordinator_key(charter, folder)  # a wrong key is found before anything is changed
        content = read_fused(folder)
        kept = {str(one.member): one for one in content.scores or ()}
        desk = _Desk(charter, place, content, kept)
        verdicts = [desk.examine(path) for path in _score_files(files)]
        refused = [
            Event("refused", {"who": one.member or "unknown", "file": one.file, "reason": one.reason})
            for one in verdicts
            if one.status == "refused"
        ]
        if refused:
            write_down(charter, folder, refused)
        if desk.accepted:
            scores = tuple(kept[name] for name in sorted(kept))
            content = replace(content, scores=scores)
            content.write(place.result)
            write_down(charter, folder, score_events(place, list(desk.accepted.items())))
            release(charter, place, content, observer or Observer())
    return Collected(FusedFederation(charter, place, content), tuple(verdicts))


def _score_files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted(file for file in path.rglob("*.json") if file.name[0] != ".") if path.is_dir() else [path]
        if not inside:
            raise RunError(f"{path} holds no file of scores (*.json); give the files that members have sent")
        found += inside
    return found


@dataclass
class _Desk:
    """Examines files of scores one after the other."""

    charter: Charter
    files: FederationFiles
    content: FederationResult
    kept: dict[str, MemberScores]
    """member -> its scores of the model in use"""

    def __post_init__(self) -> None:
        self.accepted: dict[str, MemberScores] = {}
        self.removed: Mapping[str, str] = self.files.removed()

    def examine(self, path: Path) -> ScoreVerdict:
        member: str | None = None
        try:
            scores = read_scores(path)
            member = self._sender(path, scores)
            self._check_content(path, scores)
            before = self.kept.get(member)
            if before is not None and before.digest == scores.digest:
                return ScoreVerdict(plain(path), member, "known", "these scores are in the result already")
            self._check_age(path, scores, before)
        except OneFlareError as error:
            return ScoreVerdict(plain(path), member, "refused", plain(str(error).removeprefix(f"{path}: ")))
        self.kept[member] = self.accepted[plain(path)] = scores
        return ScoreVerdict(plain(path), member, "in", "" if before is None else "replaces earlier scores")

    def _sender(self, path: Path, scores: MemberScores) -> str:
        """The member that the scores are from."""
        if scores.federation is None or scores.member is None:
            raise UploadError(f"{path}: names no member; `oneflare evaluate` with --federation and --name writes them")
        if scores.federation != self.charter.fingerprint:
            raise UploadError(
                f"{path}: was made for another federation or other terms ({short(plain(scores.federation, 40))}, not "
                f"{short(self.charter.fingerprint)})"
            )
        member = self.charter.check_member(check_name(scores.member))
        signature = None
        if scores.key is not None and scores.signature is not None:
            signature = Signature(scores.key, scores.signature, scores.digest, MESSAGE)
        check_signature(path, signature, self.charter, member, REMEDIES)
        if member in self.removed:
            raise UploadError(f"{path}: {member} was removed on {self.removed[member][:10]}")
        return member

    def _check_content(self, path: Path, scores: MemberScores) -> None:
        """Scores of the model in use, under the terms, and of images that nobody else has sent scores of."""
        if scores.classes != self.charter.classes:
            raise UploadError(f"{path}: is about other classes than those of {self.charter.name}")
        if scores.smallest_group != self.charter.smallest_group:
            raise UploadError(
                f"{path}: withholds groups below {scores.smallest_group}, and the terms say "
                f"{self.charter.smallest_group}; evaluate again with this federation's {self.files.charter.name}"
            )
        if scores.model != self.content.own.sha256:
            known = {one.model: one.number for one in History.read(self.files.models).versions}
            which = f"version {known[scores.model]}" if scores.model in known else "another model"
            raise UploadError(
                f"{path}: is about {which}, not about the one in use (version {self.content.version}); evaluate "
                f"{self.files.model.name} with SHA-256 {self.content.own.sha256[:16]}..."
            )
        for name, other in self.kept.items():
            if name != scores.member and other.test == scores.test:
                raise UploadError(f"{path}: is about the same test images as the scores of {name}; each uses its own")

    def _check_age(self, path: Path, scores: MemberScores, before: MemberScores | None) -> None:
        moment = dated(path, scores.created, "evaluate again")
        if before is not None and moment <= datetime.fromisoformat(before.created):
            raise UploadError(
                f"{path}: is older than the scores of {scores.member} that are in the result (made "
                f"{before.created[:16].replace('T', ' ')} UTC); {scores.member} evaluates again to replace them"
            )
