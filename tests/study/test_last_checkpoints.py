"""Studies compare means over the last checkpoints, and never the mean of one arm with the end of another."""

from __future__ import annotations

import numpy as np
import pytest

from oneflare.study.cells import make_plan, unique_cells
from oneflare.study.declare import read_declaration
from oneflare.study.execute import run_cells
from oneflare.study.findings import Findings
from oneflare.study.results import collect
from oneflare.study.scales import SCALES

STUDY = """
title: Tails
question: What is compared?
fusions: [feature_mean, ensemble]
baseline: fafi
arms:
  fafi: {method: fafi}
  flare: {method: flare}
  end: {method: fafi, settings: {train: {tail: null}, objective: {supcon_temperature: 0.5}}}
places:
  smoke:
    - data: digits
      alpha: 0.3
      clients: 2
      settings: {data: {train_size: 120, test_size: 50}, encoder: {width: 4}, train: {epochs: 3, snapshots: 0, tail: 1}}
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tails")
    (folder / "tails.yaml").write_text(STUDY)
    plan = make_plan(read_declaration(folder / "tails.yaml"), SCALES["smoke"], seeds=2)
    run_cells(unique_cells([plan]), folder, processes=1)
    return Findings(plan, folder)


def test_accuracies_are_means_over_the_last_checkpoints(findings):
    (place,) = findings.plan.places
    for one in findings.at(place, "flare"):
        before, end = (point.accuracy for point in one.metrics.history)
        assert one.accuracy == pytest.approx((before + end) / 2)
        assert one.right().mean() == pytest.approx(one.accuracy)
    found = findings.difference(place, "flare", "fafi")
    gaps = [one.accuracy - other.accuracy for one, other in findings.paired(place, "flare", "fafi")]
    assert found.values == pytest.approx(gaps)
    assert found.over_images
    low, high = found.interval
    assert low <= found.mean <= high
    cell = collect(findings.plan, findings.runs).cell(place.id, "flare")
    assert cell.accuracies == pytest.approx([one.accuracy for one in findings.at(place, "flare")], rel=1e-5)


def test_where_one_has_its_end_alone_the_end_of_the_other_counts(findings):
    (place,) = findings.plan.places
    ends = [[one.metrics.accuracy for one in findings.at(place, row)] for row in ("fafi", "end")]
    found = findings.difference(place, "fafi", "end")
    assert found.values == pytest.approx(np.subtract(*ends))
    assert found.over_images
