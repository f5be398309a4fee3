"""Sums of products in a few bits: what is lost, what is refused, and whole runs with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.client.statistics import measure
from oneflare.core.config import DataConfig
from oneflare.data import load
from oneflare.errors import ConfigError
from oneflare.fusion.analytic.solver import solve
from oneflare.nn import build_feature_map
from oneflare.upload.coding import (
    FINENESS,
    changed_sums,
    code_complaint,
    coded,
    coder_of,
    decoded,
    plain,
    rounding_eigenvalue,
)
from oneflare.upload.contract import scatter_room, statistics_bytes
from oneflare.upload.statistics import FeatureLimits, Plan, Statistics, pack, unpack

SPEC = {"name": "random_conv", "filters": 12, "mirror": False}
DIGITS = load(DataConfig())
SIZE = DIGITS.train.images.shape[-1]
CODER = coder_of(SPEC, 1, SIZE)
FEATURES = build_feature_map(SPEC, 1, SIZE)
LIMITS = FeatureLimits.of(FEATURES)


def statistics(n=300, classes=10) -> Statistics:
    return measure(FEATURES, DIGITS.train.images[:n], DIGITS.train.labels[:n], classes)


def scatter(found: Statistics) -> torch.Tensor:
    total = found.sums.sum(0)
    return found.gram - torch.outer(total, total) / found.samples


def test_the_change_of_features_is_the_inverse_root_of_the_correlations():
    """A C A^T = K (K + r)^-1 for the covariance C of the pictures it was made from, by SciPy's matrix functions."""
    from scipy.linalg import fractional_matrix_power

    from oneflare.nn.decorrelation import PICTURES, _roots
    from oneflare.nn.synthetic_pictures import dead_leaves

    pictures = dead_leaves(PICTURES, 1, SIZE)
    phi = FEATURES(pictures)[:, :20].double()
    there, back = _roots(phi, 0.03)
    correlations = np.corrcoef(phi.numpy().T)
    expected = fractional_matrix_power(correlations + 0.03 * np.eye(20), -0.5) / phi.std(0).numpy()
    assert np.allclose(there.numpy(), expected, rtol=5e-3, atol=5e-3 * np.abs(expected).max())
    assert torch.allclose(there @ back, torch.eye(20), atol=1e-3)


@pytest.mark.parametrize("name", sorted(FINENESS))
def test_a_decorrelated_product_loses_at_most_half_a_step(name):
    exact = statistics()
    packed = coded(pack(exact), CODER, name)
    found, step = decoded(packed)
    assert abs(math.log2(step / (FINENESS[name] * math.sqrt(300)))) <= 1 / 8
    wanted = CODER.decorrelate(scatter(exact).float())
    assert float((found - wanted).abs().max()) <= 0.5001 * step
    assert code_complaint(packed, LIMITS, CODER) is None
    back = scatter(unpack(plain(packed, CODER)))
    again = CODER.decorrelate(back.float())
    assert torch.allclose(again.double(), found, atol=0.05 * step + 1e-4 * float(found.abs().max()))


def test_memory_that_is_given_makes_no_difference():
    packed = coded(pack(statistics()), CODER, "coarse")
    into = torch.full((FEATURES.dim, FEATURES.dim), float("nan"), dtype=torch.float64)
    for found, expected in zip(changed_sums(packed, CODER, into), changed_sums(packed, CODER), strict=True):
        assert torch.equal(found, expected)
    assert changed_sums(packed, CODER, into)[0].data_ptr() == into.data_ptr()


def test_the_change_of_products_reads_their_upper_triangle():
    """A S A^T with the whole of A, in double precision."""
    products = scatter(statistics())
    whole = torch.block_diag(*CODER.forward).double()
    expected = whole @ products @ whole.T
    for given_products in (products, products.triu() + torch.ones_like(products).tril(-1)):
        found = CODER.decorrelate(given_products).double()
        assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))
        assert torch.equal(found, found.T) or torch.allclose(found, found.T, atol=1e-4 * float(found.abs().max()))


def test_fewer_bits_than_correlations_in_twelve_bits():
    exact = statistics(1000)
    sizes = {name: coded(pack(exact), CODER, name)["scatter"].numel() * 8 for name in FINENESS}
    numbers = FEATURES.dim * (FEATURES.dim + 1) / 2
    assert 8 * sizes["coarse"] / numbers < 7
    assert 8 * sizes["fine"] / numbers < 12 + 1


def test_the_step_grows_until_the_sums_fit():
    packed = pack(statistics())
    free = coded(packed, CODER, "fine")
    room = 8 * len(free["scatter"]) // 2
    small = coded(packed, CODER, "fine", room)
    assert 8 * len(small["scatter"]) <= room
    assert decoded(small)[1] > decoded(free)[1]
    assert code_complaint(small, LIMITS, CODER) is None


