"""The rule by which a federation's page says whether to deploy its model.

It rests on what members measured on test images of their own, on intervals of 95 % rather than on single figures, and
on what is known of the training. `RULE` is the rule in words, as the page shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from oneflare.federation.result import FederationResult
from oneflare.federation.scores import PooledScores
from oneflare.metrics.figures import ClassFigures
from oneflare.metrics.intervals import Measured

LEAST_SENSITIVITY = 0.5
"""a class is weak if its sensitivity may be lower than this"""
WIDEST = 0.1
"""an accuracy whose interval is wider than this is not known well enough"""
CALIBRATION = 0.1
"""a larger calibration error makes probabilities misleading"""
Answer = Literal["deploy", "care", "no", "unmeasured"]
WORDS: dict[Answer, str] = {
    "deploy": "Deploy.",
    "care": "Deploy with care.",
    "no": "Do not deploy.",
    "unmeasured": "Do not deploy yet.",
}
RULE = (
    "Do not deploy yet: no member has measured the model. "
    "Do not deploy: the balanced accuracy may be that of guessing (the lower end of its interval is not above one over "
    "the number of classes), or the model is clearly worse than the members' own models (all of the interval of the "
    "gain is below 0). "
    "Deploy with care: one of these holds. A class may be recognised in fewer than "
    f"{LEAST_SENSITIVITY:.0%} of its images (the lower end of the interval). A class has no test image, or too few to "
    "be told of, or nobody trained on it. The interval of the accuracy is wider than "
    f"{100 * WIDEST:.0f} points. At a member the model is clearly worse than the member's own. No member compared it "
    "with its own model, or a member of the model sent no scores. The calibration error is above "
    f"{CALIBRATION:.0%}. An upload in the model does not fit the others. The log is not in order. "
    "Deploy: none of these. All intervals are of 95 %. The rule knows nothing about what a wrong answer costs: that is "
    "yours to judge."
)


@dataclass(frozen=True)
class Verdict:
    """Whether to deploy, in one sentence, and every reason for caution."""

    answer: Answer
    sentence: str
    reasons: tuple[str, ...]

    @property
    def word(self) -> str:
        return WORDS[self.answer]


def judge(content: FederationResult, log_problems: Sequence[str] = ()) -> Verdict:
    """The verdict on the federation's own model."""
    pooled = content.pooled
    if pooled is None:
        return Verdict("unmeasured", _unmeasured(content), tuple(_training(content, log_problems)))
    figures = pooled.together
    how_good = f"The model is right on {shown(figures.accuracy)} of {_tested(pooled)}"
    against = tuple(_against(content, pooled))
    reasons = (*against, *_weaknesses(content, pooled), *_training(content, log_problems))
    answer: Answer = "no" if against else "care" if reasons else "deploy"
    if reasons:
        return Verdict(answer, f"{how_good}, but {reasons[0]}.", reasons[1:])
    gain = pooled.comparison
    assert gain is not None  # otherwise that is a reason
    better = f", {points(gain.gain)} more than the members' own models, and no check speaks against it"
    return Verdict(answer, f"{how_good}{better}.", ())


def _unmeasured(content: FederationResult) -> str:
    own = ""
    if content.own.scores is not None and content.test_images:
        own = f" All that is known: on {content.test_images} images of the coordinator it is right on "
        own += f"{content.own.scores.accuracy:.1%}."
    return f"No member has measured this model on images of its own, so nobody knows how good it is for them.{own}"


def _against(content: FederationResult, pooled: PooledScores) -> Iterator[str]:
    """Why the model must not be deployed."""
    balanced, chance = pooled.together.balanced_accuracy, 1 / len(content.classes)
    if balanced is None or balanced.low <= chance:
        yield f"that may be no better than guessing one of {len(content.classes)} classes"
    gain = pooled.comparison
    if gain is not None and gain.gain.high < 0:
        yield f"the members' own models are better by {points(gain.gain, -1)}"


