"""Sums of products of few images as a factor: the same sums, in fewer numbers, and no more than they say."""

from __future__ import annotations

import pytest
import torch

from oneflare.client.observer import Observer
from oneflare.client.statistics import measure
from oneflare.core.config import DataConfig
from oneflare.data import load
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion import build_fusion
from oneflare.methods.resolve import resolve
from oneflare.nn import build_feature_map
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.upload import read_upload
from oneflare.upload.coding import FINENESS, code_complaint, coded, coder_of, decoded, decoded_step, parsed
from oneflare.upload.factors import equivalent_step, factor, factor_slack, pack_factor, pays, scatter_of
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.statistics import complaint, pack, unpack
from oneflare.upload.words import NO_REST
from shared import forge

DIGITS = load(DataConfig())
SIZE = DIGITS.train.images.shape[-1]
SPEC = {"name": "random_conv", "filters": 12, "mirror": False}
FEATURES = build_feature_map(SPEC, 1, SIZE)
CODER = coder_of(SPEC, 1, SIZE)
LIMITS = FeatureLimits.of(FEATURES)
FEW = {
    "method": "analytic",
    "data": {"train_size": 400, "test_size": 100},
    "analytic": {"name": "paired", "features": 200},
    "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 12, "min_samples": 1},
}


def of_images(n, seed=0):
    rows = torch.randperm(len(DIGITS.train.labels), generator=torch.Generator().manual_seed(seed))[:n]
    return DIGITS.train.images[rows], DIGITS.train.labels[rows]


def packed_factor(n, seed=0):
    images, labels = of_images(n, seed)
    return pack_factor(FEATURES(images), labels, 10)


def uploads_of(folder, *layers):
    experiment = resolve(FEW, *layers)
    made = Simulation.build(experiment, RunFiles(folder), load(experiment.data))
    return made.collect(made.train(Observer()), Observer())


@pytest.mark.parametrize("n", [1, 2, 30, 76])
def test_a_factor_gives_the_sums_that_it_stands_for(n):
    images, labels = of_images(n)
    exact, found = measure(FEATURES, images, labels, 10), packed_factor(n)
    assert len(found["scatter"]) == max(n - 1, 1) * FEATURES.dim
    again = unpack(found)
    assert torch.allclose(again.gram, exact.gram, rtol=1e-5, atol=1e-5 * float(exact.gram.max()))
    assert torch.equal(again.counts, exact.counts)
    scale = scatter_of(pack(exact)).diagonal().clamp(min=1e-12).sqrt()
    apart = (scatter_of(found) - scatter_of(pack(exact))).abs() / (scale[:, None] * scale)
    assert float(apart[scale > 1e-3][:, scale > 1e-3].max() if n > 1 else 0.0) < 1e-4
    assert complaint(found, n, LIMITS) is None


def test_a_factor_is_a_function_of_the_sums_alone():
    phi = FEATURES(of_images(20)[0])
    first = factor(phi)
    generator = torch.Generator().manual_seed(3)
    mixed = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64, generator=generator)).Q
    centred = phi.double() - phi.double().mean(0)
    turned = mixed @ centred  # other rows with the same products, though not the same mean
    assert torch.allclose(turned.T @ turned, first.T @ first, atol=1e-8)
    assert torch.allclose(factor(phi.flip(0)), first, atol=1e-6 * float(first.abs().max()))
    lengths = first.square().sum(1)
    assert torch.allclose(first @ first.T, torch.diag(lengths), atol=1e-8 * float(lengths[0]))
    assert torch.equal(lengths.sort(descending=True).values, lengths)


def test_a_factor_pays_where_images_are_at_most_half_the_features():
    assert pays(50, (100,))
    assert not pays(51, (100,))
    assert not pays(50, (100, 99))


@pytest.mark.parametrize("dtype", ["fine", "coarse"])
@pytest.mark.parametrize("n", [1, 2, 30, 76])
def test_a_factor_in_code_is_as_certain_as_the_agreed_step(n, dtype):
    plain = packed_factor(n)
    words = coded(plain, CODER, dtype)
    products, step = decoded(words)
    assert decoded_step(words) == step
    if n > 1:
        assert 0.5 < step / (FINENESS[dtype] * n**0.5) < 2
        moved = products - CODER.decorrelate(scatter_of(plain)).double()
        assert 0.3 < float(moved.square().mean()) / (step**2 / 12) < 3
        slack = factor_slack(n - 1, products, parsed(words).rows.width)
        assert float(torch.linalg.eigvalsh(moved).abs().max()) < slack
    assert code_complaint(words, LIMITS, CODER) is None


