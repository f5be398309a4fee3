"""Thresholds are chosen on what members tell: the literal rule, and what is told of few images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.errors import ConfigError
from oneflare.metrics.figures import ClassFigures, ThresholdRates, figures_of
from oneflare.metrics.pooling import pool
from oneflare.metrics.thresholds import LEVELS, kept_shares, least_familiarity, levels, threshold_for

CURVE = tuple(
    ThresholdRates(t, s, p) for t, s, p in ((0.1, 0.98, 0.5), (0.3, 0.95, 0.8), (0.5, 0.7, 0.9), (0.9, 0.2, 0.99))
)


def a_class(curve=CURVE) -> ClassFigures:
    return ClassFigures("melanoma", 40, None, None, None, None, None, curve)


@pytest.mark.parametrize(
    ("rate", "least", "threshold"),
    [("sensitivity", 0.95, 0.3), ("sensitivity", 0.96, 0.1), ("specificity", 0.9, 0.5), ("specificity", 0.1, 0.1)],
)
def test_the_aim_is_reached_at_the_least_cost(rate, least, threshold):
    assert threshold_for(a_class(), rate, least).threshold == threshold


def test_of_equally_good_thresholds_the_middle_one_is_taken():
    curve = tuple(ThresholdRates(threshold, 1.0, 1.0) for threshold in (0.01, 0.3, 0.6, 0.99))
    assert threshold_for(a_class(curve), "sensitivity", 0.9).threshold == 0.6


def test_an_aim_that_nothing_reaches_says_what_can_be_reached():
    with pytest.raises(ConfigError, match=r"highest is 0\.980, at 0\.1 with a specificity of 0\.500"):
        threshold_for(a_class(), "sensitivity", 0.99)
    with pytest.raises(ConfigError, match="no member tells"):
        threshold_for(a_class(()), "sensitivity", 0.5)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=60), st.floats(0.05, 1.0))
def test_the_least_familiarity_keeps_the_share_that_was_asked_for(values, keep):
    familiarity = torch.tensor(values, dtype=torch.float64)
    floor = least_familiarity(kept_shares(familiarity, 3.0), 3.0, keep)
    assert np.mean(np.array(values) >= floor) >= keep
    higher = levels(3.0)[levels(3.0) > floor]
    assert not len(higher) or np.mean(np.array(values) >= float(higher[0])) < keep


@given(st.lists(st.floats(-3, 3), min_size=5, max_size=40))
def test_groups_below_the_limit_are_told_as_nobody(values):
    number, told = len(values), kept_shares(torch.tensor(values, dtype=torch.float64), 3.0, 5)
    assert len(told) == LEVELS
    for share in told:
        kept = round(share * number)
        assert kept in (0, number) or 5 <= kept <= number - 5


def test_pooled_shares_are_those_of_all_images():
    generator = torch.Generator().manual_seed(0)
    parts = []
    for number in (30, 50):
        labels = torch.arange(number) % 2
        figures = figures_of(torch.rand(number, 2, generator=generator, dtype=torch.float64), labels, ("a", "b"))
        familiarity = torch.randn(number, generator=generator)
        parts.append((figures, familiarity))
    told = [replace(figures, kept=kept_shares(familiarity, 3.0)) for figures, familiarity in parts]
    everything = kept_shares(torch.cat([familiarity for _, familiarity in parts]), 3.0)
    assert pool(told).kept == pytest.approx(everything)
    assert pool([told[0], parts[1][0]]).kept is None
