"""The figures of several members as one: sums where figures are counts, means over members where they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from oneflare.metrics.classification import BINS, Bin
from oneflare.metrics.figures import (
    AgainstAlone,
    ClassFigures,
    ModelFigures,
    RuleFigures,
    RuleRates,
    ThresholdRates,
    join,
)
from oneflare.metrics.intervals import Measured, mean_of, paired_gain, rank_interval, wilson


def pool(members: Sequence[ModelFigures]) -> ModelFigures:
    """All test images of all members as one test.

    Accuracy, sensitivity and specificity are those of all images together, as far as members tell them. Areas under
    ROC curves compare images within members: they are means over members, weighted by their numbers of pairs; average
    precisions by their numbers of images of the class. A class is withheld where every member that has it withholds
    it. Cells of the confusion matrix are sums over the members that tell them (`untold` says how many do not), and None
    where nobody does.
    """
    images = sum(one.images for one in members)
    known = [one.patients for one in members if one.patients is not None]
    number = sum(map(_number, members))
    right = sum(one.accuracy.value * one.images for one in members)
    classes = tuple(
        _class([one.classes[label] for one in members], members) for label in range(len(members[0].classes))
    )
    rates = [one.sensitivity for one in classes if one.sensitivity is not None]
    bins = _rebinned(one for member in members for one in member.reliability)
    return ModelFigures(
        images=images,
        patients=sum(known) if len(known) == len(members) else None,
        accuracy=wilson(min(right / images, 1.0), number),
        balanced_accuracy=mean_of(rates) if rates else None,
        calibration_error=sum(one.count * abs(one.accuracy - one.confidence) for one in bins) / images,
        classes=classes,
        confusion=_confusion(members, classes),
        reliability=bins,
        kept=_kept(members, images),
        by_rule=_by_rule(members),
    )


def _by_rule(members: Sequence[ModelFigures]) -> RuleFigures | None:
    """The answers by one decision rule at the members that measured it; None where nobody did, or by several rules."""
    told = [(one.by_rule, one) for one in members if one.by_rule is not None]
    if len({rule.rule for rule, _ in told}) != 1:
        return None
    images, decided = sum(rule.images for rule, _ in told), sum(rule.decided for rule, _ in told)
    patients = [rule.decided_patients for rule, _ in told if rule.decided_patients is not None]
    classes = []
    for label in range(len(members[0].classes)):
        parts = [(rule.classes[label], one.classes[label], one) for rule, one in told]
        sensitivity = _rate((rates.sensitivity, one.support or 0, _positives(one)) for rates, one, _ in parts)
        specificity = _rate(
            (rates.specificity, test.images - (one.support or 0), _number(test)) for rates, one, test in parts
        )
        classes.append(RuleRates(sensitivity, specificity))
    undecided = _rate((rule.undecided, rule.images, _number(test)) for rule, test in told)
    assert undecided is not None  # every member tells it
    return RuleFigures(
        rule=told[0][0].rule,
        images=images,
        decided=decided,
        decided_patients=sum(patients) if len(patients) == len(told) else None,
        undecided=undecided,
        accuracy=_rate(
            (rule.accuracy, rule.decided, rule.decided if rule.decided_patients is None else rule.decided_patients)
            for rule, _ in told
        ),
        classes=tuple(classes),
    )


def _kept(members: Sequence[ModelFigures], images: int) -> tuple[float, ...] | None:
    """The share of all images at each level of familiarity; None where a member does not tell it."""
    told = [(one.kept, one.images) for one in members if one.kept is not None]
    if len(told) < len(members) or len({len(kept) for kept, _ in told}) != 1:
        return None
    columns = zip(*(kept for kept, _ in told), strict=True)
    return tuple(sum(share * of for share, (_, of) in zip(column, told, strict=True)) / images for column in columns)


def untold(members: Sequence[ModelFigures]) -> tuple[tuple[int, ...], ...] | None:
    """`(C, C)` how many members withhold a cell of the confusion matrix; None where there is no such matrix."""
    tables = [one.confusion for one in members if one.confusion is not None]
    if len(tables) < len(members):
        return None
    size = range(len(tables[0]))
    return tuple(tuple(sum(table[row][column] is None for table in tables) for column in size) for row in size)


def pool_comparisons(parts: Sequence[tuple[AgainstAlone, ModelFigures]]) -> AgainstAlone:
    """What the federation gains over all members that compared; each member's own model answers its own images."""
    better, worse = sum(one.better for one, _ in parts), sum(one.worse for one, _ in parts)
    images, number = sum(test.images for _, test in parts), sum(_number(test) for _, test in parts)
    return AgainstAlone(better, worse, paired_gain(better, worse, images, number))


