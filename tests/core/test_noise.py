"""The noise of differential privacy: its law against an independent one, and where its randomness comes from."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import secrets
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from hospitals import digits, tiny_charter
from oneflare.client.statistics import client_statistics, measure, measure_on_lattice, privatise
from oneflare.core import noise
from oneflare.core.noise import SeededWords, discrete_gaussian, discrete_laplace, noise_words, system_words
from oneflare.core.privacy import Privacy
from oneflare.data import ClientData, Split
from oneflare.federation.ledger import Ledger
from oneflare.federation.member import make_upload
from oneflare.nn import build_feature_map
from oneflare.upload import read_layout, read_tensors
from oneflare.upload.statistics import Statistics, pack
from oneflare.upload.writing import disclose
from reliability.record import record_door

PRIVATE = {
    "method": "analytic",
    "analytic": {"name": "random_conv", "filters": 4},
    "upload": {"statistics_epsilon": 1.0, "counts": "withheld"},
}


def gaussian_law(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Integers and their probabilities under the discrete Gaussian, summed directly."""
    x = np.arange(-math.ceil(12 * sigma), math.ceil(12 * sigma) + 1)
    weights = np.exp(-(x**2) / (2 * sigma**2))
    return x, weights / weights.sum()


def chi_square(sample: np.ndarray, x: np.ndarray, law: np.ndarray) -> float:
    """p-value of a sample against a law on the integers; rare values are counted together."""
    common = law * len(sample) >= 10
    expected = np.append(law[common], law[~common].sum()) * len(sample)
    seen = np.array([(sample == value).sum() for value in x[common]])
    return float(stats.chisquare(np.append(seen, len(sample) - seen.sum()), expected).pvalue)


@pytest.mark.parametrize("sigma", [1, 2, 7, 60])
def test_the_gaussian_follows_its_law(sigma):
    sample = discrete_gaussian(40_000, sigma, SeededWords(0, sigma))
    x, law = gaussian_law(sigma)
    assert chi_square(sample, x, law) > 1e-3
    assert sample.mean() == pytest.approx(0, abs=4 * sigma / 200)
    assert sample.var() == pytest.approx(float((law * x**2).sum()), rel=0.04)
    rounded = np.rint(sigma * np.random.default_rng(0).standard_normal(40_000)).astype(int)
    if sigma == 1:  # the test can tell the law from a rounded continuous one
        assert chi_square(rounded, x, law) < 1e-6


@pytest.mark.parametrize("sigma", [9 * 2**40, 3 * 2**20 + 1])
def test_a_wide_gaussian_is_the_continuous_one_to_any_eye(sigma):
    sample = discrete_gaussian(40_000, sigma, SeededWords(1, sigma))
    assert stats.kstest(sample / sigma, "norm").pvalue > 1e-3
    assert stats.kurtosis(sample / sigma) == pytest.approx(0, abs=0.1)
    low = np.bincount(sample & 15, minlength=16)  # the last bits of floating-point noise are not uniform
    assert stats.chisquare(low).pvalue > 1e-3


