"""Covariances of classes and Gaussian mixtures in an upload: their sums, their packing, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneflare.client.mixtures import fit_mixtures
from oneflare.core.config import DataConfig
from oneflare.data import load
from oneflare.errors import ConfigError
from oneflare.nn.feature_maps import RandomConv
from oneflare.upload.class_statistics import (
    CLASS_SCATTER,
    class_complaint,
    class_layout,
    pack_classes,
    unpack_classes,
)
from oneflare.upload.mixtures import MEANS, VARIANCES, WEIGHTS, mixture_complaint, mixture_layout, pack_mixtures
from oneflare.upload.statistics import FeatureLimits, Plan, offers, parts_for

DIGITS = load(DataConfig(train_size=300)).train
MAP = RandomConv(1, 8, filters=2, mirror=False)
LIMITS = FeatureLimits.of(MAP)
PHI = MAP(DIGITS.images)


def sums(rows):
    phi, labels = PHI[rows].double(), DIGITS.labels[rows]
    held = torch.zeros(10, MAP.dim, dtype=torch.float64).index_add_(0, labels, phi)
    return {"sums": held.float(), "counts": torch.bincount(labels, minlength=10)}


def packed(rows=slice(None), dtype="float32"):
    return pack_classes(PHI[rows], DIGITS.labels[rows], 10, dtype) | sums(rows)


def mixed(rows=slice(None), components=4):
    return pack_mixtures(fit_mixtures(PHI[rows], DIGITS.labels[rows], 10, components)) | sums(rows)


def test_scatters_are_those_of_numpy_and_add_up_to_the_pooled_statistics():
    found = unpack_classes(packed())
    for label in range(10):
        own = PHI[DIGITS.labels == label].double()
        assert torch.allclose(found.scatter(label), torch.cov(own.T, correction=0) * len(own), atol=1e-4)
    wide = PHI.double()
    assert torch.allclose(found.pooled().gram, wide.T @ wide, rtol=1e-6, atol=1e-4)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 4), min_size=300, max_size=300))
def test_the_sum_over_any_partition_is_the_whole(owners):
    whole = unpack_classes(packed())
    owners = torch.tensor(owners)
    parts = [unpack_classes(packed(owners == owner)) for owner in owners.unique()]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.allclose(total.grams, whole.grams, rtol=1e-5, atol=1e-4)
    assert torch.equal(total.counts, whole.counts)
    assert torch.allclose((total - parts[0] + parts[0]).grams, total.grams, rtol=1e-12)


@pytest.mark.parametrize("rows", [[0], [3, 3], [1, 2, 40], list(range(300))])
def test_honest_clients_raise_no_complaint(rows):
    for dtype in ("float32", "int16"):
        assert class_complaint(packed(torch.tensor(rows), dtype), LIMITS) is None
    assert mixture_complaint(mixed(torch.tensor(rows)), LIMITS) is None


def test_int16_loses_at_most_two_to_the_minus_16_of_a_correlation():
    exact, rounded = (unpack_classes(packed(dtype=dtype)) for dtype in ("float32", "int16"))
    for label in range(10):
        deviation = exact.scatter(label).diagonal().clamp(min=0).sqrt()
        bound = 2.0**-16 * 1.05 * torch.outer(deviation, deviation) + 1e-3
        assert bool(((rounded.scatter(label) - exact.scatter(label)).abs() <= bound).all())


def no_images(held):
    held["counts"][3] = 0
    held["sums"][3] = 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: held[CLASS_SCATTER][3].neg_(), "negative variance"),
        (lambda held: held[CLASS_SCATTER][3].mul_(1e4), "more than its feature can have"),
        (lambda held: held[CLASS_SCATTER][3].__setitem__(1, 1e5), "larger than its variances allow"),
        (no_images, "of a class without images"),
    ],
)
def test_impossible_covariances_are_named(change, words):
    held = packed()
    change(held)
    assert words in class_complaint(held, LIMITS)
    assert "class number 3" in class_complaint(held, LIMITS)


def test_covariances_that_are_possible_in_pairs_and_not_together_are_named():
    held = packed()
    matrix = unpack_classes(held).scatter(3)
    deviation = matrix.diagonal().clamp(min=0).sqrt()
    broken = -0.9 * torch.outer(deviation, deviation)
    broken.diagonal().copy_(matrix.diagonal())
    held[CLASS_SCATTER][3] = broken.masked_select(torch.ones_like(broken, dtype=torch.bool).triu()).float()
    assert "not positive semidefinite" in class_complaint(held, LIMITS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: held[WEIGHTS][3].neg_(), "outside 0 to 1"),
        (lambda held: held[WEIGHTS][3].mul_(0.5), "must add up to 1"),
        (no_images, "must add up to 1"),
        (lambda held: held[VARIANCES][3].neg_(), "negative variance"),
        (lambda held: held[VARIANCES][3].add_(1e3), "more than its feature can have"),
        (lambda held: held[MEANS][3].add_(100), "its feature cannot have"),
        (lambda held: held[MEANS].__setitem__(3, held[MEANS][5].clone()), "contradict each other"),
    ],
)
def test_impossible_mixtures_are_named(change, words):
    held = mixed()
    change(held)
    assert words in mixture_complaint(held, LIMITS)


def test_mixtures_have_the_moments_of_their_images():
    found = fit_mixtures(PHI, DIGITS.labels, 10, 3)
    for label in range(10):
        own = PHI[DIGITS.labels == label]
        weights = found.weights[label, :, None]
        mean = (weights * found.means[label]).sum(0)
        square = (weights * (found.variances[label] + found.means[label].square())).sum(0)
        assert torch.allclose(mean, own.mean(0), atol=1e-4)
        assert torch.allclose(square - mean.square(), own.var(0, correction=0), atol=1e-4)
    alone = fit_mixtures(PHI[:1], DIGITS.labels[:1], 10, 3)
    assert int((alone.weights > 0).sum()) == 1


def test_parts_follow_from_needs_and_back():
    assert parts_for({"class_means"}) == ()
    assert parts_for({"statistics", "class_means"}) == ("covariance",)
    assert parts_for({"statistics", "class_covariances", "mixtures"}) == ("class_covariances", "mixtures")
    for needs in ({"class_means"}, {"statistics"}, {"statistics", "class_covariances"}, {"mixtures"}):
        assert needs <= offers(parts_for(needs))


def test_what_no_upload_could_hold_is_refused():
    plan = Plan({"name": "random_conv"}, "", 1280, components=200)
    with pytest.raises(ConfigError, match="1000 classes with 1280 features"):
        class_layout(plan, 1000)
    with pytest.raises(ConfigError, match="statistics_components"):
        mixture_layout(plan, 1000)
    assert class_layout(plan, 10)[CLASS_SCATTER] == ((10, 1280 * 1281 // 2), True)