@given(st.integers(1, 12))
def test_the_sums_of_a_few_images_are_not_refused(n):
    packed = coded(pack(statistics(n)), CODER, "coarse")
    assert code_complaint(packed, LIMITS, CODER) is None


@pytest.mark.parametrize(
    ("scale", "words"), [(-1.0, "contradict each other"), (30.0, "more than its feature can have")]
)
def test_sums_that_no_images_have_are_refused(scale, words):
    packed = pack(statistics())
    packed["scatter"] = packed["scatter"] * scale
    assert words in (code_complaint(coded(packed, CODER, "fine"), LIMITS, CODER) or "accepted")


def test_class_means_that_contradict_the_products_are_refused():
    packed = pack(statistics())
    packed["sums"][0] += 0.2 * packed["counts"][0]
    packed["sums"][1] -= 0.2 * packed["counts"][1]
    reason = code_complaint(coded(packed, CODER, "fine"), LIMITS, CODER)
    assert reason is not None
    assert "contradict" in reason


def test_damaged_code_is_refused():
    packed = coded(pack(statistics()), CODER, "coarse")
    for damaged in (packed["scatter"][:-1], packed["scatter"][:0], packed["scatter"] ^ 1 << 40, packed["scatter"][1:]):
        assert "not in the code" in str(code_complaint({**packed, "scatter": damaged}, LIMITS, CODER))


def test_the_planned_size_counts_the_header_and_the_sums():
    room = scatter_room(100_000, 50, 10)
    assert room == 100_000 - 256 * 26 - 4 * 50 * 10 - 80
    assert statistics_bytes(50, 10, "coarse") == math.ceil(5 * 1275 / 8) + 2080


def test_features_of_a_backbone_are_not_coded():
    with pytest.raises(ConfigError, match="maps of images"):
        Plan.of({"name": "identity"}, 30, 1, "coarse")


def test_weights_of_changed_features_give_the_same_scores():
    phi = FEATURES(DIGITS.train.images[:7])
    weight = torch.randn(FEATURES.dim, 3, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(phi @ CODER.weights(weight), CODER.changed(phi) @ weight, rtol=1e-3, atol=1e-2)


def test_changed_sums_are_those_of_changed_features():
    n = 200
    z = CODER.changed(FEATURES(DIGITS.train.images[:n]).double())
    packed = coded(pack(statistics(n)), CODER, "fine")
    found = Statistics(*changed_sums(packed, CODER))
    onehot = torch.nn.functional.one_hot(DIGITS.train.labels[:n], 10).double()
    assert torch.allclose(found.sums, onehot.T @ z, rtol=1e-4, atol=1e-3)
    centred = z - z.mean(0)
    expected = centred.T @ centred
    assert torch.equal(found.counts, onehot.sum(0))
    allowed = 0.5 * decoded(packed)[1] + 1e-3 * float(expected.diagonal().max())
    assert torch.allclose(scatter(found), expected, atol=allowed)


def test_the_classifier_of_coded_sums_is_nearly_as_good():
    """On digits, and with a ridge that the rounding does not drive up."""
    n = 1000
    exact = measure(FEATURES, DIGITS.train.images[:n], DIGITS.train.labels[:n], 10)
    phi, labels = FEATURES(DIGITS.test.images), DIGITS.test.labels
    accuracy = {}
    for name in ("fine", "coarse"):
        total = Statistics(*changed_sums(coded(pack(exact), CODER, name), CODER))
        found = solve(total)
        assert found.ridge <= 1
        accuracy[name] = float(((phi @ CODER.weights(found.weight) + found.bias).argmax(1) == labels).double().mean())
    found = solve(exact)
    best = float(((phi @ found.weight + found.bias).argmax(1) == labels).double().mean())
    assert accuracy["fine"] > best - 0.01
    assert accuracy["coarse"] > best - 0.03


def test_rounding_adds_eigenvalues_of_the_size_that_wigner_gives():
    """Oracle: the spectral norm of what rounding random sums to three steps changes."""
    generator = torch.Generator().manual_seed(0)
    steps, dim = (1.0, 4.0, 0.5), 300
    total = torch.zeros(dim, dim, dtype=torch.float64)
    for step in steps:
        upper = torch.randn(dim, dim, dtype=torch.float64, generator=generator).mul_(40 * step).triu()
        exact = upper + upper.triu(1).T
        total += (exact / step).round() * step - exact
    found = float(torch.linalg.matrix_norm(total, 2))
    assert found == pytest.approx(rounding_eigenvalue(steps, dim), rel=0.1)