@pytest.mark.parametrize(("scale", "step"), [(1, 1), (5, 1), (7, 3), (1 << 40, (1 << 40) // 10)])
def test_the_laplace_follows_its_law(scale, step):
    sample = discrete_laplace(40_000, scale, step, SeededWords(2, scale, step))
    rate = step / scale
    law = stats.dlaplace(rate)
    x = np.arange(-int(40 / rate) - 1, int(40 / rate) + 2)
    assert chi_square(sample, x, law.pmf(x)) > 1e-3
    assert sample.var() == pytest.approx(law.var(), rel=0.06)


def test_a_coin_too_close_to_call_is_decided_exactly(monkeypatch):
    """With a tolerance that leaves every coin to exact arithmetic, the same words give the same answers."""
    quick = discrete_gaussian(300, 1000, SeededWords(3))
    monkeypatch.setattr(noise, "TOLERANCE", 2.0)
    assert np.array_equal(discrete_gaussian(300, 1000, SeededWords(3)), quick)
    third = math.exp(-Fraction(1, 3))
    near = int(third * 2**64)  # equal to exp(-1/3) in its first 53 bits
    answers = {noise._certain_coin(near + far, Fraction(1, 3), system_words) for far in (-(1 << 20), 1 << 20)}
    assert answers == {True, False}
    for bits in (64, 200, 1000):
        low, high = noise._exp_bounds(Fraction(22, 7), bits)
        assert low < high
        assert high - low < Fraction(1, 1 << bits)
        assert float(low) == pytest.approx(math.exp(-22 / 7), rel=1e-12)


def test_scales_beyond_64_bits_are_refused():
    with pytest.raises(ValueError, match="between 1 and"):
        discrete_gaussian(1, 1 << 53, system_words)


def test_counts_are_noised_by_whole_numbers():
    told = disclose(torch.full((20_000,), 1000), "noised", 0.5, SeededWords(4))
    assert told.dtype == torch.int64
    assert float((told - 1000).double().std()) == pytest.approx(stats.dlaplace(0.5).std(), rel=0.05)
    assert int(disclose(torch.zeros(50).long(), "noised", 0.1, system_words).min()) == 0
    assert torch.equal(disclose(torch.tensor([3, 0]), "noised", 1e9, system_words), torch.tensor([3, 0]))


OTHERS = (
    (torch, ("Generator", "randn", "rand", "randint", "normal", "randperm")),
    (np.random, ("default_rng", "normal", "standard_normal", "laplace", "Generator", "RandomState")),
    (random, ("random", "gauss", "Random", "getrandbits")),
    (secrets, ("randbits",)),  # a seed
    (hashlib, ("shake_256",)),  # the stream of simulations
)


@contextlib.contextmanager
def watched(others: bool = False) -> Iterator[list[int]]:
    """Sizes that were asked of the operating system; unless `others`, every other source is an error."""
    drawn: list[int] = []
    urandom = os.urandom

    def record(size: int) -> bytes:
        drawn.append(size)
        return urandom(size)

    def refuse(*_, **__):
        raise AssertionError("noise was drawn from a generator with a state that can be guessed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", record)
        for owner, name in [(owner, name) for owner, names in OTHERS for name in names if not others]:
            patch.setattr(owner, name, refuse)
        yield drawn


def some_digits(number: int = 12) -> ClientData:
    train = digits()[0]
    return ClientData.of(Split(train.images[:number], train.labels[:number]), 10)


def test_all_noise_comes_from_the_operating_system(tmp_path):
    charter, data = tiny_charter(settings=PRIVATE), some_digits()
    plan = charter.contract.statistics
    features = build_feature_map(plan.feature_map, 1, 8, plan.bound)  # its filters are drawn from a seed, and public
    exact = measure_on_lattice(features, data.images, data.labels, 10, plan.privacy)
    least = 8 * (plan.dim * (plan.dim + 1) // 2 + 10 * plan.dim + 10)  # a word for every number that is sent
    with watched() as drawn:
        privatise(exact, plan.privacy, noise_words(None))
        assert sum(drawn) > least
        drawn.clear()
        disclose(data.counts, "noised", 1.0, noise_words(None))
        assert sum(drawn) > 8 * 10
    with watched(others=True) as drawn:  # what a member really calls
        client_statistics(charter.job("north", tmp_path), data)
        assert sum(drawn) > least


def test_a_simulations_seed_repeats_its_noise_and_asks_the_system_nothing():
    with watched(others=True) as drawn:
        once, again, other = (discrete_gaussian(50, 9, noise_words(seed, 0, "counts")) for seed in (1, 1, 2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    assert drawn == []


def seeded_noise(seed: int, dim: int, classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise for G, b and n of size one, as it was once drawn: from torch's generator, in this order."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    upper = normal(dim, dim).triu(1) / math.sqrt(2)
    gram = upper + upper.T + torch.diag(normal(dim))
    return gram, normal(classes, dim), normal(classes)


def seeded_upload(exact: Statistics, privacy: Privacy, seed: int) -> dict[str, torch.Tensor]:
    """An upload whose noise comes from a seed."""
    sigma, bound = privacy.noise, privacy.clip
    gram, sums, counts = seeded_noise(seed, len(exact.gram), len(exact.counts))
    noised = Statistics(
        exact.gram + bound**2 * sigma * gram,
        exact.sums + bound * sigma * sums,
        (exact.counts + 2 * sigma * counts).round().clamp(min=0),
    )
    return pack(noised)


def likest_seed(sums: torch.Tensor, seeds: range) -> tuple[int, float]:
    """The seed whose noise is most like what was sent, and its correlation with it; the size of the noise is free."""
    sent = sums.double().flatten() / sums.double().norm()
    best, found = -1, -1.0
    for seed in seeds:
        guess = seeded_noise(seed, sums.shape[1], sums.shape[0])[1].flatten()
        likeness = float(sent @ guess / guess.norm())
        if likeness > found:
            best, found = seed, likeness
    return best, found


@pytest.mark.soak
def test_subtracting_the_noise_needs_the_operating_systems_secret(tmp_path):
    """The attack that works against noise from a seeded generator: draw the noise of every seed and subtract it.

    torch's generator uses 32 bits of its seed, so a secret of 62 bits leaves four thousand million to try. The search
    here goes through some of them, finds one that was planted, and gets the exact sums back; on an upload of today it
    finds no seed that is more like the noise than chance makes the likest of as many.
    """
    charter, data = tiny_charter(settings=PRIVATE), some_digits(60)
    plan = charter.contract.statistics
    exact = measure(build_feature_map(plan.feature_map, 1, 8, plan.bound), data.images, data.labels, 10)
    seeds, planted = range(10_000), 7_213
    secret = 0x2B7E_1516 << 32 | planted  # 62 bits
    old = seeded_upload(exact, plan.privacy, secret)["sums"]
    found, likeness = likest_seed(old, seeds)
    assert found == planted
    assert likeness > 0.9
    guess = plan.privacy.clip * plan.privacy.noise * seeded_noise(found, plan.dim, 10)[1]
    assert torch.allclose(old.double() - guess, exact.sums, atol=1e-4)  # what the noise was to hide

    sent = []
    for name in ("a", "b"):
        folder = tmp_path / name
        path = make_upload(charter, data, folder / "n.safetensors", member="north", ledger=Ledger(folder)).path
        manifest, _ = read_layout(path)
        sent.append(read_tensors(path, manifest, "statistics.sums")["statistics.sums"].double())
    difference = float((sent[0] - sent[1]).std())
    assert difference == pytest.approx(plan.privacy.clip * plan.privacy.noise * math.sqrt(2), rel=0.2)
    today = max(likest_seed(sums, seeds)[1] for sums in sent)
    chance = math.sqrt(2 * math.log(2 * len(seeds)) / sent[0].numel())
    assert today < 1.5 * chance < 0.9
    record_door(
        "noise",
        promise="the noise of differential privacy cannot be drawn again and subtracted",
        tried=f"a coordinator: {len(seeds):,} seeds of torch's generator, drawn in the order that a seeded noise had, "
        "against an upload with such noise and a planted seed, and against two private uploads of the same data",
        outcome=f"the planted seed is found (correlation {likeness:.2f}), the exact sums with it; of a private upload "
        f"the likest seed has {today:.2f}, as chance gives ({chance:.2f}): all of its noise comes from the operating "
        "system, every other generator being an error in the test",
    )