def _weaknesses(content: FederationResult, pooled: PooledScores) -> Iterator[str]:
    """What members' tests say against it, most serious first."""
    figures = pooled.together
    losers = [one for one in pooled.members if one.comparison is not None and one.comparison.gain.high < 0]
    for one in losers:
        assert one.comparison is not None
        yield f"at {one.member} its own model is better by {points(one.comparison.gain, -1)}"
    for weak in sorted(_weak(figures.classes), key=lambda one: one.sensitivity.value if one.sensitivity else 0.0):
        assert weak.sensitivity is not None
        yield f"'{weak.name}' is recognised in {shown(weak.sensitivity)} of {counted(weak.support or 0, 'image')} only"
    untested = [one.name for one in figures.classes if one.support == 0]
    if untested:
        yield f"nobody has test images of {quoted(untested)}"
    withheld = [one.name for one in figures.classes if one.withheld]
    if withheld:
        yield f"members withhold their figures of {quoted(withheld)}, because groups are too small"
    if figures.accuracy.high - figures.accuracy.low > WIDEST:
        tested = counted(figures.images, "image") if figures.patients is None else counted(figures.patients, "patient")
        yield f"{tested} are too few to know it well"
    silent = [name for name in content.names if name not in {one.member for one in pooled.members}]
    if silent:
        yield f"{listed(silent)} sent no scores"
    if pooled.comparison is None:
        yield "no member compared it with a model of its own"
    if figures.calibration_error > CALIBRATION:
        yield f"its probabilities are wrong by {figures.calibration_error:.0%} on average"


def _weak(classes: Sequence[ClassFigures]) -> list[ClassFigures]:
    return [one for one in classes if one.sensitivity is not None and one.sensitivity.low < LEAST_SENSITIVITY]


def _training(content: FederationResult, log_problems: Sequence[str]) -> Iterator[str]:
    """What the uploads and the log say against it."""
    unseen = never_trained(content)
    if unseen:
        yield f"no member has trained on {quoted(unseen)}"
    left_in = [name for name in content.suspects if name in content.names]
    if left_in:
        yield f"the upload of {listed(left_in)} does not fit the others"
    if log_problems:
        yield "the log of the federation is not in order"


def never_trained(content: FederationResult) -> list[str]:
    """Classes of which no member has an image, as far as counts are known."""
    if content.masked is not None:
        totals: Sequence[int] = content.masked.counts
    elif content.table is not None:
        totals = [sum(column) for column in zip(*content.table, strict=True)]
    else:
        return []
    return [name for name, total in zip(content.classes, totals, strict=True) if total == 0]


def _tested(pooled: PooledScores) -> str:
    figures, members = pooled.together, len(pooled.members)
    patients = "" if figures.patients is None else f" of {counted(figures.patients, 'patient')}"
    return f"{counted(figures.images, 'test image')}{patients} at {counted(members, 'member')}"


def shown(figure: Measured) -> str:
    """`94.3 % (91.1 to 96.4)`"""
    return f"{100 * figure.value:.1f} % ({100 * figure.low:.1f} to {100 * figure.high:.1f})"


def points(figure: Measured, sign: int = 1) -> str:
    """`3.1 points (1.2 to 5.0)`; sign -1: of the loss"""
    low, high = sorted((sign * figure.low, sign * figure.high))
    return f"{100 * sign * figure.value:.1f} points ({100 * low:.1f} to {100 * high:.1f})"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def quoted(names: Sequence[str]) -> str:
    return listed([f"'{name}'" for name in names])


def listed(names: Sequence[str], most: int = 8) -> str:
    shown_names = list(names[:most])
    if len(names) > most:
        return ", ".join(shown_names) + f" and {len(names) - most} more"
    return " and ".join([", ".join(shown_names[:-1]), shown_names[-1]] if len(shown_names) > 1 else shown_names)
