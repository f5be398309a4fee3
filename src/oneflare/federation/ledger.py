"""The member's record of its privacy budget: what its earlier uploads have already revealed.

Noise protects an image as long as it is answered for once. A coordinator that asks again gets the kept upload again,
which tells nothing new; a fresh answer about the same images adds its epsilon to what was spent and is refused beyond
the member's budget. The ledger is a folder that belongs to the member (beside its private key, or in its home):
`ledger.json`, and the uploads it has given.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from oneflare.core.config import UploadConfig
from oneflare.core.files import digest_of, read_json, tensor_digest, write_json
from oneflare.data import ClientData
from oneflare.errors import BudgetError, RunError, UploadError
from oneflare.upload import read_manifest

HOME = "ONEFLARE_HOME"
DIGITS = 16
"""of an image's digest"""
SLACK = 1 + 1e-9
"""sums of budgets may be rounded"""


@dataclass(frozen=True)
class Question:
    """Which images are asked about, under which terms, at which price."""

    federation: str
    """fingerprint of the terms"""
    name: str
    member: str
    epsilon: float
    delta: float
    view: str
    """how images are brought to one size and colour: under another view, the same image looks different"""
    data: str
    """digest of all images and labels"""
    images: str
    """digests of the single images, `DIGITS` each"""

    @classmethod
    def of(cls, charter: Any, member: str, data: ClientData) -> Question | None:
        """None where the terms promise no privacy: then there is no budget to keep."""
        price = price_of(charter.terms.upload)
        if price is None:
            return None
        return cls(
            charter.fingerprint,
            charter.name,
            member,
            *price,
            digest_of(charter.image.model_dump(mode="json")),
            digest_of([tensor_digest(data.images), tensor_digest(data.labels)]),
            "".join(hashlib.sha256(image.numpy().tobytes()).hexdigest()[:DIGITS] for image in data.images),
        )


@dataclass(frozen=True)
class Answer(Question):
    """An upload that a member has given."""

    created: str
    digest: str
    """of the upload"""

    def concerns(self, question: Question) -> bool:
        """Whether it may be about one of the same images; where that cannot be seen, it counts."""
        return self.view != question.view or not _apart(self.images, question.images)

    def to_dict(self) -> dict[str, Any]:
        """Without the digests of single images."""
        return {name: value for name, value in asdict(self).items() if name != "images"}

    def answers(self, question: Question) -> bool:
        return (self.federation, self.data) == (question.federation, question.data)


@dataclass(frozen=True)
class Balance:
    """What is spent for some images."""

    epsilon: float
    delta: float
    budget: float
    ledger: Path

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ledger": str(self.ledger)}

    def text(self) -> str:
        return (
            f"privacy budget: epsilon {self.epsilon:g} of {self.budget:g} (delta {self.delta:g}) is spent for these "
            f"images; sending this same file again is free (ledger: {self.ledger})"
        )


def price_of(upload: UploadConfig) -> tuple[float, float] | None:
    """(epsilon, delta) of one upload under these terms; None where no privacy is promised."""
    if upload.statistics_epsilon is not None:
        return upload.statistics_epsilon, upload.statistics_delta
    return (upload.counts_epsilon, 0.0) if upload.counts == "noised" else None


def ledger_folder(key: Path | None) -> Path:
    """`north.ledger` beside `north.key`; without a key, a folder in the member's home ($ONEFLARE_HOME, ~/.oneflare)."""
    if key is not None:
        return key.resolve().with_suffix(".ledger")
    return Path(os.environ.get(HOME) or Path.home() / ".oneflare") / "ledger"


class Ledger:
    """The answers that a member has given, in a folder of its own.

    budget: the most epsilon that the member spends for an image; by default, that of one answer under the terms.
    """

    def __init__(self, folder: Path, budget: float | None = None) -> None:
        self.folder = folder
        self.budget = budget
        self.file = folder / "ledger.json"

    def answers(self) -> list[Answer]:
        """What was answered so far, oldest first."""
        if not self.file.exists():
            return []
        damaged = RunError(
            f"{self.file} is damaged, so nobody can say what was spent; restore it from a backup of the folder"
        )
        try:
            rows = read_json(self.file)["answers"]
            names = {field.name for field in fields(Answer)}
            if not isinstance(rows, list) or any(set(row) != names for row in rows):
                raise damaged
            return [Answer(**row) for row in rows]
        except (RunError, KeyError, TypeError):
            raise damaged from None

    def kept(self, answer: Answer) -> Path:
        return self.folder / "answers" / f"{answer.digest}.safetensors"

    def balance(self, question: Question) -> Balance:
        about = [answer for answer in self.answers() if answer.concerns(question)]
        budget = question.epsilon if self.budget is None else self.budget
        spent = sum(answer.epsilon for answer in about)
        return Balance(spent, sum(answer.delta for answer in about), budget, self.file)

    def find(self, question: Question, copy: Path) -> Path | None:
        """The upload that answered this question before, to be sent again; None if it may be answered now.

        copy: where the member may have a copy of it. Raises `BudgetError` where another answer would cost too much.
        """
        for answer in self.answers():
            if answer.answers(question):
                for path in (self.kept(answer), copy):
                    if _digest_of_upload(path) == answer.digest:
                        return path
        self._check(question)
        return None

    def _check(self, question: Question) -> None:
        balance = self.balance(question)
        total = balance.epsilon + question.epsilon
        if total <= balance.budget * SLACK:
            return
        last = [answer for answer in self.answers() if answer.concerns(question)]
        before = f"{last[-1].name} on {last[-1].created[:10]}" if last else "nobody"
        known = "" if not last or last[-1].view == question.view else " (perhaps about the same images)"
        raise BudgetError(
            f"an answer of epsilon {question.epsilon:g} is refused: of your privacy budget of {balance.budget:g} for "
            f"these images {balance.epsilon:g} is spent, last for {before}{known}; send the upload that you gave then "
            f"(kept in {self.folder / 'answers'}), or decide yourself to spend more: --budget {total:g} with `client "
            f"train`, budget={total:g} in --node-config"
        )

    def record(self, question: Question, write: Callable[[Path], dict[str, Any]], copy: Path) -> Path:
        """Keep and enter an upload before it is given; the one that is kept, if another process was faster.

        write: writes the upload to a path and returns its manifest.
        """
        with self.locked():
            earlier = self.find(question, copy)
            if earlier is not None:
                return earlier
            draft = self.folder / "answers" / "draft.safetensors"
            manifest = write(draft)
            answer = Answer(**asdict(question), created=manifest["created"], digest=manifest["digest"])
            draft.replace(self.kept(answer))
            rows = [asdict(row) for row in (*self.answers(), answer)]
            write_json(self.file, {"answers": rows})
        return self.kept(answer)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for the ledger and hold it; the lock dies with its holder."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (self.folder / ".lock").open("a+")
        except OSError as error:
            raise RunError(
                f"the privacy ledger {self.folder} cannot be written ({error.strerror}); make it writable, or set "
                f"{HOME} to a folder that is"
            ) from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _digest_of_upload(path: Path) -> str | None:
    """None where there is none, or a damaged one."""
    try:
        return str(read_manifest(path)["digest"])
    except UploadError:
        return None


def _apart(one: str, other: str) -> bool:
    return _set(one).isdisjoint(_set(other))


def _set(images: str) -> set[str]:
    return {images[start : start + DIGITS] for start in range(0, len(images), DIGITS)}
