"""What a few seeds can show: intervals and tests against scipy and by hand, and the rule for verdicts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from oneflare.study.inference import (
    RULE,
    Difference,
    bootstrap_interval,
    crossed_interval,
    difference,
    joint,
    judge,
    judge_every,
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
    assert judge(difference(values), threshold, side) == verdict


def test_images_can_take_a_verdict_away():
    gaps = np.array([0.02, 0.021, 0.022])
    few = np.zeros((3, 50))
    few[:, 0] = gaps * 50
    assert judge(difference(gaps.tolist()), 0, "above") == "confirmed"
    assert judge(difference(gaps.tolist(), few), 0, "above") == "undecided"


def test_the_rule_for_every_seed_and_for_claims():
    assert judge_every([60, 70, 80], 50, "above") == "confirmed"
    assert judge_every([60, 40, 80], 50, "above") == "undecided"
    assert judge_every([10, 40, 20], 50, "above") == "refuted"
    assert judge_every([10, 40], 50, "below") == "undecided"
    assert joint(["confirmed", "confirmed"]) == "confirmed"
    assert joint(["confirmed", "undecided"]) == "undecided"
    assert joint(["confirmed", "refuted", "undecided"]) == "refuted"
    assert joint([]) == "undecided"
    for word in ("confirmed", "refuted", "undecided", "95%", "0.05", "3 seeds"):
        assert word in RULE
