from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from oneflare.client import statistics
from oneflare.client.statistics import measure, measure_on_lattice, on_lattice, privatise
from oneflare.core.config import DataConfig
from oneflare.core.noise import SeededWords
from oneflare.core.privacy import SENSITIVITY, Privacy, gaussian_delta, gaussian_noise
from oneflare.data import load
from oneflare.errors import TrainingError
from oneflare.nn.feature_maps import Bounded, RandomConv, feature_range
from oneflare.nn.hardware import one_thread
from oneflare.upload.statistics import FeatureLimits, Statistics, complaint, pack, unpack

DIGITS = load(DataConfig(train_size=300)).train
MAP = RandomConv(1, 8, filters=3, mirror=False)
LIMITS = FeatureLimits.of(MAP)
WHOLE = measure(MAP, DIGITS.images, DIGITS.labels, 10)


def of(rows):
    return measure(MAP, DIGITS.images[rows], DIGITS.labels[rows], 10)


def close(one: Statistics, two: Statistics, rtol: float) -> bool:
    """Every entry, relative to the entry."""
    pairs = ((one.gram, two.gram), (one.sums, two.sums), (one.counts, two.counts))
    return all(torch.allclose(a, b, rtol=rtol, atol=0) for a, b in pairs)


def test_statistics_are_the_sums_they_are_called():
    phi = MAP(DIGITS.images).double()
    onehot = torch.nn.functional.one_hot(DIGITS.labels, 10).double()
    assert torch.allclose(WHOLE.gram, phi.T @ phi, rtol=1e-12)
    assert torch.allclose(WHOLE.sums, onehot.T @ phi, rtol=1e-12)
    assert torch.equal(WHOLE.counts, onehot.sum(0))


@pytest.mark.numeric
@settings(max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=300, max_size=300))
def test_the_sum_over_any_partition_is_the_whole(owners):
    owners = torch.tensor(owners)
    parts = [of((owners == owner).nonzero().squeeze(1)) for owner in owners.unique()]
    zero = Statistics.zeros(MAP.dim, 10)
    assert close(sum(parts, zero), WHOLE, 1e-12)
    sent = [unpack(pack(part)) for part in parts]
    assert close(sum(sent, zero), WHOLE, 1e-6)


@pytest.mark.parametrize("short", [40, 128, 10_000])
def test_products_in_single_precision_are_the_same_to_its_rounding(short, monkeypatch):
    """However many images are added up before they are added in double precision."""
    monkeypatch.setattr(statistics, "SHORT", short)
    monkeypatch.setattr(statistics, "BLOCK", 64)
    monkeypatch.setattr(statistics, "STRIP", 7)
    found = measure(MAP, DIGITS.images, DIGITS.labels, 10, products=torch.float32)
    assert found.gram.dtype == torch.float64
    assert torch.allclose(found.gram, WHOLE.gram, rtol=3e-6)
    assert torch.allclose(found.sums, WHOLE.sums, rtol=1e-12)


