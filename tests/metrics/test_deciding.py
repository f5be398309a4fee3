"""What a decision rule makes of test images: counted by hand, withheld like all figures, pooled as one test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oneflare.core.records import parse_record, record_to_dict
from oneflare.errors import RunError
from oneflare.metrics.deciding import with_rule
from oneflare.metrics.figures import ModelFigures, figures_of
from oneflare.metrics.intervals import wilson
from oneflare.metrics.pooling import pool
from oneflare.models.base import Answers
from oneflare.models.decisions import Decision
from score_parts import answers

NAMES = ("a", "b", "c")
RULE = Decision(
    "0" * 64, NAMES, (None, 0.1, None), 0.3, 0.9, "a sensitivity of 0.95 for b", ("north",), 40, "2027-01-31"
)


def example(supports=(20, 12, 15), seed=0, patients=False, limit=1):
    """Figures with those of the rule, and for the oracle labels, logits, familiarity and patients."""
    labels = torch.arange(len(supports)).repeat_interleave(torch.tensor(supports))
    logits = answers(labels, len(supports), 0.8, seed)
    familiarity = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whose = torch.arange(len(labels)) // 2 if patients else None
    figures = figures_of(logits, labels, NAMES, whose, limit)
    decided = RULE.labels(Answers(logits, familiarity))
    told = with_rule(figures, decided, labels, whose, rule=RULE.rule, smallest_group=limit)
    return told, labels, logits, familiarity, whose


def by_hand(logits, familiarity) -> list[int | None]:
    """None below the floor of 0.3; b from a probability of 0.1 on; else the likelier of a and c."""
    found: list[int | None] = []
    for row, known in zip(logits.softmax(1).tolist(), familiarity.tolist(), strict=True):
        if known < 0.3:
            found.append(None)
        elif row[1] >= 0.1:
            found.append(1)
        else:
            found.append(0 if row[0] >= row[2] else 2)
    return found


@pytest.mark.parametrize("patients", [False, True])
def test_all_figures_are_those_counted_by_hand(patients):
    told, labels, logits, familiarity, whose = example(patients=patients)
    by_rule, true, found = told.by_rule, labels.tolist(), by_hand(logits, familiarity)
    rows = range(len(true))

    def number(among) -> int:
        return len(among) if whose is None else len({int(whose[row]) for row in among})

    decided = [row for row in rows if found[row] is not None]
    right = [row for row in decided if found[row] == true[row]]
    assert 0 < len(decided) < len(true)
    assert (by_rule.images, by_rule.decided) == (len(true), len(decided))
    assert by_rule.decided_patients == (number(decided) if patients else None)
    assert by_rule.accuracy == wilson(len(right) / len(decided), number(decided))
    assert by_rule.undecided == wilson((len(true) - len(decided)) / len(true), number(rows))
    for label, rates in enumerate(by_rule.classes):
        own, others = [[row for row in rows if (true[row] == label) is same] for same in (True, False)]
        assert rates.sensitivity == wilson(sum(found[row] == label for row in own) / len(own), number(own))
        assert rates.specificity == wilson(sum(found[row] != label for row in others) / len(others), number(others))
    assert replace(told, by_rule=None) == figures_of(logits, labels, NAMES, whose)  # the most likely class stays told


def test_what_is_withheld_of_the_most_likely_class_is_withheld_of_the_rule():
    told, *_ = example(supports=(20, 3, 15), limit=5)
    for one, rates in zip(told.classes, told.by_rule.classes, strict=True):
        assert (rates.sensitivity is None) == one.withheld
        assert (rates.specificity is None) == one.withheld
    assert told.classes[1].withheld


def test_a_rule_that_decides_on_too_few_images_does_not_tell_how_good_it_is():
    told, labels, *_ = example()
    for count, limit, withheld in ((4, 5, True), (5, 5, False), (0, 1, True)):
        decided = torch.full_like(labels, -1)
        decided[:count] = labels[:count]
        found = with_rule(replace(told, by_rule=None), decided, labels, rule="r", smallest_group=limit).by_rule
        assert (found.accuracy is None) is withheld
        assert (found.decided, found.undecided.value) == (count, pytest.approx(1 - count / len(labels)))


def test_pooled_members_are_one_test_of_all_images():
    parts = [example(supports, seed) for seed, supports in enumerate(((20, 12, 15), (9, 30, 11)))]
    labels, logits, familiarity = (torch.cat([part[index] for part in parts]) for index in (1, 2, 3))
    decided = RULE.labels(Answers(logits, familiarity))
    whole = with_rule(figures_of(logits, labels, NAMES), decided, labels, rule=RULE.rule).by_rule
    pooled = pool([part[0] for part in parts]).by_rule
    assert (pooled.rule, pooled.images, pooled.decided) == (whole.rule, whole.images, whole.decided)
    for ours, theirs in (
        (pooled.accuracy, whole.accuracy),
        (pooled.undecided, whole.undecided),
        *zip((one.sensitivity for one in pooled.classes), (one.sensitivity for one in whole.classes), strict=True),
    ):
        assert (ours.value, ours.low, ours.high) == pytest.approx((theirs.value, theirs.low, theirs.high))
    for ours, theirs in zip(pooled.classes, whole.classes, strict=True):
        assert ours.specificity.value == pytest.approx(theirs.specificity.value)


def test_figures_of_another_rule_are_not_mixed_with_these():
    first, second = example()[0], example(seed=1)[0]
    without = replace(second, by_rule=None)
    assert pool([first, without]).by_rule == pool([first]).by_rule  # one member has measured it, the other not
    assert pool([without, without]).by_rule is None
    other = replace(second, by_rule=replace(second.by_rule, rule="another"))
    assert pool([first, other]).by_rule is None
    assert RULE.rule != replace(RULE, floor=0.4).rule
    assert RULE.rule != replace(RULE, thresholds=(None, 0.2, None)).rule
    assert RULE.rule == replace(RULE, chosen="2027-02-01", aim="other words").rule


def test_they_survive_json_and_refuse_numbers_that_do_not_fit():
    told, *_ = example()
    content = record_to_dict(told)
    assert parse_record(ModelFigures, content, "x", "y") == told
    for field, value in (("decided", 48), ("decided", -1), ("decided_patients", 99), ("classes", [])):
        broken = content | {"by_rule": content["by_rule"] | {field: value}}
        with pytest.raises(RunError):
            parse_record(ModelFigures, broken, "x", "y")