def test_a_factor_in_code_keeps_within_its_room():
    plain = packed_factor(60)
    free = 8 * len(coded(plain, CODER, "fine")["scatter"])
    assert 8 * len(coded(plain, CODER, "coarse", free)["scatter"]) <= free
    tight = coded(plain, CODER, "coarse", free // 2)["scatter"]
    assert 8 * len(tight) <= free // 2


def test_equivalent_steps_are_those_of_simulated_rounding():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 90, dtype=torch.float64, generator=generator) * 3
    rounded = (rows / 0.5).round() * 0.5
    moved = (rounded.T @ rounded - rows.T @ rows).triu(1)
    variance = float(moved.square().sum()) / (90 * 89 / 2)
    assert variance == pytest.approx(equivalent_step(rows, 0.5) ** 2 / 12, rel=0.2)


@pytest.mark.parametrize("layer", [{}, {"upload": {"statistics_dtype": "coarse"}}, {"analytic": {"blocks": 2}}])
def test_small_clients_send_less_and_the_model_is_the_same(tmp_path, layer):
    whole = uploads_of(tmp_path / "whole", layer)
    short = uploads_of(tmp_path / "short", layer, {"upload": {"factors": True}})
    pairs = [(one, two) for one, two in zip(whole, short, strict=True) if 10 < two.samples < 50]
    assert pairs
    assert all(two.file_bytes < one.file_bytes for one, two in pairs)
    fewest, other = min(((two, one) for one, two in pairs), key=lambda both: both[0].samples)
    assert fewest.file_bytes < 0.8 * other.file_bytes
    exact = not layer.get("upload")
    one, two = (
        build_fusion({"name": "analytic"}).fuse(each).model.logits(DIGITS.test.images) for each in (whole, short)
    )
    same = float((one.argmax(1) == two.argmax(1)).float().mean())
    assert same == 1 if exact else same > 0.95
    assert not exact or torch.allclose(one, two, atol=2e-2)


@pytest.mark.parametrize(
    ("length", "match"),
    [(7, "neither products nor a factor"), (0, "has shape"), (232 * 90, "neither products nor a factor")],
)
def test_impossible_factors_are_refused(tmp_path, length, match):
    uploads = uploads_of(tmp_path, {"upload": {"factors": True}})
    own = next(upload for upload in uploads if 10 < upload.samples < 50)
    assert uploads.plan.dim == 232
    forge(own.path, {"statistics.scatter": torch.zeros(length)})
    with pytest.raises(UploadError, match=match) as caught:
        read_upload(own.path, uploads.contract)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        [NO_REST],
        [NO_REST, 0, 0, 0],
        [NO_REST, 0, 10**9, 0],
        [NO_REST, 0, 5, 2, 1, 2],
        [NO_REST, 0, 5, -1, 1, 2],
        [NO_REST, 999, 5, 0],
        [NO_REST + 1, 0, 5, 0],
    ],
)
def test_impossible_code_of_factors_is_refused(words):
    broken = packed_factor(30) | {"scatter": torch.tensor(words)}
    assert "not in the code of sums" in code_complaint(broken, LIMITS, CODER)


def test_factors_that_contradict_the_class_sums_are_refused():
    found = packed_factor(30)
    smaller = found | {"scatter": 0.5 * found["scatter"]}
    assert "contradict each other" in complaint(smaller, 30, LIMITS)
    larger = found | {"scatter": 1e3 * found["scatter"]}
    assert "more than its feature can have" in complaint(larger, 30, LIMITS)


@pytest.mark.parametrize(
    "upload",
    [
        {"statistics_dtype": "int16"},
        {"masked": True},
        {"statistics_epsilon": 1.0, "counts": "withheld"},
        {"statistics": ["class_covariances"]},
    ],
)
def test_terms_that_factors_do_not_fit_are_refused(upload):
    with pytest.raises(ConfigError, match=r"upload\.factors") as caught:
        resolve(FEW, {"upload": {"factors": True, **upload}})
    assert "\n" not in str(caught.value)