def _number(member: ModelFigures) -> int:
    """Independent observations: patients where they are known."""
    return member.images if member.patients is None else member.patients


def _class(parts: Sequence[ClassFigures], members: Sequence[ModelFigures]) -> ClassFigures:
    """One class of several members. Those that withhold it are left out."""
    name = parts[0].name
    told = [(one, test) for one, test in zip(parts, members, strict=True) if one.support is not None]
    having = [(one, test) for one, test in told if one.support]
    if not having and len(told) < len(parts):
        return ClassFigures(name, None, None, None, None, None, None, ())
    patients = [one.patients for one, _ in told if one.patients is not None]
    return ClassFigures(
        name=name,
        support=sum(one.support or 0 for one, _ in told),
        patients=sum(patients) if len(patients) == len(parts) else None,
        sensitivity=_rate((one.sensitivity, one.support or 0, _positives(one)) for one, _ in having),
        specificity=_rate((one.specificity, test.images - (one.support or 0), _number(test)) for one, test in told),
        auroc=_area(having),
        average_precision=_rate((one.average_precision, one.support or 0, _positives(one)) for one, _ in having),
        curve=_curve(having),
    )


def _positives(one: ClassFigures) -> int:
    return one.patients if one.patients is not None else one.support or 0


def _rate(parts: Iterable[tuple[Measured | None, int, int]]) -> Measured | None:
    """parts: a member's share, of how many images, and how many independent observations these are."""
    told = [(share.value, images, number) for share, images, number in parts if share is not None and images]
    if not told:
        return None
    images = sum(images for _, images, _ in told)
    value = sum(share * images for share, images, _ in told) / images
    return wilson(min(value, 1.0), sum(number for _, _, number in told))


def _area(parts: Sequence[tuple[ClassFigures, ModelFigures]]) -> Measured | None:
    told = [(one.auroc.value, one, test) for one, test in parts if one.auroc is not None]
    if not told:
        return None
    pairs = [(one.support or 0) * (test.images - (one.support or 0)) for _, one, test in told]
    value = sum(area * weight for (area, _, _), weight in zip(told, pairs, strict=True)) / sum(pairs)
    positives = sum(_positives(one) for _, one, _ in told)
    negatives = sum(max(_number(test) - _positives(one), 1) for _, one, test in told)
    return rank_interval(min(value, 1.0), positives, negatives)


def _curve(parts: Sequence[tuple[ClassFigures, ModelFigures]]) -> tuple[ThresholdRates, ...]:
    told = [(one, test) for one, test in parts if one.curve]
    own = sum(one.support or 0 for one, _ in told)
    others = sum(test.images - (one.support or 0) for one, test in told)

    def mean(
        point: int, rate: Callable[[ThresholdRates], float], weight: Callable[[int, int], int], total: int
    ) -> float:
        return sum(rate(one.curve[point]) * weight(one.support or 0, test.images) for one, test in told) / total

    return tuple(
        ThresholdRates(
            told[0][0].curve[point].threshold,
            mean(point, lambda rates: rates.sensitivity, lambda support, _: support, own),
            mean(point, lambda rates: rates.specificity, lambda support, images: images - support, others),
        )
        for point in range(min((len(one.curve) for one, _ in told), default=0))
    )


def _confusion(
    members: Sequence[ModelFigures], classes: Sequence[ClassFigures]
) -> tuple[tuple[int | None, ...], ...] | None:
    tables = [one.confusion for one in members if one.confusion is not None]
    if len(tables) < len(members):
        return None
    size = range(len(classes))

    def cell(row: int, column: int) -> int | None:
        told = [table[row][column] for table in tables if table[row][column] is not None]
        return sum(value for value in told if value is not None) if told else None

    return tuple(tuple(cell(row, column) for column in size) for row in size)


def _rebinned(bins: Iterable[Bin]) -> tuple[Bin, ...]:
    """Bins of several members in the equal-width bins of the calibration error, by their mean confidence."""
    joined: dict[int, Bin] = {}
    for one in bins:
        number = min(max(int(-(-one.confidence * BINS // 1)), 1), BINS)
        joined[number] = one if number not in joined else join(joined[number], one)
    return tuple(joined[number] for number in sorted(joined))
