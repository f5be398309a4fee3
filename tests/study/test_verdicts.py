"""What a few seeds can show: intervals and tests against scipy and by hand, and the rule for verdicts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from oneflare.study.verdicts import (
    RULE,
    UNDECIDED,
    Difference,
    Judgement,
    SeedsWanted,
    bootstrap_interval,
    crossed_interval,
    difference,
    discoveries,
    equivalence_p,
    joint,
    judge,
    seeds_for_claim,
    seeds_wanted,
    smallest_of_looks,
    student_p,
)

NUMBERS = st.lists(st.integers(-1000, 1000), min_size=2, max_size=8).filter(lambda values: len(set(values)) > 1)


@given(NUMBERS, st.sampled_from(["above", "below"]))
def test_student_agrees_with_scipy(values, side):
    expected = stats.ttest_1samp(values, 0, alternative="greater" if side == "above" else "less").pvalue
    assert student_p(values, side) == pytest.approx(expected, abs=1e-12)


def test_a_paired_test_is_one_on_the_differences():
    ours, theirs = [0.41, 0.39, 0.44, 0.40], [0.38, 0.39, 0.40, 0.36]
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    expected = stats.ttest_rel(ours, theirs, alternative="greater").pvalue
    assert Difference(tuple(gaps), None).p_value() == pytest.approx(expected)


def test_equal_differences_and_a_single_one():
    assert student_p([2.0, 2.0, 2.0], "above") == 0.0
    assert student_p([2.0, 2.0, 2.0], "below") == 1.0
    assert student_p([2.0], "above") is None
    assert bootstrap_interval([2.0]) is None
    assert difference([2.0]).std is None


@given(st.lists(st.integers(-50, 50), min_size=3, max_size=3))
def test_with_three_seeds_the_bootstrap_is_their_range(values):
    """27 resamples, of which one is three times the smallest: more than 2.5 %."""
    means = sorted(np.mean(draw) for draw in itertools.product(values, repeat=3))
    assert means[0] == min(values)
    assert bootstrap_interval(values) == (min(values), max(values))


def test_with_many_seeds_the_bootstrap_agrees_with_scipy():
    values = np.random.default_rng(3).normal(1.0, 2.0, 40)
    found = bootstrap_interval(values.tolist())
    expected = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20000, rng=1).confidence_interval
    assert found == pytest.approx((expected.low, expected.high), abs=0.06)


def test_images_count_even_where_seeds_agree():
    """Three seeds that answer alike have no spread over seeds; the test images still have one."""
    row = np.random.default_rng(0).integers(-1, 2, 800).astype(np.float64)
    answers = np.stack([row] * 3)
    low, high = crossed_interval(answers)
    assert bootstrap_interval(answers.mean(1).tolist()) == pytest.approx((row.mean(), row.mean()))
    assert (high - low) / 2 == pytest.approx(1.96 * row.std() / np.sqrt(800), rel=0.08)
    assert (low + high) / 2 == pytest.approx(row.mean(), abs=0.01)


def test_crossed_spread_is_that_of_seeds_and_of_images():
    generator = np.random.default_rng(1)
    answers = generator.normal(0, 1.0, (12, 1)) + generator.normal(0, 20.0, (1, 400))
    low, high = crossed_interval(answers)
    variance = answers.mean(1).var() / 12 + answers.mean(0).var() / 400
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(variance), rel=0.1)


@pytest.mark.parametrize(
    ("values", "threshold", "side", "verdict"),
    [
        ((2.0, 2.5, 3.0), 0, "above", "confirmed"),
        ((2.0, 2.5, 3.0), 0, "below", "refuted"),
        ((-2.0, -2.5, -3.0), 0, "above", "refuted"),
        ((-2.0, -2.5, -3.0), 0, "below", "confirmed"),
        ((-0.5, 2.5, 3.0), 0, "above", "undecided"),
        ((0.1, 0.2, 9.0), 0, "above", "undecided"),
        ((2.0, 2.5), 0, "above", "undecided"),
        ((-0.5, 0.0, -0.2), -1, "above", "confirmed"),
        ((-0.5, 0.0, -0.2), 0.4, "above", "refuted"),
        ((0.0, 0.0, 0.0), 0, "above", "undecided"),
    ],
)
def test_the_rule_for_differences(values, threshold, side, verdict):
    """(0.1, 0.2, 9): all seeds agree and the bootstrap excludes 0, but Student knows that three are few."""
    assert judge(difference(values), threshold, side).verdict == verdict


def test_images_can_take_a_verdict_away():
    gaps = np.array([0.02, 0.021, 0.022])
    few = np.zeros((3, 50))
    few[:, 0] = gaps * 50
    assert judge(difference(gaps.tolist()), 0, "above").verdict == "confirmed"
    assert judge(difference(gaps.tolist(), few), 0, "above") is UNDECIDED


@given(NUMBERS, st.integers(1, 500))
def test_equivalence_is_two_one_sided_tests(values, margin):
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    assert equivalence_p(values, margin) == pytest.approx(max(above, below), abs=1e-12)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.1, -0.2, 0.15, -0.1, 0.05), "no difference"),
        ((0.3, 0.35, 0.4, 0.3, 0.38), "confirmed"),
        ((-0.3, -0.35, -0.4, -0.3, -0.38), "refuted"),
        ((0.1, -2.0, 1.5, -0.1, 0.5), "undecided"),
        ((0.9, 1.2, -0.8, 1.1, -0.3), "undecided"),
    ],
)
def test_no_difference_of_a_point_or_more(values, verdict):
    """A small difference that is clear is still a difference; without a margin nothing counts as none."""
    assert judge(difference(values), 0, "above", margin=1.0).verdict == verdict
    without = judge(difference(values), 0, "above").verdict
    assert without == ("undecided" if verdict == "no difference" else verdict)


LOOKS = (5, 10, 20)


def test_several_looks_share_the_error():
    values = (0.6, 1.5, 2.0, 1.0, 0.4)
    alone = judge(difference(values), 0, "above")
    p_value = stats.ttest_1samp(values, 0, alternative="greater").pvalue
    assert alone == Judgement("confirmed", pytest.approx(p_value))
    together = judge(difference(values), 0, "above", looks=LOOKS)
    assert together == Judgement("confirmed", pytest.approx(smallest_of_looks(p_value, LOOKS)))
    assert 2 * p_value < smallest_of_looks(p_value, LOOKS) < 3 * p_value
    assert judge(difference((0.6, 1.5, 2.0, 1.0, -0.2)), 0, "above", looks=LOOKS) is UNDECIDED


def test_looking_several_times_errs_as_often_as_once_is_allowed_to():
    """Oracle: scipy's tests after 5, 10 and 20 values of rows whose mean is 0."""
    values = np.random.default_rng(1).normal(0, 1, (20000, 20))
    each = [stats.ttest_1samp(values[:, :n], 0, axis=1, alternative="greater").pvalue for n in LOOKS]
    smallest = np.min(each, 0)
    for level in (0.05, 0.2):
        errors = np.mean([smallest_of_looks(float(p_value), LOOKS) < level for p_value in smallest])
        assert errors == pytest.approx(level, abs=4 * (level * (1 - level) / 20000) ** 0.5)
    assert (smallest < 0.05).mean() > 0.1