@pytest.mark.numeric
def test_threads_make_no_difference(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    with one_thread():
        found = measure(MAP, DIGITS.images, DIGITS.labels, 10)
    assert torch.equal(found.gram, WHOLE.gram)
    assert torch.equal(found.sums, WHOLE.sums)


def test_removing_a_client_is_subtracting_it():
    parts = [of(torch.arange(start, 300, 4)) for start in range(4)]
    zero = Statistics.zeros(MAP.dim, 10)
    never_there = sum(parts[:2] + parts[3:], zero)
    assert close(sum(parts, zero) - parts[2], never_there, 1e-12)
    assert close(never_there + parts[2], sum(parts, zero), 1e-12)


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_packing_round_trips_within_its_bound(rows):
    statistics = of(torch.arange(rows))
    exact = unpack(pack(statistics))
    assert close(exact, statistics, 1e-6)
    rounded = unpack(pack(statistics, "int16"))
    mean = statistics.sums.sum(0) / rows
    deviation = (statistics.gram.diagonal() - rows * mean**2).clamp(min=0).sqrt()
    bound = (2**-16 * 1.01) * torch.outer(deviation, deviation) + 1e-6 * statistics.gram.abs()
    assert ((rounded.gram - statistics.gram).abs() <= bound + 1e-12).all()
    assert torch.equal(rounded.counts, statistics.counts)


def test_packed_sizes():
    small, large = (sum(t.nbytes for t in pack(WHOLE, kind).values()) for kind in ("int16", "float32"))
    triangle = MAP.dim * (MAP.dim + 1) // 2
    assert large == 4 * triangle + 4 * 10 * MAP.dim + 80
    assert small == large - 2 * triangle + 4 * MAP.dim


@pytest.mark.parametrize("kind", ["float32", "int16"])
@pytest.mark.parametrize("rows", [[0], [3, 3], [1, 2], [4, 9, 200], list(range(300))])
def test_honest_statistics_raise_no_complaint(kind, rows):
    assert complaint(pack(of(torch.tensor(rows)), kind), len(rows), LIMITS) is None


def test_implausible_statistics_are_named():
    def damaged(name, change):
        packed = {key: tensor.clone() for key, tensor in pack(of(torch.arange(20))).items()}
        change(packed[name])
        return complaint(packed, 20, LIMITS)

    def first_count(value):
        return lambda tensor: tensor.__setitem__(0, value)

    assert "negative number" in damaged("counts", first_count(-3))
    assert "the manifest says 20" in damaged("counts", first_count(500))
    assert "negative variance" in damaged("scatter", first_count(-1.0))
    assert "larger than its variances" in damaged("scatter", lambda tensor: tensor.__setitem__(1, 1e6))
    absent = int((torch.bincount(DIGITS.labels[:3], minlength=10) == 0).nonzero()[0])
    packed = pack(of(torch.arange(3)))
    packed["sums"][absent, 0] = 1
    assert "class without images" in complaint(packed, 3, LIMITS)
    packed = pack(of(torch.arange(3)), "int16")
    packed["scatter#scale"][0] = -1
    assert "negative deviation" in complaint(packed, 3, LIMITS)


LIES = {
    "sums times -1e5": ("sums", lambda t: t.mul_(-1e5), "class mean of .* for every image"),
    "sums negated": ("sums", lambda t: t.neg_(), "class mean of -.* for every image"),
    "sums times 10": ("sums", lambda t: t.mul_(10), "class mean of .* for every image"),
    "sums of two classes swapped with counts": ("counts", lambda t: t.copy_(t.flip(0)), "class mean|contradict"),
    "scatter times 1e4": ("scatter", lambda t: t.mul_(1e4), "more than its feature can have"),
    "scatter of nothing": ("scatter", lambda t: t.zero_(), "contradict each other"),
    "scatter halved": ("scatter", lambda t: t.mul_(0.05), "contradict each other"),
    "counts that wrap": ("counts", lambda t: t.copy_(torch.tensor([2**62] * 4 + [0] * 6)), "more than the plausible"),
    "counts that wrap to the right sum": (
        "counts",
        lambda t: t.__setitem__(slice(0, 5), t[:5] + torch.tensor([2**62] * 4 + [0])),
        "more than the plausible",
    ),
}


@pytest.mark.parametrize("kind", ["float32", "int16"])
@pytest.mark.parametrize("lie", LIES)
def test_statistics_that_no_images_could_give_are_refused(lie, kind):
    name, change, reason = LIES[lie]
    packed = {key: tensor.clone() for key, tensor in pack(WHOLE, kind).items()}
    if kind == "int16" and name == "scatter":
        factor = torch.ones(1)
        change(factor)
        packed["scatter#scale"] *= factor.sqrt()
    else:
        change(packed[name])
    assert re.search(reason, complaint(packed, 300, LIMITS))


def test_covariances_that_are_not_positive_are_refused():
    """Every pair of features is possible, all together are not."""
    packed = pack(WHOLE)
    matrix = torch.zeros(MAP.dim, MAP.dim)
    matrix[torch.ones_like(matrix).triu().bool()] = packed["scatter"]
    deviation = matrix.diagonal().sqrt()
    matrix = -0.9 * deviation[:, None] * deviation + torch.diag(1.9 * matrix.diagonal())
    packed["scatter"] = matrix[torch.ones_like(matrix).triu().bool()]
    assert "contradict" in complaint(packed, 300, LIMITS)


@pytest.mark.parametrize("kind", ["float32", "int16"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 50.0])
def test_honest_noise_raises_no_complaint_and_lies_beyond_it_do(epsilon, kind):
    privacy = Privacy(epsilon, 1e-5, clip=0.5)
    bounded = Bounded(MAP, privacy.clip)
    limits = FeatureLimits.of(bounded)
    whole = measure_on_lattice(bounded, DIGITS.images, DIGITS.labels, 10, privacy)
    for seed in range(10):
        noised = privatise(whole, privacy, SeededWords(seed))
        assert complaint(pack(noised, kind), 300, limits, privacy) is None
    lie = {key: tensor.clone() for key, tensor in pack(noised, kind).items()}
    lie["sums"] *= -1e5
    assert "sums has a class of length" in complaint(lie, 300, limits, privacy)
    lie["counts"] *= 10**6
    assert "more than the manifest's 300" in complaint(lie, 300, limits, privacy)
    lie["counts"][0] = 2**62
    assert "more than the plausible" in complaint(lie, 300, limits, privacy)
    if kind == "float32":
        worse = pack(noised)
        worse["scatter"] -= 1e4 * torch.eye(MAP.dim)[torch.ones(MAP.dim, MAP.dim).triu().bool()]
        assert "positive semidefinite" in complaint(worse, 300, limits, privacy)


@pytest.mark.parametrize("mirror", [False, True])
def test_no_image_leaves_the_range_that_a_map_states(mirror):
    features = RandomConv(3, 16, filters=20, mirror=mirror)
    low, high = feature_range(features)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(60, 3, 16, 16, generator=generator)
    filters = (features.banks[0][:10] > 0).float().repeat(1, 1, 6, 6)[:, :, :16, :16]
    images = torch.cat([noise, (noise > 0.5).float(), (noise > 0.98).float(), torch.ones(1, 3, 16, 16), filters])
    phi = features(images).double()
    assert low.shape == high.shape == (features.dim,)
    assert ((phi >= low - 1e-6) & (phi <= high + 1e-6)).all()
    assert float((phi / high).max(0).values.median()) > 0.2  # the range is not an empty promise


def test_pixels_that_are_not_finite_are_named():
    with pytest.raises(TrainingError, match="not finite"):
        measure(MAP, torch.full((2, 1, 8, 8), math.inf), torch.zeros(2, dtype=torch.long), 10)


def test_clipped_features_are_no_longer_than_the_bound():
    clipped = measure(Bounded(MAP, 0.5), DIGITS.images[:1], DIGITS.labels[:1], 10)
    assert float(clipped.gram.trace()) == pytest.approx(0.25)
    phi = Bounded(MAP, 1e6)(DIGITS.images)
    assert torch.allclose(phi, MAP(DIGITS.images) - MAP(DIGITS.images).mean(1, keepdim=True), atol=1e-6)
    assert Bounded(MAP, 1.0).fingerprint() != MAP.fingerprint()


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1.0, 1e-5), (8.0, 1e-6)])
def test_noise_is_the_smallest_that_keeps_the_promise(epsilon, delta):
    sigma = gaussian_noise(epsilon, delta)
    assert gaussian_delta(sigma, epsilon) == pytest.approx(delta, rel=1e-3)
    assert gaussian_delta(sigma / 1.01, epsilon) > delta
    if epsilon <= 1:
        assert sigma < math.sqrt(2 * math.log(1.25 / delta)) / epsilon  # the classic bound is larger
    # the exact curve of continuous noise in one dimension (Balle and Wang 2018) lies below the bound
    exact = norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * norm.cdf(-0.5 / sigma - epsilon * sigma)
    assert delta / 10 < exact < delta


