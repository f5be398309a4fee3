from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.core.seeds import torch_generator
from oneflare.fusion.analytic.committee import ALIKE, committee, shares
from oneflare.fusion.analytic.solver import LinearClassifier, solve
from oneflare.upload.statistics import Statistics


def test_shares_are_those_of_least_squares_on_such_scores():
    """Oracle: labels regressed on scores that were drawn with these cosines and errors related as assumed."""
    cosines, number = np.array([0.64, 0.62, 0.66, 0.6]), 400_000
    rng = np.random.default_rng(0)
    labels = rng.standard_normal(number)
    shared = rng.standard_normal(number)
    errors = np.sqrt(ALIKE) * shared[:, None] + np.sqrt(1 - ALIKE) * rng.standard_normal((number, 4))
    scores = labels[:, None] * cosines + errors * np.sqrt(1 - cosines**2)
    expected, *_ = np.linalg.lstsq(scores, labels, rcond=None)
    assert np.allclose(shares(cosines.tolist()), expected / expected.sum(), atol=0.01)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=9))
def test_shares_add_up_and_never_prefer_the_worse(cosines):
    found = shares(cosines)
    assert float(found.sum()) == pytest.approx(1)
    assert bool((found >= 0).all())
    assert bool((found[torch.tensor(cosines).argsort()].diff() >= -1e-9).all())


def test_members_that_are_alike_count_alike_and_a_poor_one_not_at_all():
    assert torch.allclose(shares([0.6] * 4), torch.full((4,), 0.25).double())
    found = shares([0.74, 0.73, 0.4, 0.74])
    assert found[2] == 0
    assert float(found.min()) == 0
    for nothing_to_weigh_by in ([1.0, 1.0], [-0.2, -0.1]):
        assert torch.allclose(shares(nothing_to_weigh_by), torch.full((2,), 0.5).double())


def drawn(dim, signal, seed):
    """Statistics of features of which some tell three classes apart, and these features."""
    generator = torch_generator(seed, "committee")
    labels = torch.arange(1200) % 3
    phi = torch.randn(1200, dim, generator=generator).double()
    phi[:, :3] += signal * torch.nn.functional.one_hot(labels, 3)
    total = Statistics.zeros(dim, 3)
    total.gram.addmm_(phi[:600].T, phi[:600])
    total.sums.index_add_(0, labels[:600], phi[:600])
    total.counts.add_(torch.bincount(labels[:600], minlength=3))
    return total, phi[600:].float(), labels[600:]


def test_a_block_that_knows_nothing_does_not_spoil_the_answer():
    good, phi, labels = drawn(12, 2.0, 0)
    poor, noise, _ = drawn(60, 0.0, 1)
    one, other = solve(good, blocks=2), solve(poor, blocks=2)
    assert one.cosine > 0.6
    assert abs(other.cosine) < 0.15
    both = committee([one, other])
    alone = (phi @ one.weight + one.bias).argmax(1)
    together = (torch.cat([phi, noise], 1) @ both.weight + both.bias).argmax(1)
    assert torch.equal(together, alone)
    assert float((together == labels).float().mean()) > 0.75


def test_how_long_the_scores_of_a_member_are_does_not_matter():
    first, phi, _ = drawn(12, 1.0, 0)
    second, more, _ = drawn(12, 1.1, 1)
    one, other = solve(first, blocks=2), solve(second, blocks=2)
    longer = replace(other, weight=3 * other.weight, bias=3 * other.bias, spread=3 * other.spread)
    phi = torch.cat([phi, more], 1)
    plain, stretched = (committee([one, each]) for each in (other, longer))
    logits, long_logits = (phi @ made.weight + made.bias for made in (plain, stretched))
    ratio = (long_logits / logits).flatten()
    assert torch.allclose(ratio, ratio.median().expand_as(ratio), rtol=1e-2)


def test_the_spread_is_that_of_scores_of_other_images():
    total, phi, _ = drawn(12, 1.0, 0)
    one = solve(total)
    scores = phi @ one.weight + one.bias
    found = float((scores - scores.mean(1, keepdim=True)).square().mean().sqrt())
    assert one.spread == pytest.approx(found, rel=0.15)


def test_a_committee_says_the_strongest_ridge():
    made = [LinearClassifier(torch.zeros(2, 3), torch.zeros(3), ridge) for ridge in (0.1, 0.3)]
    assert committee(made).ridge == 0.3
