"""The two privacy attacks: their measures against oracles, their success where it must be, and what the switches do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from crash import command
from sklearn.metrics import roc_auc_score, roc_curve

from conftest import TINY
from oneflare.methods.resolve import resolve
from oneflare.simulation.stages import run_experiment
from oneflare.study.audit import audit_run, label_error, membership, shares


def test_membership_measures_agree_with_scikit_learn():
    generator = np.random.default_rng(0)
    members, others = generator.normal(0.7, 1, 400).round(1), generator.normal(0, 1, 300).round(1)
    found = membership(torch.from_numpy(members), torch.from_numpy(others))
    truth = np.r_[np.ones(400), np.zeros(300)]
    scores = np.r_[members, others]
    assert found.auc == pytest.approx(roc_auc_score(truth, scores))
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found.true_positives == pytest.approx(true[false <= 0.01].max())


def test_label_error_is_total_variation():
    true = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    found = label_error(torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]), true)
    assert found.total_variation == pytest.approx(0.125)
    assert found.guessing == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert label_error(true, true).correlation == pytest.approx(1)
    assert torch.equal(shares(torch.tensor([0, 0])), torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_audit_of_networks(tiny_run):
    code, said = command("audit", str(tiny_run), "--quiet")
    assert (code, said) == (0, "")
    rows = {row["switches"]: row for row in json.loads((tiny_run / "audit.json").read_text())["rows"]}
    (tiny_run / "audit.json").unlink()
    assert [name for name, row in rows.items() if row["used"]] == ["counts exact"]
    for dtype in ("float32", "bfloat16", "int8"):
        row = rows[f"weights {dtype}, counts withheld"]
        assert 0.3 < row["membership"]["auc"] < 1
        assert 0 <= row["labels"]["total_variation"] <= 1
    assert rows["counts exact"]["labels"]["total_variation"] == 0
    weak, strong = (rows[f"counts noised, epsilon {e}"]["labels"]["total_variation"] for e in ("8", "1"))
    assert weak == 0  # one class in 1500 changes at all: the price of a weak promise
    assert weak < strong < rows["counts exact"]["labels"]["guessing"]


def test_exact_statistics_of_few_images_give_their_images_away_and_noise_hides_them(tmp_path):
    """With fewer images than features, members lie in the span of the Gram matrix and others do not."""
    settings = {"method": "analytic", "analytic.filters": 16, "data.train_size": 90, "data.test_size": 200}
    run_experiment(resolve(TINY, settings), tmp_path / "run")
    rows = {row.switches: row for row in audit_run(tmp_path / "run").rows}
    assert rows["statistics exact"].used
    assert rows["statistics exact"].membership.auc > 0.95
    assert rows["statistics exact"].labels.total_variation == 0
    private = rows["statistics epsilon 1"]
    assert abs(private.membership.auc - 0.5) < 0.1
    assert private.membership.true_positives < 0.1
    assert private.labels.total_variation > 0.05


def test_exact_densities_of_few_images_say_who_was_measured(tmp_path):
    """A covariance of fewer images than dimensions has directions in which no member varies at all."""
    settings = {"method": "flare", "encoder.width": 8, "data.train_size": 90, "data.test_size": 200}
    run_experiment(resolve(TINY, settings), tmp_path / "run")
    rows = {row.switches: row for row in audit_run(tmp_path / "run").rows}
    assert rows["densities exact"].used
    assert rows["densities exact"].membership.auc > rows["weights float32, counts withheld"].membership.auc + 0.2