@given(st.integers(0, 10_000))
def test_no_replaced_image_moves_the_statistics_further_than_the_sensitivity(seed):
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(3) for _ in range(2))
    a, b = (v * min(1.0, rng.uniform(0.5, 2.0)) / np.linalg.norm(v) for v in (a, b))
    gram = np.linalg.norm(np.outer(a, a) - np.outer(b, b)) ** 2
    same = gram + np.linalg.norm(a - b) ** 2
    different = gram + a @ a + b @ b + 2 / 4
    assert max(same, different) <= SENSITIVITY**2 + 1e-12


def test_the_sensitivity_is_attained():
    a, b = np.array([1.0, 0.0]), np.array([-0.5, math.sqrt(0.75)])
    gram = np.linalg.norm(np.outer(a, a) - np.outer(b, b)) ** 2
    assert gram + np.linalg.norm(a - b) ** 2 == pytest.approx(SENSITIVITY**2)


def test_noise_has_the_stated_size_and_is_symmetric():
    privacy = Privacy(epsilon=1.0, delta=1e-5, clip=2.0)
    exact = measure_on_lattice(Bounded(MAP, 2.0), DIGITS.images[:40], DIGITS.labels[:40], 10, privacy)
    noised = [privatise(exact, privacy, SeededWords(seed)) for seed in range(30)]
    clear = measure(Bounded(MAP, 2.0), DIGITS.images[:40], DIGITS.labels[:40], 10)
    difference = torch.stack([n.gram - clear.gram for n in noised])
    assert torch.equal(difference, difference.transpose(1, 2))
    off = difference[:, *torch.triu_indices(MAP.dim, MAP.dim, 1)]
    assert float(off.std()) == pytest.approx(4 * privacy.noise / math.sqrt(2), rel=0.05)
    assert float(difference.diagonal(dim1=1, dim2=2).std()) == pytest.approx(4 * privacy.noise, rel=0.1)
    sums = torch.stack([n.sums - clear.sums for n in noised])
    assert float(sums.std()) == pytest.approx(2 * privacy.noise, rel=0.1)
    assert all((n.counts >= 0).all() and torch.equal(n.counts, n.counts.round()) for n in noised)
    assert not torch.equal(noised[0].counts, noised[1].counts)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2, 1.0, 1e4])
