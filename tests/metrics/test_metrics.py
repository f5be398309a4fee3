from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, recall_score

from oneflare.core.config import DataConfig
from oneflare.data import load
from oneflare.metrics import diagnose, score
from oneflare.metrics.classification import expected_calibration_error
from oneflare.metrics.diagnostics import (
    cross_client_cosine,
    etf_distance,
    linear_cka,
    nc1,
    nc2,
    normalised_entropy,
    parameter_variance,
)
from oneflare.nn import simplex_etf


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scores_equal_scikit_learn():
    logits, labels = draw(300, 6), torch.randint(0, 6, (300,), generator=torch.Generator().manual_seed(1))
    predicted = logits.argmax(1)
    scores = score(logits, labels)
    assert scores.accuracy == pytest.approx(accuracy_score(labels, predicted))
    assert scores.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predicted))
    recalls = recall_score(labels, predicted, average=None)
    assert scores.per_class == pytest.approx(recalls.tolist())
    assert scores.worst_class == pytest.approx(recalls.min())


def test_a_class_without_test_samples_does_not_count():
    scores = score(torch.eye(3), torch.tensor([0, 1, 1]))
    assert scores.per_class == [1.0, 0.5, None]
    assert scores.balanced_accuracy == 0.75


def test_calibration_error_by_hand():
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    labels = torch.tensor([0, 1, 1, 1])
    expected = (2 * abs(0.5 - 0.9) + abs(0 - 0.6) + abs(1 - 0.7)) / 4
    assert expected_calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-6)
    assert expected_calibration_error(torch.eye(2), torch.tensor([0, 1])) == 0


def test_neural_collapse_is_zero_at_collapse():
    etf = simplex_etf(5, 8, seed=0).float()
    labels = torch.arange(5).repeat(10)
    assert nc1(etf[labels], labels) == pytest.approx(0, abs=1e-6)
    assert nc2(etf[labels], labels) == pytest.approx(0, abs=1e-6)
    assert etf_distance(3 * etf) == pytest.approx(0, abs=1e-6)
    noisy = etf[labels] + 0.3 * draw(50, 8)
    assert nc1(noisy, labels) > 0.1
    assert nc2(noisy, labels) > 0.01
    assert nc1(etf[:1].repeat(4, 1), torch.zeros(4, dtype=torch.long)) is None


def test_nc1_equals_numpy():
    features, labels = draw(60, 4).double(), torch.arange(3).repeat(20)
    x, y = features.numpy(), labels.numpy()
    means = np.stack([x[y == c].mean(0) for c in range(3)])
    within = sum((x[y == c] - means[c]).T @ (x[y == c] - means[c]) for c in range(3)) / 60
    between = (means - means.mean(0)).T @ (means - means.mean(0)) / 3
    assert nc1(features, labels) == pytest.approx(np.trace(within @ np.linalg.pinv(between, rcond=1e-9)) / 3)


def test_cka_properties():
    x = draw(50, 6)
    rotation = torch.linalg.qr(draw(6, 6, seed=1)).Q
    assert linear_cka(x, 3 * x @ rotation) == pytest.approx(1, abs=1e-6)
    assert linear_cka(x, draw(50, 6, seed=2)) < 0.5
    assert linear_cka(torch.zeros(5, 2), x[:5]) == 0


def test_cross_client_cosine_by_hand():
    prototypes = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, -5.0]]])
    assert cross_client_cosine(prototypes).tolist() == pytest.approx([1 / 3, -1 / 3])


def test_entropy_of_counts():
    values = normalised_entropy(torch.tensor([[5.0, 5.0], [9.0, 0.0]]))
    assert values.tolist() == pytest.approx([1.0, 0.0])


def test_diagnostics_of_a_run(tiny_uploads):
    weights = [
        torch.cat(
            [
                t.flatten()
                for name, t in sorted(u.weights().items())
                if name in dict(tiny_uploads.template.encoder.named_parameters())
            ]
        )
        for u in tiny_uploads
    ]
    assert parameter_variance(tiny_uploads) == pytest.approx(float(torch.stack(weights).double().var(0).mean()))
    test = load(DataConfig(test_size=60)).test
    result = diagnose(tiny_uploads, test.images, test.labels)
    stacked = tiny_uploads.prototypes
    assert result.g_protos_std == pytest.approx(float(stacked.mean(0).std()))
    assert result.inter_client_proto_std == pytest.approx(float(stacked.std(0).mean()))
    assert all(value is not None for value in result.to_dict().values())
