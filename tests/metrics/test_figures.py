"""Figures of a test against scikit-learn, and what is withheld of them against linear algebra."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from oneflare.core.records import parse_record, record_to_dict
from oneflare.errors import DataError
from oneflare.metrics.figures import ModelFigures, compared, figures_of
from oneflare.metrics.intervals import wilson
from oneflare.metrics.pooling import pool, pool_comparisons, untold
from oneflare.metrics.ranking import auroc, average_precision
from oneflare.metrics.withholding import withhold
from score_parts import answers

NAMES = ("a", "b", "c", "d")


def labels_of(*supports: int) -> torch.Tensor:
    return torch.arange(len(supports)).repeat_interleave(torch.tensor(supports))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40))
@settings(max_examples=50, deadline=None)
def test_areas_are_scikit_learns_also_with_ties(pairs):
    scores, positive = np.array([s / 5 for s, _ in pairs]), np.array([p for _, p in pairs])
    if positive.all() or not positive.any():
        return
    assert auroc(scores, positive) == pytest.approx(reference.roc_auc_score(positive, scores))
    wanted = reference.average_precision_score(positive, scores)
    assert average_precision(scores, positive) == pytest.approx(wanted)


def test_all_figures_are_scikit_learns():
    labels = labels_of(30, 20, 25, 0)
    logits = answers(labels, 4, 0.8, seed=3)
    found, predicted, shares = figures_of(logits, labels, NAMES), logits.argmax(1), logits.softmax(1)
    table = reference.confusion_matrix(labels, predicted, labels=range(4))
    assert np.array_equal(found.confusion, table)
    assert found.accuracy == wilson(reference.accuracy_score(labels, predicted), 75)
    told = [one.sensitivity.value for one in found.classes[:3]]
    assert told == pytest.approx(list(reference.recall_score(labels, predicted, labels=range(3), average=None)))
    assert found.balanced_accuracy.value == pytest.approx(sum(told) / 3)
    for label, one in enumerate(found.classes[:3]):
        own = (labels == label).numpy()
        assert one.support == own.sum()
        specificity = reference.recall_score(~own, (predicted != label).numpy())
        assert one.specificity.value == pytest.approx(specificity)
        assert one.auroc.value == pytest.approx(reference.roc_auc_score(own, shares[:, label]))
        assert one.average_precision.value == pytest.approx(reference.average_precision_score(own, shares[:, label]))
        for rates in one.curve:
            over = (shares[:, label] >= rates.threshold).numpy()
            assert rates.sensitivity == pytest.approx(over[own].mean())
            assert rates.specificity == pytest.approx((~over)[~own].mean())
    empty = found.classes[3]
    assert (empty.support, empty.sensitivity, empty.auroc, empty.curve) == (0, None, None, ())
    assert found.weakest.sensitivity.value == min(told)
    assert sum(one.count for one in found.reliability) == 75


def test_areas_do_not_lose_images_whose_probability_rounds_to_one():
    """Images with probabilities of 1 - 1e-20 and 1 - 1e-30 are still in order."""
    labels, logits = labels_of(2, 2), torch.tensor([[70.0, 0.0], [60.0, 0.0], [46.0, 0.0], [0.0, 1.0]])
    assert torch.equal(logits[:3].double().softmax(1)[:, 0], torch.ones(3, dtype=torch.double))
    found = figures_of(logits, labels, "ab")
    assert found.classes[0].auroc.value == found.classes[1].auroc.value == 1.0


def test_patients_widen_every_interval_and_move_no_value():
    labels = labels_of(30, 30, 30)
    shares, patients = answers(labels, 3, 0.8, seed=5), torch.arange(90) // 3
    images, people = figures_of(shares, labels, NAMES[:3]), figures_of(shares, labels, NAMES[:3], patients)
    assert (images.patients, people.patients) == (None, 30)
    for one, other in zip(images.classes, people.classes, strict=True):
        for kind in ("sensitivity", "specificity", "auroc", "average_precision"):
            narrow, wide = getattr(one, kind), getattr(other, kind)
            assert narrow.value == wide.value
            assert wide.high - wide.low > narrow.high - narrow.low


def test_a_small_class_is_withheld_with_another_and_with_all_its_figures():
    labels = labels_of(40, 3, 12, 30)
    shares = answers(labels, 4, 0.9, seed=1)
    found = figures_of(shares, labels, NAMES, smallest_group=5)
    assert [one.support for one in found.classes] == [40, None, None, 30]
    for one in found.classes[1:3]:
        assert one.withheld
        assert (one.sensitivity, one.specificity, one.auroc, one.average_precision, one.curve) == (*[None] * 4, ())
    assert found.confusion[1] == found.confusion[2] == (None,) * 4
    assert found.balanced_accuracy.value == pytest.approx(
        (found.classes[0].sensitivity.value + found.classes[3].sensitivity.value) / 2
    )


def test_groups_are_counted_in_patients_where_these_are_known():
    labels, patients = labels_of(40, 40), torch.cat([torch.arange(40), torch.full((40,), 99)])
    shares = answers(labels, 2, 1.0, seed=0)
    assert [one.support for one in figures_of(shares, labels, "ab", None, 5).classes] == [40, 40]
    assert [one.support for one in figures_of(shares, labels, "ab", patients, 5).classes] == [None, None]


def test_too_small_a_test_tells_nothing():
    labels = labels_of(2, 2)
    with pytest.raises(DataError, match="4 test images are fewer than the smallest group"):
        figures_of(answers(labels, 2, 1.0, 0), labels, "ab", smallest_group=5)


def known_sums(counts, hidden):
    """What a reader of the figures knows of the withheld cells, as linear equations over them: the matrix."""
    size = len(counts)
    places = [tuple(place) for place in np.argwhere(hidden.cells)]
    rows = [[float(row == r) for r, _ in places] for row in range(size) if not hidden.classes[row]]
    rows += [[float(column == c and r != c) for r, c in places] for column in range(size) if not hidden.classes[column]]
    rows.append([float(r == c) for r, c in places])  # accuracy
    rows.append([1.0] * len(places))  # all images
    return places, np.array(rows)


@given(st.integers(3, 6), st.integers(2, 8), st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_no_withheld_cell_follows_from_what_is_told(size, limit, seed):
    generator = np.random.default_rng(seed)
    counts = generator.poisson(generator.choice([0.3, 2, 8], size=(size, size))) + np.diag(
        generator.integers(0, 40, size)
    )
    if counts.sum() < limit:
        return
    hidden = withhold(np.hstack([counts, counts.sum(1, keepdims=True)]), counts, limit)
    supports = counts.sum(1)
    for label in range(size):
        assert hidden.classes[label] or not 0 < supports[label] < limit
        small = (counts[label] > 0) & (counts[label] < limit) & (np.arange(size) != label)
        assert hidden.cells[label][small].all()
    assert not any(hidden.classes) or supports[np.array(hidden.classes)].sum() >= limit
    places, equations = known_sums(counts, hidden)
    if not places:
        return
    rank = np.linalg.matrix_rank(equations)
    for index, (row, column) in enumerate(places):
        unit = np.zeros(len(places))
        unit[index] = 1.0
        assert np.linalg.matrix_rank(np.vstack([equations, unit])) > rank, (row, column)


def test_rates_are_told_however_few_errors_there_are():
    """Otherwise pooled rates would leave out the members at which the model errs."""
    labels = labels_of(30, 30, 30, 30)
    logits = torch.eye(4)[labels].double() * 9
    logits[0] = torch.tensor([0.0, 9.0, 0.0, 0.0])
    found = figures_of(logits, labels, NAMES, smallest_group=5)
    assert found.confusion[0][1] is None
    assert [one.specificity.value for one in found.classes] == [1.0, 89 / 90, 1.0, 1.0]
    assert [one.sensitivity.value for one in found.classes] == [29 / 30, 1.0, 1.0, 1.0]


def test_two_classes_show_their_matrix():
    """The only wrong answer is what the sensitivity says, which is about the whole class."""
    labels = labels_of(40, 40)
    shares = torch.eye(2)[labels].double()
    shares[0] = torch.tensor([0.0, 1.0])
    assert figures_of(shares, labels, "ab", smallest_group=5).confusion == ((39, 1), (0, 40))


def test_bins_are_joined_until_no_group_is_small_and_keep_their_sums():
    labels = labels_of(30, 20, 25)
    shares = answers(labels, 3, 0.8, seed=3)
    one, joined = figures_of(shares, labels, "abc"), figures_of(shares, labels, "abc", smallest_group=10)
    assert min(part.count for part in joined.reliability) >= 10 > min(part.count for part in one.reliability)
    for total in (lambda part: part.count, lambda part: part.count * part.accuracy):
        assert sum(map(total, one.reliability)) == pytest.approx(sum(map(total, joined.reliability)))


def test_comparison_counts_image_by_image():
    labels = labels_of(2, 2)
    right, wrong = torch.eye(2)[labels], torch.eye(2)[1 - labels]
    together = torch.stack([right[0], right[1], wrong[2], right[3]])
    alone = torch.stack([wrong[0], right[1], right[2], wrong[3]])
    found = compared(together, alone, labels)
    assert (found.better, found.worse, found.gain.value) == (2, 1, 0.25)


def test_pooled_members_are_one_test_of_all_images():
    """Everything that counts images is the same as if one member had all of them."""
    parts = [(labels_of(30, 20, 25), 0.9, 1), (labels_of(10, 40, 5), 0.6, 2)]
    tests = [(answers(labels, 3, right, seed), labels) for labels, right, seed in parts]
    apart = [figures_of(shares, labels, "abc") for shares, labels in tests]
    whole = figures_of(torch.cat([shares for shares, _ in tests]), torch.cat([labels for _, labels in tests]), "abc")
    found = pool(apart)
    assert (found.images, found.confusion) == (whole.images, whole.confusion)
    assert found.accuracy.low == pytest.approx(whole.accuracy.low)
    assert found.balanced_accuracy.value == pytest.approx(whole.balanced_accuracy.value)
    for one, other in zip(found.classes, whole.classes, strict=True):
        assert one.support == other.support
        assert one.sensitivity.high == pytest.approx(other.sensitivity.high)
        assert one.specificity.value == pytest.approx(other.specificity.value)
        assert [point.sensitivity for point in one.curve] == pytest.approx([p.sensitivity for p in other.curve])
        assert [point.specificity for point in one.curve] == pytest.approx([p.specificity for p in other.curve])
    areas = [member.classes[0].auroc.value for member in apart]
    assert found.classes[0].auroc.value == pytest.approx((areas[0] * 30 * 45 + areas[1] * 10 * 45) / (40 * 45))
    assert sum(one.count for one in found.reliability) == whole.images
    assert found.calibration_error == pytest.approx(whole.calibration_error)


def test_pooling_says_how_many_withhold():
    few, many = labels_of(3, 20, 25), labels_of(40, 40, 40)
    apart = [figures_of(answers(labels, 3, 0.9, 1), labels, "abc", smallest_group=5) for labels in (few, many)]
    found = pool(apart)
    assert (found.images, found.classes[0].support) == (168, 40)
    assert untold(apart)[0][0] == 1
    assert pool(apart[:1]).classes[0].support is None


def test_pooled_comparisons_add_up():
    labels = labels_of(10, 10)
    parts = [
        (compared(answers(labels, 2, 0.9, seed), answers(labels, 2, 0.5, seed + 50), labels), labels)
        for seed in range(3)
    ]
    tests = [figures_of(answers(labels, 2, 0.9, seed), labels, "ab") for seed in range(3)]
    found = pool_comparisons([(one, test) for (one, _), test in zip(parts, tests, strict=True)])
    assert found.better == sum(one.better for one, _ in parts)
    assert found.gain.value == pytest.approx(sum(one.gain.value for one, _ in parts) / 3)


def test_figures_survive_json_and_refuse_sums_that_do_not_fit():
    labels = labels_of(30, 3, 25)
    figures = figures_of(answers(labels, 3, 0.8, seed=3), labels, "abc", smallest_group=5)
    content = json.loads(json.dumps(record_to_dict(figures)))
    assert parse_record(ModelFigures, content, "f", "again") == figures
    content["confusion"][2][2] = 99
    with pytest.raises(Exception, match="does not fit the images of class c"):
        parse_record(ModelFigures, content, "f", "again")