def test_sums_on_the_lattice_are_whole_numbers_of_bounded_features(epsilon, monkeypatch):
    privacy = Privacy(epsilon, 1e-5, clip=0.5)
    monkeypatch.setattr(statistics, "BLOCK", 16)
    images, labels = DIGITS.images[:60], DIGITS.labels[:60]
    whole = measure_on_lattice(Bounded(MAP, 0.5), images, labels, 10, privacy)
    parts = [
        measure_on_lattice(Bounded(MAP, 0.5), images[rows], labels[rows], 10, privacy)
        for rows in (slice(0, 7), slice(7, 60))
    ]
    for name in ("gram", "sums", "counts"):
        assert getattr(whole, name).dtype == torch.int64
        assert torch.equal(getattr(whole, name), sum(getattr(part, name) for part in parts))
    step = 0.5 / 2.0**privacy.bits
    clear = measure(Bounded(MAP, 0.5), images, labels, 10)
    assert torch.allclose(whole.sums.double() * step, clear.sums, atol=60 * step)
    phi = on_lattice(10 * torch.randn(50, 30, dtype=torch.float64), privacy)
    assert int((phi.long() ** 2).sum(1).max()) <= 4**privacy.bits
    assert privacy.steps(4.0**privacy.bits) < 1 << 51


def test_features_that_are_not_finite_are_named_before_noise_hides_them():
    with pytest.raises(TrainingError, match="not finite"):
        on_lattice(torch.tensor([[1.0, math.nan]]), Privacy(1.0, 1e-5, 1.0))
