"""The mean of the last checkpoints: the literal mean, through its file form and in real runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import TINY
from oneflare.client.files import tail_epochs
from oneflare.client.lending import can_lend, snapshots_of
from oneflare.data import load
from oneflare.errors import RunError
from oneflare.methods.resolve import resolve
from oneflare.simulation.stages import run_experiment
from oneflare.simulation.steady import Steady
from oneflare.study.answers import keep_answers, read_answers

ROWS = st.integers(1, 60).flatmap(
    lambda images: st.lists(st.lists(st.booleans(), min_size=images, max_size=images), min_size=1, max_size=6)
)


@given(ROWS)
def test_it_is_the_mean_over_checkpoints_of_each_image(rows):
    right = np.array(rows)
    steady = Steady.over(list(right))
    assert steady.checkpoints == len(rows)
    assert steady.shares() == pytest.approx(right.mean(0))
    assert steady.accuracy == pytest.approx(right.mean())


@pytest.mark.parametrize("damage", ["not base 64!", "AAAA", ""])
def test_damaged_answers_are_refused_in_one_line(damage):
    steady = replace(Steady.over([np.array([True, False])]), right=damage)
    with pytest.raises(RunError, match="damaged") as caught:
        steady.shares()
    assert "\n" not in str(caught.value)


def test_the_tail_is_what_there_is_before_the_last_epoch():
    assert list(tail_epochs(25, 4)) == [21, 22, 23, 24]
    assert list(tail_epochs(3, 9)) == [1, 2]
    assert list(tail_epochs(1, 4)) == []
    assert list(tail_epochs(25, None)) == []
    both = resolve({"method": "fafi", "epochs": 25, "train": {"snapshots": 4, "tail": 2}})
    assert snapshots_of(both) == [5, 10, 15, 20, 23, 24]


def test_a_run_averages_its_last_checkpoints_and_saves_the_last_model(tmp_path):
    settings = {"method": "fafi", "epochs": 4, "train": {"snapshots": 1, "tail": 2}}
    experiment = resolve(TINY, {"fusions": ["feature_mean", "ensemble"]}, settings)
    result = run_experiment(experiment, tmp_path / "run")
    for fusion in result.fusions.values():
        accuracies = {point.epoch: point.accuracy for point in fusion.history}
        assert list(accuracies) == [2, 3, 4]
        assert fusion.steady.checkpoints == 3
        assert fusion.steady.accuracy == pytest.approx(np.mean([accuracies[epoch] for epoch in (2, 3, 4)]))
        assert fusion.accuracy == accuracies[4]
    keep_answers(tmp_path / "run", ["feature_mean"], load(experiment.data))
    last = read_answers(tmp_path / "run", "feature_mean")
    shares = result.fusions["feature_mean"].steady.shares()
    assert set(np.unique(shares[last])) <= {np.float32(k / 3) for k in (1, 2, 3)}
    assert set(np.unique(shares[~last])) <= {np.float32(k / 3) for k in (0, 1, 2)}
    plain = resolve(TINY, {"fusions": ["feature_mean"]}, settings, {"train": {"tail": None, "snapshots": 0}})
    assert can_lend(experiment, plain)
    assert not can_lend(plain, experiment)
    assert run_experiment(plain, tmp_path / "plain").fusions["feature_mean"].steady is None


def test_where_nothing_is_trained_a_tail_changes_nothing():
    plain, asked = (resolve({"method": "analytic", "train": {"tail": tail}}) for tail in (None, 4))
    assert plain.training_digest() == asked.training_digest()