@given(st.lists(st.floats(0, 1), min_size=2, max_size=10))
def test_a_clearer_look_is_a_clearer_verdict(p_values):
    found = [smallest_of_looks(p_value, LOOKS) for p_value in sorted(p_values)]
    assert found == sorted(found)
    assert all(p_value <= one <= 3 * p_value for p_value, one in zip(sorted(p_values), found, strict=True))
    assert [smallest_of_looks(p_value, (5,)) for p_value in p_values] == p_values


@pytest.mark.parametrize("looks", [(), LOOKS])
@pytest.mark.parametrize(("mean", "margin"), [(0.9, None), (0.3, 1.0)])
def test_so_many_seeds_would_decide_if_nothing_changed(mean, margin, looks):
    """Oracle: the rule itself, asked with one seed after the other of the same mean and deviation."""
    start = (mean - 1, mean, mean + 1, mean - 1, mean + 1)
    spread = np.std(start, ddof=1)

    def decided(number):
        values = np.linspace(-1, 1, number)
        values = mean + values * spread / values.std(ddof=1)
        return judge(difference(values), 0, "above", looks=looks, margin=margin).verdict

    wanted = seeds_wanted(start, 0, "above", looks=looks, margin=margin)
    found = next(number for number in range(5, 100) if decided(number) != "undecided")
    assert wanted.to_hold == pytest.approx(found, abs=1)
    assert math.isinf(wanted.to_refute)
    refuting = seeds_wanted(start, 0, "below", looks=looks, margin=margin).to_refute
    assert refuting == seeds_wanted(start, 0, "above", looks=looks).to_hold


def test_how_many_seeds_a_claim_of_several_tests_wants():
    sure, open_ = Judgement("confirmed", 0.001), Judgement("undecided", None)
    never = math.inf
    assert seeds_for_claim([(sure, SeedsWanted(3, never)), (open_, SeedsWanted(40, never))]) == 40
    assert seeds_for_claim([(open_, SeedsWanted(7, never)), (open_, SeedsWanted(40, never))]) == 40  # all must hold
    assert seeds_for_claim([(open_, SeedsWanted(7, never)), (open_, SeedsWanted(never, 12))]) == 12  # one may refute
    assert seeds_for_claim([(open_, SeedsWanted(never, never))]) is None
    assert seeds_wanted((1.0, 1.1), 0, "above") == SeedsWanted(never, never)
    assert seeds_wanted((1.0, 1.1, 1.2), 0, "above") == SeedsWanted(4, never)  # more than there are
    assert seeds_wanted((0.0, 0.0, 0.0), 0, "above") == SeedsWanted(never, never)


def test_the_rule_for_claims_of_several_tests():
    sure, clear = Judgement("confirmed", 0.001), Judgement("confirmed", 0.02)
    none, against = Judgement("no difference", 0.03), Judgement("refuted", 0.004)
    assert joint([sure, clear]) == Judgement("confirmed", 0.02)
    assert joint([sure, none]) == Judgement("no difference", 0.03)
    assert joint([sure, UNDECIDED]) is UNDECIDED
    assert joint([sure, against, UNDECIDED]) == Judgement("refuted", pytest.approx(0.012))
    assert joint([]) is UNDECIDED
    for word in ("confirmed", "refuted", "undecided", "no difference", "95%", "5%", "3 seeds", "Bonferroni"):
        assert word in RULE


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_discoveries_agree_with_scipy(p_values):
    expected = stats.false_discovery_control(p_values, method="bh") <= 0.05
    found = discoveries(p_values)
    edge = np.isclose(stats.false_discovery_control(p_values, method="bh"), 0.05)
    assert [a for a, skip in zip(found, edge, strict=True) if not skip] == expected[~edge].tolist()


def test_claims_without_a_verdict_count_as_tests():
    assert discoveries([0.02, None]) == [True, False]
    assert discoveries([0.03, None]) == [False, False]
