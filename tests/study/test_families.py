"""Cells of studies that train the same networks: only one of them trains."""

from __future__ import annotations

import json

import pytest

from shared import forked

RELATIVES = """
title: Relatives
question: Who trains?
fusions: [feature_mean]
baseline: flare
arms:
  flare: {method: flare}
  watched: {method: flare, settings: {train: {snapshots: 1}}}
  measured: {method: flare, settings: {upload: {evidence: [kronecker]}}}
  with_sums: {method: flare_analytic, fusions: flare_analytic}
  other: {method: fafi}
places:
  smoke:
    - data: digits
      clients: 2
      settings: {data: {train_size: 80, test_size: 40}, encoder: {width: 4}, train: {epochs: 2, snapshots: 0}}
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_cells_with_the_same_networks_train_once(processes, tmp_path):
    (tmp_path / "relatives.yaml").write_text(RELATIVES)
    words = ("study", "relatives.yaml", "--seeds", "1", "-p", processes, "--out", "out")
    done = forked(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seconds = {}
    for path in tmp_path.glob("runs/cells/*/clients/000/summary.json"):
        seconds.setdefault(json.loads(path.read_text())["train_seconds"], []).append(path.parents[2].name[:5])
    assert sorted(seconds.values(), key=len) == [["fafi-"], ["flare"] * 4]  # borrowed ones keep the lender's seconds
    again = forked(*words, cwd=tmp_path)
    assert "5 cells, 5 done" in again.stderr


def test_the_estimate_counts_one_training_of_a_family(tmp_path):
    (tmp_path / "relatives.yaml").write_text(RELATIVES)
    found = forked("study", "relatives.yaml", "--seeds", "1", "--scale", "smoke", "--dry-run", "--json", cwd=tmp_path)
    rows = json.loads(found.stdout)
    assert len(rows) == 5
    assert [row["seconds"] for row in rows].count(20.0) == 3
