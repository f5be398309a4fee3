from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning.losses import SupConLoss

from oneflare.objective import TERMS, Batch, align, local_terms
from oneflare.objective.terms import supervised_contrastive


def unit(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


@given(
    samples=st.integers(1, 40),
    classes=st.integers(2, 8),
    temperature=st.sampled_from([0.07, 0.5, 1.0]),
    seed=st.integers(0, 999),
)
def test_supcon_equals_pytorch_metric_learning(samples, classes, temperature, seed):
    drawn = torch.randint(0, classes, (samples,), generator=torch.Generator().manual_seed(seed))
    labels = torch.cat([torch.tensor([0, 1]), drawn]).repeat(2)  # that library returns 0 where nothing is negative
    features = unit(len(labels), 16, seed=seed)
    expected = SupConLoss(temperature=temperature)(features, labels)
    assert float(supervised_contrastive(features, labels, temperature)) == pytest.approx(float(expected), abs=1e-5)


def test_supcon_gradient_equals_pytorch_metric_learning():
    labels = torch.tensor([0, 1, 2, 0, 1, 1] * 2)
    raw = torch.randn(12, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (ours,) = torch.autograd.grad(supervised_contrastive(F.normalize(raw, dim=1), labels, 0.07), raw)
    (theirs,) = torch.autograd.grad(SupConLoss(temperature=0.07)(F.normalize(raw, dim=1), labels), raw)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_supcon_without_positives_is_a_connected_zero():
    features = unit(2, 4).requires_grad_()
    loss = supervised_contrastive(features, torch.tensor([0, 1]), 0.07)
    loss.backward()
    assert float(loss.detach()) == 0
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()


def batch(temperature: float = 1.0) -> Batch:
    labels = torch.tensor([0, 3, 1, 1]).repeat(2)
    prototypes = torch.randn(5, 16, generator=torch.Generator().manual_seed(4))
    return Batch(unit(8, 16, seed=2), labels, prototypes, proto_temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_terms_are_the_equations(temperature):
    b = batch(temperature)
    terms = local_terms(dict.fromkeys(("cls", "supcon", "proto_feature", "proto_separation", "proto_cosine"), 1.0), b)
    own = b.prototypes.double()[b.labels]
    cosines = (b.features.double() * own).sum(1) / own.norm(dim=1)
    assert float(terms["proto_cosine"]) == pytest.approx(float((1 - cosines).mean()), rel=1e-5)
    logits = b.features.double() @ b.prototypes.double().T

    def cross_entropy(scores, targets):
        return -(scores - scores.exp().sum(1, keepdim=True).log())[range(len(targets)), targets].mean()

    assert float(terms["cls"]) == pytest.approx(float(cross_entropy(logits, b.labels)), rel=1e-5)
    assert float(terms["proto_feature"]) == pytest.approx(
        float(cross_entropy(logits / temperature, b.labels)), rel=1e-5
    )
    gram = b.prototypes.double() @ b.prototypes.double().T / temperature
    assert float(terms["proto_separation"]) == pytest.approx(float(cross_entropy(gram, range(5))), rel=1e-4, abs=1e-7)


def test_a_term_without_weight_is_not_computed():
    assert set(local_terms({"cls": 1.0, "supcon": 0.0}, batch())) == {"cls"}
    assert set(TERMS) >= {"cls", "supcon", "proto_feature", "proto_separation"}


def test_align_is_the_mean_over_all_entries():
    prototypes, anchors = torch.randn(5, 7), torch.randn(5, 7)
    assert float(align(prototypes, anchors)) == pytest.approx(float(((prototypes - anchors) ** 2).sum() / 35), rel=1e-6)
