"""Intervals against SciPy, closed forms and simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binomtest, norm

from oneflare.metrics.intervals import Measured, Z, mean_of, paired_gain, rank_interval, wilson


def test_quantile():
    assert norm.ppf(0.975) == pytest.approx(Z, abs=1e-14)


@given(st.integers(1, 500), st.data())
@settings(max_examples=40, deadline=None)
def test_wilson_is_scipys(number, data):
    hits = data.draw(st.integers(0, number))
    found = wilson(hits / number, number)
    wanted = binomtest(hits, number).proportion_ci(0.95, method="wilson")
    assert (found.value, found.low, found.high) == pytest.approx((hits / number, wanted.low, wanted.high), abs=1e-12)


def test_mean_of_one_is_itself_and_of_equals_narrows_by_the_root():
    one = wilson(0.8, 50)
    assert mean_of([one]) == one
    four = mean_of([one] * 4)
    assert four.value - four.low == pytest.approx((one.value - one.low) / 2)
    assert four.high - four.value == pytest.approx((one.high - one.value) / 2)


@given(st.floats(0.02, 0.98), st.integers(2, 80), st.integers(2, 80))
@settings(max_examples=25, deadline=None)
def test_rank_interval_solves_the_published_equation(area, positives, negatives):
    def error(a):
        q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
        variance = a * (1 - a) + (positives - 1) * (q1 - a * a) + (negatives - 1) * (q2 - a * a)
        return norm.ppf(0.975) * math.sqrt(variance / (positives * negatives))

    found = rank_interval(area, positives, negatives)
    low = brentq(lambda a: area - a - error(a), 0.0, area)
    high = brentq(lambda a: a - area - error(a), area, 1.0)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_a_perfect_area_still_has_a_width_that_shrinks():
    few, many = rank_interval(1.0, 5, 5), rank_interval(1.0, 200, 200)
    assert few.high == many.high == 1.0
    assert few.low < 0.8 < many.low < 1.0


def test_paired_gain_covers_the_truth():
    """Of 400 simulated tests about 95 % hold the true difference in their interval."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        better, worse, _ = generator.multinomial(60, [0.2, 0.1, 0.7])
        found = paired_gain(int(better), int(worse), 60, 60)
        covered += found.low <= 0.1 <= found.high
    assert 0.92 <= covered / 400 <= 0.99


def test_paired_gain_with_patients_is_wider_around_the_same_value():
    images, patients = paired_gain(20, 5, 100, 100), paired_gain(20, 5, 100, 25)
    assert images.value == patients.value == 0.15
    assert patients.low < images.low < images.high < patients.high


def test_a_value_outside_its_interval_is_refused():
    with pytest.raises(ValueError, match="lies in its interval"):
        Measured(0.5, 0.6, 0.7)
